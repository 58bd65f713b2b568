"""Unified cards: a Wan2.1 card, of any of its sources, with a refiner in front, of any that :mod:`cards.qwen3` reads.

The refiner's folder is a source of its own beside the generator's; an export holds both, the refiner in ``llm/``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from cards.card import CARD_FILE, Component, LoopSpec, ModelCard, Source
from cards.errors import UserError
from cards.qwen3 import card as qwen3
from cards.source import OWN_FOLDER, SourceError, parse_source, resolve_folder
from cards.unified.program import REFINE, refined
from cards.wan21 import card as wan21

FAMILY = "unified"
TASK = wan21.TASK
LLM, LLM_TOKENIZER = "llm", "llm_tokenizer"
BUNDLED = Source(kind="bundled", location="unified/weights/tiny")
PUBLISHED = "0.6b"
"""Size of the published Qwen3 that refines for generators that are not bundled."""
SYSTEM = (
    "Rewrite the instruction as one prompt for a video generator: say what is seen, in plain words. "
    "Answer with the prompt alone."
)
"""What the refiner is told before the instruction."""


def build_card(
    size: str, *, source: str | None = None, revision: str | None = None, refiner: str | None = None
) -> ModelCard:
    """The card of a size.

    Args:
        source: of the generator: a Wan2.1 folder, an export or run of the family ``wan21`` or hub id; None takes the
            size's own. An export of this family brings its own refiner.
        refiner: folder of a ``Qwen3ForCausalLM`` with its tokenizer, an export of this family, or hub id of a published
            Qwen3; None takes the bundled one for ``tiny`` and Qwen3-0.6B for the others.
    """
    if source is not None:
        exported = Path(source).expanduser() / "export"
        source = str(exported) if (exported / CARD_FILE).is_file() else source
        folder = Path(source).expanduser()
        if (folder / CARD_FILE).is_file():
            card = ModelCard.load(folder)
            if card.family == FAMILY:
                return card if refiner is None else with_refiner(card, refiner_card(refiner))
    generator = wan21.build_card(size, source=source, revision=revision)
    if refiner is None and size != "tiny":
        return unify(generator, qwen3.build_card(PUBLISHED))
    return unify(generator, _bundled() if refiner is None else refiner_card(refiner))


def card_from_folder(folder: Path) -> ModelCard:
    """The card of an export, or of a plain Wan2.1 folder with a refiner in ``llm/``."""
    if (folder / CARD_FILE).is_file():
        return ModelCard.load(folder)
    refiner = folder / LLM
    if not refiner.is_dir():
        raise SourceError(f"{folder} holds no {LLM}/; expected the folder of a {qwen3.CLASS} with its tokenizer")
    card = unify(wan21.card_from_folder(folder), qwen3.card_from_folder(refiner))
    return card.model_copy(update={"components": beside(card.components)})


def beside(components: Mapping[str, Component]) -> dict[str, Component]:
    """The components of a folder that holds the refiner in ``llm/``."""
    there = {"subfolder": LLM, "source": None, "beside": True}
    return {
        cid: component.model_copy(update=there) if cid in (LLM, LLM_TOKENIZER) else component
        for cid, component in components.items()
    }


def refiner_card(place: str) -> ModelCard:
    """The text card of a refiner: of a folder, of the ``llm/`` of an export, or of a published Qwen3 by its hub id."""
    parsed = parse_source(place)
    if parsed.kind == "folder":
        folder = Path(parsed.location)
        return qwen3.card_from_folder(folder / LLM if (folder / LLM / "config.json").is_file() else folder)
    sizes = [size for size in qwen3._CONFIGS if place.lower().endswith(f"qwen3-{size}")]
    if not sizes:
        raise UserError(
            f"got the refiner {place!r}, expected a folder or one of: "
            f"{', '.join(f'Qwen/Qwen3-{size.upper()}' for size in qwen3._CONFIGS)}"
        )
    return qwen3.build_card(sizes[0], source=place)


def _bundled() -> ModelCard:
    card = qwen3.card_from_folder(resolve_folder(BUNDLED))
    return card.model_copy(update={"source": BUNDLED})


def unify(generator: ModelCard, refiner: ModelCard) -> ModelCard:
    """A child of the generator's card whose prompts are rewritten by the refiner of a text card."""
    return with_refiner(behind(generator, FAMILY, (REFINE,)), refiner)


def behind(generator: ModelCard, family: str, refinements: Sequence[str]) -> ModelCard:
    """A child of the generator's card whose prompts go through these refinements first; the caller brings those."""
    if generator.family != "wan21":
        raise UserError(
            f"got a generator of the family {generator.family!r}, expected 'wan21': an export of another family cannot "
            "stand behind a refiner"
        )
    source = generator.source
    if source.location == OWN_FOLDER and generator.root is not None:
        source = Source(kind="folder", location=str(generator.root))
    return generator.derive(
        name=f"{family}-{generator.size}",
        family=family,
        source=source,
        programs={**generator.programs, TASK: refined(generator.programs[TASK], refinements)},
        recipe=generator.recipe.model_copy(update={"method": family, "data": _data(generator.recipe.data)}),
    )


def _data(generators: str) -> str:
    """What a card's weights were made from: no longer the generator's prompts alone."""
    return f"{generators} behind a refiner" if generators else ""


def with_refiner(
    card: ModelCard,
    refiner: ModelCard,
    *,
    refinement: str = REFINE,
    llm: str = LLM,
    system: str = SYSTEM,
    handed_on: bool = False,
) -> ModelCard:
    """The card with the refiner of a text card in the place of its own, if it had one.

    Args:
        refinement: id of its node and loop.
        llm: id of its component.
        system: what it is told before the instruction.
        handed_on: it reads what another model wrote, however long.
    """
    own = refiner.source
    if refiner.root is not None and own.location == OWN_FOLDER:
        own = Source(kind="folder", location=str(refiner.root))
    part = {"subfolder": OWN_FOLDER, "source": own}
    lm, tokenizer = refiner.components["lm"], refiner.components["tokenizer"]
    llm_tokenizer = f"{llm}_tokenizer"
    components: dict[str, Component] = {
        **{cid: c for cid, c in card.components.items() if cid not in (llm, llm_tokenizer)},
        llm: lm.model_copy(update={**part, "required_for": (TASK,)}),
        llm_tokenizer: tokenizer.model_copy(update={**part, "required_for": (TASK,)}),
    }
    loop = LoopSpec(
        kind="ar_decode",
        unit="AR_TOKEN",
        components={"lm": llm, "tokenizer": llm_tokenizer},
        semantics=qwen3.SEMANTICS,
        caches=("kv",),
        dynamic_stop=True,
        options={"system": system, "behaviour": True, **({"keeps_end": True} if handed_on else {})},
    )
    return card.model_copy(
        update={
            "components": components,
            "loops": {**card.loops, refinement: loop},
            "sampling": card.sampling.model_copy(update={"text": refiner.sampling.text}),
            "caches": tuple(dict.fromkeys((*card.caches, "kv"))),
        }
    )
