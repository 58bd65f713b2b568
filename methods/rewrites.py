"""What is asked of a rewritten prompt beside its video: the format reward, and whether it still means the same.

A format is named: one of ``FORMATS`` or the dotted path of a function of the text. Every format asks that the language
model ended the text by itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from hydra.utils import get_method

from cards.errors import UserError, unknown_name
from loops.ar_decode import Completion
from methods.shapeworld.scene import Scene, canonical, parse


class Format(ABC):
    """Base of all formats."""

    def reward(self, rewrite: Completion) -> float:
        """1 for a text that ended and is well formed, else 0."""
        return float(rewrite.finish == "stop" and self.well_formed(rewrite.text))

    @abstractmethod
    def well_formed(self, text: str) -> bool:
        """Whether the words alone are as a prompt should be."""

    def keeps_meaning(self, text: str, metadata: Mapping[str, Any]) -> float:
        """1 where the text says what the prompt's metadata says, 0 where not, NaN where that cannot be told."""
        return float("nan")

    def parts_kept(self, text: str, metadata: Mapping[str, Any]) -> dict[str, float]:
        """The same by part of the meaning, for the parts that the prompt asks for; none where that cannot be told."""
        return {}


class Ended(Format):
    """Any words, some at least."""

    def well_formed(self, text: str) -> bool:
        return bool(text.strip())


class Caption(Format):
    """A caption of ShapeWorld, as its generator knows them; ``meaning`` in a prompt's metadata is one too."""

    def well_formed(self, text: str) -> bool:
        try:
            parse(text)
        except UserError:
            return False
        return True

    def keeps_meaning(self, text: str, metadata: Mapping[str, Any]) -> float:
        if "meaning" not in metadata:
            return float("nan")
        return float(self.well_formed(text) and canonical(parse(text)) == canonical(parse(metadata["meaning"])))

    def parts_kept(self, text: str, metadata: Mapping[str, Any]) -> dict[str, float]:
        """By the names that ShapeEval has for them."""
        if "meaning" not in metadata:
            return {}
        meant = parse(metadata["meaning"])
        said = parse(text) if self.well_formed(text) else None
        asked = {"colour", "shape"}
        asked |= {"motion"} if meant.motion is not None else set()
        asked |= {"position"} if meant.kind == "pair" else {"count"} if meant.kind == "count" else set()
        return {part: float(said is not None and _part(part, said) == _part(part, meant)) for part in sorted(asked)}


def _part(part: str, scene: Scene) -> Any:
    """What a scene says of one part, the same for two ways of saying it; of a place, which colour is on which side."""
    if part in ("colour", "shape"):
        return sorted(getattr(thing, part) for thing in scene.things)
    if part == "position":
        _, things, _, relation, _ = canonical(scene)
        return relation, [colour for colour, _ in things]
    return getattr(scene, part)


class Function(Format):
    """A function of the text that gives a truth value, by its dotted path."""

    def __init__(self, path: str):
        try:
            self.function: Callable[[str], Any] = get_method(path)
        except Exception as error:
            raise UserError(f"method format: got {path!r}, which is no function to import: {error}") from None

    def well_formed(self, text: str) -> bool:
        return bool(self.function(text))


FORMATS: dict[str, type[Format]] = {"caption": Caption, "ended": Ended}


def make_format(name: str) -> Format:
    """The format called ``name``, or of the function at that dotted path."""
    if name in FORMATS:
        return FORMATS[name]()
    if "." not in str(name):
        raise unknown_name("method format (or a function's dotted path)", str(name), FORMATS)
    return Function(name)
