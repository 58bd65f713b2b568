"""Causal Wan2.1 cards: those of ``cards.wan21`` with the chunked rollout as their loop.

The weights are the base's own, made for its loop and for bidirectional attention: no method has fitted them to this
one. Such a card says so (recipe method ``untrained``, the base among its parents) and runs all the same, since a
method's first rollout, its evaluation before training and the parity gates do run it; what it generates is poor. A
trained one names its method.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import JsonValue

from cards.card import CARD_FILE, LoopSpec, ModelCard, Recipe, Schedule
from cards.prediction import NUM_TRAIN_TIMESTEPS, shift_sigma
from cards.wan21 import card as wan21
from cards.wan_causal.program import TEXT_TO_VIDEO

TASK = wan21.TASK
FAMILY = "wan_causal"
SEMANTICS = "causal-chunk-rollout"
TRANSFORMER = "CausalWanTransformer3DModel"
UNTRAINED = "untrained"
TIMESTEPS = (1000, 750, 500, 250)
"""Self Forcing's ladder (arXiv 2506.08009, Sec. 4.1), before the shift."""
SHIFT = 5.0
CHUNK = {"tiny": 1, "1.3b": 3, "14b": 3}
"""Latent frames a chunk."""


def build_card(
    size: str,
    *,
    source: str | None = None,
    revision: str | None = None,
    chunk: int | None = None,
    window: int | None = None,
    sinks: int | None = None,
) -> ModelCard:
    """The causal card of a size or of a Wan2.1 folder, run or export; an export of a causal card is read as it is.

    Args:
        chunk: latent frames a chunk; None takes the size's, or the export's own.
        window: chunks that attention sees, the current one among them; None = all, or the export's own.
        sinks: first chunks that it sees for ever beyond the window.
    """
    base = wan21.build_card(size, source=source, revision=revision)
    options = {k: v for k, v in (("chunk", chunk), ("window", window), ("sinks", sinks)) if v is not None}
    if base.family != FAMILY:
        return causal_card(base, **options)
    return with_rollout(base, **options) if options else base


def card_from_folder(folder: Path) -> ModelCard:
    """The causal card of a folder: its card.json when it holds one of this family, else of what it holds."""
    base = ModelCard.load(folder) if (folder / CARD_FILE).is_file() else wan21.card_from_folder(folder)
    return base if base.family == FAMILY else causal_card(base)


def causal_card(base: ModelCard, *, chunk: int | None = None, **options: JsonValue) -> ModelCard:
    """The causal child of a Wan2.1 card: its weights under another attention and another loop, not trained for them.

    ``options``: further ones of loop kind ``chunk_rollout``, such as ``window``.
    """
    loop = LoopSpec(
        kind="chunk_rollout",
        unit="CHUNK_STEP",
        solver="lcm",
        schedule=Schedule(shift=SHIFT, ladder=tuple(shift_sigma(t / NUM_TRAIN_TIMESTEPS, SHIFT) for t in TIMESTEPS)),
        components={"denoiser": "transformer", "decoder": "vae"},
        semantics=SEMANTICS,
        caches=("slab",),
        options={"chunk": CHUNK[base.size] if chunk is None else chunk, **options},
    )
    transformer = base.components["transformer"]
    return base.derive(
        name=f"wan-causal-{base.size}",
        family=FAMILY,
        components={**base.components, "transformer": transformer.model_copy(update={"class_name": TRANSFORMER})},
        loops={"denoise": loop},
        programs={TASK: TEXT_TO_VIDEO},
        sampling=base.sampling.model_copy(update={"steps": len(TIMESTEPS)}),
        recipe=Recipe(method=UNTRAINED, assumes_loop=SEMANTICS, weights=base.recipe.weights),
        caches=(*base.caches, "slab"),
        capabilities=(*base.capabilities, "streaming"),
    )


def with_rollout(card: ModelCard, **options: JsonValue) -> ModelCard:
    """A child of the card whose rollout has other options."""
    loop = card.loops["denoise"]
    changed = loop.model_copy(update={"options": {**loop.options, **options}})
    return card.derive(loops={**card.loops, "denoise": changed})
