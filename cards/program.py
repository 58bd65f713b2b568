"""A task of a card as a list of nodes over named slots.

A node reads slots and writes one. ``when`` says under which condition it runs, so that only the components that a
request needs are loaded and only the nodes that it needs run. Runners ask :mod:`cards.needs`, which decides both.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Condition = Literal["always", "guided", "pixels", "refined"]
"""always | guided: the request uses classifier-free guidance | pixels: it wants more than latents | refined: its prompt
is rewritten."""


class Input(BaseModel):
    """A tensor that a request brings; it is in the slot of its name before the first node runs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    dtype: Literal["uint8", "float32"]
    shape: tuple[int | str, ...]
    """A number is the length of its axis; a word names one of any length but 0."""
    low: float
    high: float
    """Every value is finite and in [low, high]."""

    def __str__(self) -> str:
        return f"{self.dtype} ({', '.join(map(str, self.shape))}) in [{self.low:g}, {self.high:g}]"


class Node(BaseModel):
    """One node: a component call (``component`` + ``op``) or a loop (``loop``), never both."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    reads: tuple[str, ...]
    """Slots that it needs; ``prompt``, ``negative_prompt`` and the program's inputs come from the request."""
    writes: str
    """A text loop that writes ``prompt`` leaves its words there, for the nodes after it in place of the request's."""
    component: str | None = None
    op: str | None = None
    """Operation of the family's table, e.g. ``encode`` or ``decode``."""
    loop: str | None = None
    when: Condition = "always"


class Program(BaseModel):
    """The nodes of a task in the order in which they run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    nodes: tuple[Node, ...]
    inputs: tuple[Input, ...] = Field(default=(), exclude_if=lambda value: not value)
    """Tensors that a request of this task brings, all of them; a program without any says nothing of it."""

    def problems(self, components: Collection[str], loops: Collection[str]) -> list[str]:
        """What is wrong with the program on a card that has these components and loops."""
        found: list[str] = []
        filled: dict[str, Condition] = {"prompt": "always", "negative_prompt": "always"}
        for brought in self.inputs:
            if brought.name in filled:
                found.append(f"input {brought.name!r}: the slot is taken, expected another name")
            filled[brought.name] = "always"
        for node in self.nodes:
            where = f"node {node.id!r}"
            if (node.loop is None) == (node.component is None):
                found.append(f"{where}: expected exactly one of component and loop")
            if node.component is not None and node.component not in components:
                found.append(f"{where}: component {node.component!r} is not on the card ({', '.join(components)})")
            if node.component is not None and node.op is None:
                found.append(f"{where}: a component node names its op")
            if node.loop is not None and node.loop not in loops:
                found.append(f"{where}: loop {node.loop!r} is not on the card ({', '.join(loops)})")
            for slot in node.reads:
                if slot not in filled:
                    found.append(f"{where}: reads slot {slot!r} before any node writes it")
                elif filled[slot] not in ("always", node.when):
                    found.append(f"{where}: runs {node.when}, but slot {slot!r} is written when {filled[slot]} only")
            filled[node.writes] = "always" if filled.get(node.writes) == "always" else node.when
        return found


def active_nodes(program: Program, *, guided: bool, pixels: bool, refined: bool = True) -> tuple[Node, ...]:
    """The nodes that a request needs, in order."""
    true = {"always": True, "guided": guided, "pixels": pixels, "refined": refined}
    return tuple(node for node in program.nodes if true[node.when])
