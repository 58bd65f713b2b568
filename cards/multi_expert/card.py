"""Cards of a chain of experts: a Wan2.1 card, of any of its sources, behind one refiner for each of a list of names.

Expert ``colour`` is the component ``llm_colour``, told by a system message of its own to care for the colour alone, in
the node and loop ``refine_colour``. Each has a source of its own, be it the same; an export holds every one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from cards.card import CARD_FILE, ModelCard, Source
from cards.errors import UserError
from cards.multi_expert.program import refinement
from cards.qwen3 import card as qwen3
from cards.source import SourceError, resolve_folder
from cards.unified.card import PUBLISHED, TASK, behind, refiner_card, with_refiner
from cards.wan21 import card as wan21

FAMILY = "multi_expert"
EXPERTS = ("colour", "shape", "motion")
BUNDLED = Source(kind="bundled", location="multi_expert/weights/tiny")


def component_of(expert: str) -> str:
    """Id of an expert's language model."""
    return f"llm_{expert}"


def system_of(expert: str) -> str:
    """What an expert is told before the text."""
    return (
        "You are one of several who rewrite an instruction for a video generator. Put its "
        f"words of {expert} plainly and leave all others as they are. Answer with the text alone."
    )


def build_card(
    size: str,
    *,
    source: str | None = None,
    revision: str | None = None,
    experts: Sequence[str] = EXPERTS,
    refiners: str | Mapping[str, str] | None = None,
) -> ModelCard:
    """The card of a size.

    Args:
        source: of the generator: a Wan2.1 folder, an export or run of the family ``wan21`` or hub id; None takes the
            size's own. An export of this family brings its own experts.
        experts: their names, in the order in which they rewrite; any number of them.
        refiners: what they begin as: folder of a ``Qwen3ForCausalLM`` with its tokenizer or hub id of a published
            Qwen3, one for all or expert -> its own; None takes the bundled one for ``tiny`` and Qwen3-0.6B for others.
    """
    experts = check_experts(experts)
    places = dict(refiners) if isinstance(refiners, Mapping) else dict.fromkeys(experts, refiners)
    if set(places) != set(experts):
        raise UserError(
            f"card refiners: got {', '.join(places) or 'none'}, expected one place for each of {', '.join(experts)}"
        )
    if source is not None:
        exported = Path(source).expanduser() / "export"
        folder = exported if (exported / CARD_FILE).is_file() else Path(source).expanduser()
        source = str(folder) if (folder / CARD_FILE).is_file() else source
        if (folder / CARD_FILE).is_file():
            card = ModelCard.load(folder)
            if card.family == FAMILY:
                return _exported(card, experts, {name: place for name, place in places.items() if place is not None})
    card = behind(wan21.build_card(size, source=source, revision=revision), FAMILY, [refinement(e) for e in experts])
    for expert, place in places.items():
        card = with_expert(card, expert, _start(size) if place is None else refiner_card(place))
    return card


def check_experts(experts: Sequence[str]) -> tuple[str, ...]:
    """The names as a tuple; raises ``UserError`` unless they are words, each once."""
    names = () if isinstance(experts, str) else tuple(experts)
    if not names or len(set(names)) != len(names) or not all(str(name).isidentifier() for name in names):
        raise UserError(f"card experts: got {experts!r}, expected a list of words, each once, such as {list(EXPERTS)}")
    return names


def experts_of(card: ModelCard) -> tuple[str, ...]:
    """Names of a card's experts, in the order in which they rewrite."""
    refinements = (node.id for node in card.programs[TASK].nodes if node.writes == "prompt")
    return tuple(name.removeprefix(refinement("")) for name in refinements)


def with_expert(card: ModelCard, expert: str, refiner: ModelCard) -> ModelCard:
    """The card with the model of a text card as one of its experts; all share the bounds of a text."""
    of_others = card.sampling.text
    if of_others not in (None, refiner.sampling.text) and len(experts_of(card)) > 1:
        raise UserError(
            f"expert {expert!r}: its model has the text bounds {refiner.sampling.text}, expected those of the experts "
            f"before it, {of_others}; take models of one family and size of context"
        )
    return with_refiner(
        card,
        refiner,
        refinement=refinement(expert),
        llm=component_of(expert),
        system=system_of(expert),
        handed_on=expert != experts_of(card)[0],
    )


def _start(size: str) -> ModelCard:
    """What experts begin as where nobody says."""
    if size != "tiny":
        return qwen3.build_card(PUBLISHED)
    card = qwen3.card_from_folder(resolve_folder(BUNDLED))
    return card.model_copy(update={"source": BUNDLED})


def _exported(card: ModelCard, experts: tuple[str, ...], places: Mapping[str, str]) -> ModelCard:
    """An export of this family, with other models for the experts in ``places``."""
    if experts_of(card) != experts:
        raise UserError(
            f"card experts: got {', '.join(experts)}, but the export has {', '.join(experts_of(card))}; "
            f"use card.experts=[{','.join(experts_of(card))}]"
        )
    for expert, place in places.items():
        card = with_expert(card, expert, refiner_card(place))
    return card


def card_from_folder(folder: Path) -> ModelCard:
    """The card of an export: no other file tells a chain."""
    if not (folder / CARD_FILE).is_file():
        raise SourceError(
            f"{folder} holds no {CARD_FILE}, which tells the order of the experts; expected an export, or use "
            "card=multi_expert with card.source and card.refiners"
        )
    return ModelCard.load(folder)
