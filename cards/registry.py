"""Name -> family. Every miss lists the valid names."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from cards.card import ModelCard
from cards.errors import UserError, unknown_name


@dataclass(frozen=True)
class Family:
    """What a family offers; its folder holds card.py, components.py and program.py."""

    name: str
    pipeline_classes: tuple[str, ...]
    """``_class_name`` values of model_index.json that the family can read."""
    sizes: tuple[str, ...]
    module: str
    architectures: tuple[str, ...] = ()
    """``architectures`` of a transformers config.json that the family can read."""

    options: tuple[str, ...] = ()
    """Further options of its cards."""

    def card(self, size: str, source: str | None = None, revision: str | None = None, **options: Any) -> ModelCard:
        """The card of a size, or of a local folder or hub id given as ``source``; ``options`` are the family's own."""
        if size not in self.sizes:
            raise unknown_name(f"size of card {self.name!r}", size, self.sizes)
        for name in options:
            if name not in self.options:
                raise unknown_name(f"option of card {self.name!r}", name, self.options)
        build = importlib.import_module(f"{self.module}.card").build_card
        return build(size, source=source, revision=revision, **options)

    def card_from_folder(self, folder: Path) -> ModelCard:
        """The card of a diffusers or transformers folder that holds no card.json, read off its configs."""
        return importlib.import_module(f"{self.module}.card").card_from_folder(folder)

    def operations(self) -> dict[tuple[str, str], Callable[..., Any]]:
        """(component kind, operation) -> function (module, tensors, static) -> tensor with a leading batch dim."""
        return importlib.import_module(f"{self.module}.components").OPERATIONS

    def peak_bytes(self) -> dict[tuple[str, str], Callable[..., int]]:
        """(component kind, operation) -> function (config, ``cards.memory.ForwardSize``) -> worst-case bytes of the
        forward's activations; empty for a family that has none."""
        return _of_memory(self.module, "PEAK_BYTES")

    def held_bytes(self) -> dict[str, Callable[..., int]]:
        """Component kind -> function (config, tokens) -> bytes that a request holds of its tokens from step to step,
        such as keys and values; empty for a family that has none."""
        return _of_memory(self.module, "HELD_BYTES")

    def kept_bytes(self) -> dict[tuple[str, str], Callable[..., int]]:
        """(component kind, operation) -> function (config, size) -> bytes that a request holds between two calls of it,
        such as a causal decoder's features; empty for a family that has none."""
        return _of_memory(self.module, "KEPT_BYTES")

    def condition_shapes(self) -> dict[str, Callable[..., tuple[int, ...]]]:
        """Tensor that the denoiser takes beside latents, timestep and text -> function (component -> config, latent
        shape (C, T, H, W)) -> its shape for one clip; empty for a family that takes none."""
        return _of_memory(self.module, "CONDITION_SHAPES")

    def prepare(self) -> dict[str, Callable[..., Any]]:
        """Operation -> function that turns slots into the tensors of its call (tokenising, normalising)."""
        return importlib.import_module(f"{self.module}.components").PREPARE


@cache
def _of_memory(module: str, table: str) -> dict[Any, Callable[..., Any]]:
    if importlib.util.find_spec(f"{module}.memory") is None:
        return {}
    return getattr(importlib.import_module(f"{module}.memory"), table, {})


FAMILIES: dict[str, Family] = {
    "multi_expert": Family(
        "multi_expert", (), ("tiny", "1.3b", "14b"), "cards.multi_expert", options=("experts", "refiners")
    ),
    "qwen3": Family("qwen3", (), ("0.6b", "1.7b", "4b", "8b"), "cards.qwen3", ("Qwen3ForCausalLM",)),
    "reward": Family("reward", (), ("tiny", "clip-l14", "clip-b32"), "cards.reward", ("CLIPModel",)),
    "unified": Family("unified", (), ("tiny", "1.3b", "14b"), "cards.unified", options=("refiner",)),
    "wan21": Family("wan21", ("WanPipeline",), ("tiny", "1.3b", "14b"), "cards.wan21"),
    "wan21_i2v": Family("wan21_i2v", ("WanImageToVideoPipeline",), ("14b", "tiny"), "cards.wan21_i2v"),
    "wan_causal": Family(
        "wan_causal", (), ("tiny", "1.3b", "14b"), "cards.wan_causal", options=("chunk", "window", "sinks", "actions")
    ),
}


def family(name: str) -> Family:
    """The family called ``name``; raises ``UserError`` with the list of names."""
    if name not in FAMILIES:
        raise unknown_name("card", name, FAMILIES)
    return FAMILIES[name]


def family_of_pipeline(class_name: str, where: str) -> Family:
    """The family that reads a diffusers pipeline class."""
    for entry in FAMILIES.values():
        if class_name in entry.pipeline_classes:
            return entry
    readable = sorted(name for entry in FAMILIES.values() for name in entry.pipeline_classes)
    raise UserError(f"{where}: got a {class_name} folder, expected one of: {', '.join(readable)}")


def family_of_architectures(names: Sequence[str], where: str) -> Family:
    """The family that reads a transformers folder by the ``architectures`` of its config.json."""
    for entry in FAMILIES.values():
        if set(names) & set(entry.architectures):
            return entry
    readable = sorted(name for entry in FAMILIES.values() for name in entry.architectures)
    raise UserError(f"{where}: got architectures {list(names)}, expected one of: {', '.join(readable)}")
