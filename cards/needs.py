"""What a task, or one request of it, needs of a card: which nodes run and which components stand behind them.

The one place that decides; loading, checking, admission and every runner ask here. A node runs when its ``when`` holds
(:func:`cards.program.active_nodes`). A request needs the components that its nodes call or that its loops bind, but for
a loop's ``decoder`` where it wants no pixels, so a text or a latents-only request needs no VAE. A task requires a
component that names it in ``required_for`` (or names no task at all); one that names it in ``optional_for`` may be
missing from the source until a request needs it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from cards.card import Component, ModelCard
from cards.errors import unknown_name
from cards.program import Node, active_nodes

MODULE_KINDS = ("transformer", "vae", "text_encoder", "image_encoder", "causal_lm", "scorer", "action_embedding")
"""Kinds that hold weights; the others, such as a tokenizer, serve the whole task."""


@dataclass(frozen=True)
class Needs:
    """Of one request."""

    nodes: tuple[Node, ...]
    """In the order in which they run."""
    components: tuple[str, ...]
    """Ids of the modules that they call, in the card's order."""


def request_needs(
    card: ModelCard, task: str, *, guided: bool, pixels: bool, refined: bool = True, written: Collection[str] = ()
) -> Needs:
    """What a request of a task needs; the conditions as in :func:`cards.program.active_nodes`. A node whose slot is
    ``written`` already does not run."""
    _check_tasks(card, (task,))
    active = active_nodes(card.programs[task], guided=guided, pixels=pixels, refined=refined)
    nodes = tuple(node for node in active if node.writes not in written)
    called: set[str] = set()
    for node in nodes:
        called |= {node.component} if node.component is not None else set()
        bound = {} if node.loop is None else card.loops[node.loop].components
        called |= {cid for part, cid in bound.items() if pixels or part != "decoder"}
    return Needs(nodes, tuple(cid for cid, c in card.components.items() if cid in called and c.kind in MODULE_KINDS))


def needed_components(card: ModelCard, tasks: Collection[str] | None = None) -> dict[str, Component]:
    """Components that any of the tasks (all by default) requires, in the card's order."""
    wanted = _check_tasks(card, tasks)
    return {
        cid: c
        for cid, c in card.components.items()
        if wanted & set(c.required_for) or not (c.required_for or c.optional_for)
    }


def optional_components(card: ModelCard, tasks: Collection[str] | None = None) -> dict[str, Component]:
    """Components that some request of the tasks (all by default) may need and none of them requires."""
    wanted = _check_tasks(card, tasks)
    required = needed_components(card, tasks)
    return {cid: c for cid, c in card.components.items() if cid not in required and wanted & set(c.optional_for)}


def _check_tasks(card: ModelCard, tasks: Collection[str] | None) -> set[str]:
    """The tasks as a set; raises ``UserError`` for one that the card does not have."""
    if tasks is None:
        return set(card.programs)
    for task in tasks:
        if task not in card.programs:
            raise unknown_name(f"task of card {card.name!r}", task, card.programs)
    return set(tasks)
