"""Causal Wan2.1 cards: those of ``cards.wan21`` with the chunked rollout as their loop.

The weights are the base's own, made for its loop and for bidirectional attention: no method has fitted them to this
one. Such a card says so (recipe method ``untrained``, the base among its parents) and runs all the same, since a
method's first rollout, its evaluation before training and the parity gates do run it; what it generates is poor. A
trained one names its method.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from cards.card import CARD_FILE, Component, LoopSpec, ModelCard, Recipe, Schedule
from cards.errors import UserError
from cards.prediction import NUM_TRAIN_TIMESTEPS, shift_sigma
from cards.source import read_json, resolve_folder
from cards.wan21 import card as wan21
from cards.wan_causal.program import TEXT_TO_VIDEO

TASK = wan21.TASK
FAMILY = "wan_causal"
SEMANTICS = "causal-chunk-rollout"
TRANSFORMER = "CausalWanTransformer3DModel"
UNTRAINED = "untrained"
ACTIONS = "actions"
"""Id of the component that embeds actions, and its folder."""
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
    actions: Sequence[str] | None = None,
) -> ModelCard:
    """The causal card of a size or of a Wan2.1 folder, run or export; an export of a causal card is read as it is.

    Args:
        chunk: latent frames a chunk; None takes the size's, or the export's own.
        window: chunks that attention sees, the current one among them; None = all, or the export's own.
        sinks: first chunks that it sees for ever beyond the window.
        actions: names of what a chunk may be under, the first of them none; None has no actions, or the export's own.
    """
    base = wan21.build_card(size, source=source, revision=revision)
    options = {k: v for k, v in (("chunk", chunk), ("window", window), ("sinks", sinks)) if v is not None}
    if base.family != FAMILY:
        card = causal_card(base, **options)
    else:
        card = with_rollout(base, **options) if options else base
    return card if actions is None else with_actions(card, actions)


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
        recipe=Recipe(method=UNTRAINED, assumes_loop=SEMANTICS, data=base.recipe.data, weights=base.recipe.weights),
        caches=(*base.caches, "slab"),
        capabilities=(*base.capabilities, "streaming"),
    )


def with_actions(card: ModelCard, names: Sequence[str]) -> ModelCard:
    """A child of the card whose chunks are under one of these actions each, the first of them meaning none.

    Their vectors are new and change nothing until a method trains them; a card that has just these keeps its own.
    """
    loop = card.loops["denoise"]
    known = loop.options.get("actions")
    if known is not None:
        if known == list(names):
            return card
        raise UserError(f"actions: got {list(names)}, but {card.name} was trained for {known}; leave card.actions out")
    if len(names) < 2:
        raise UserError(f"actions: got {list(names)}, expected the name of none and at least one more")
    component = Component(
        kind="action_embedding",
        library="diffusers",
        class_name="ActionEmbedding",
        subfolder=ACTIONS,
        config={"num_actions": len(names), "width": _width(card)},
        trainable=True,
        required_for=(TASK,),
    )
    changed = loop.model_copy(
        update={
            "components": {**loop.components, "actions": ACTIONS},
            "options": {**loop.options, "actions": list(names)},
        }
    )
    return card.derive(
        components={**card.components, ACTIONS: component},
        loops={**card.loops, "denoise": changed},
        capabilities=(*card.capabilities, ACTIONS),
    )


def _width(card: ModelCard) -> int:
    """Of the transformer's tokens."""
    component = card.components["transformer"]
    config: dict[str, Any] = component.config
    if not config:
        config = read_json(resolve_folder(card.source, card.root) / component.subfolder / "config.json")
    return int(config["num_attention_heads"]) * int(config["attention_head_dim"])


def with_rollout(card: ModelCard, **options: JsonValue) -> ModelCard:
    """A child of the card whose rollout has other options."""
    loop = card.loops["denoise"]
    changed = loop.model_copy(update={"options": {**loop.options, **options}})
    return card.derive(loops={**card.loops, "denoise": changed})
