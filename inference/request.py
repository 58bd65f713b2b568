"""Request: what enters the engine, and what it is once every value is settled.

Fields left at None take the card's defaults; ``inference.resolve`` fills them in and checks everything before work.
Knows nothing about how the request is scheduled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from torch import Tensor

from loops.loop import SDE, Profile


@dataclass(frozen=True)
class Message:
    """One turn of a chat."""

    role: str
    """As the model's chat template knows it: system, user, assistant."""
    content: str


@dataclass(frozen=True)
class Request:
    """One generation. Sizes in pixels and frames; guidance in the standard convention (1 = conditional only).

    A clip takes no field of a text, unless its card rewrites prompts (those of the rewriting then), and a text (a task
    whose loop decodes tokens) none of a clip. A score (a task whose
    loop compares frames with the prompt) takes ``prompt``, ``inputs`` and ``frames``.
    """

    prompt: str
    """Plain text; "" beside ``messages``."""
    negative_prompt: str | None = None
    task: str = "t2v"
    seed: int | None = None
    """None draws a fresh random one; the artifact reports it."""
    frames: int | None = None
    """Of a clip: its length. Of a score: how many of the given frames are looked at, spread evenly."""
    height: int | None = None
    width: int | None = None
    steps: int | None = None
    guidance: float | None = None
    guidance_policy: str | None = None
    solver: str | None = None
    shift: float | None = None
    sde: SDE | None = None
    """Steps with noise, for the solver euler; a ROLLOUT then keeps the states around them and their log-probs. None
    follows the ODE."""
    refine: bool | None = None
    """Of a card that rewrites prompts: False gives the generator the prompt as it is."""
    output: Literal["video", "latents"] = "video"
    """``latents`` runs no decoder."""
    priority: int = 0
    """-8 .. 8; every level doubles the share of device time, or goes first, as the policy has it."""
    deadline: float | None = None
    """Seconds from submission by which the result is wanted; the policy ``deadline`` heeds it."""
    profile: Profile = Profile.SERVE
    capture: tuple[str, ...] = ()
    """Opt-in fields of the BehaviourRecord, for ROLLOUT."""
    messages: tuple[Message, ...] | None = None
    """A chat in place of a prompt, put into words by the model's chat template."""
    max_tokens: int | None = None
    temperature: float | None = None
    """0 takes the most likely token."""
    top_p: float | None = None
    top_k: int | None = None
    """0 keeps every token."""
    stop: tuple[str, ...] | None = None
    """The text ends before the first of these, though it span tokens."""
    overrides: Mapping[str, Mapping[str, Any]] | None = None
    """Loop node of the program -> fields of this request that differ there, such as ``{"refine": {"steps": 4}}``."""
    extensions: Mapping[str, Mapping[str, Any]] | None = None
    """Name of an interceptor that the engine has -> its parameters for this request."""
    actions: tuple[str, ...] | None = None
    """Of a clip that a card with actions makes chunk by chunk: one a chunk, by name. None is the card's first for all.
    """
    inputs: Mapping[str, Tensor] | None = None
    """The tensors that the task's program declares, by name: ``pixels`` of a score is uint8 RGB (F, H, W, 3), F = 1 for
    a picture. They are read while the request runs: not to be written to before it is done."""


@dataclass(frozen=True)
class ResolvedRequest:
    """A request with every value settled."""

    request: Request
    params: Any
    """SamplingParams of a clip, TokenParams of a text, ScoreParams of a score."""
    negative_prompt: str
    nodes: Mapping[str, Any] = field(default_factory=dict)
    """Node -> its own params, where the request overrides some, and of every loop that rewrites the prompt."""
    refined: bool = False
    """The prompt is rewritten on its way."""

    def params_of(self, node: str) -> Any:
        """What a node's loop runs with."""
        return self.nodes.get(node, self.params)

    @property
    def guided(self) -> bool:
        """Whether any of its loops has an unconditional branch."""
        return any(params.guided for params in (self.params, *self.nodes.values()))

    @property
    def prompt(self) -> str | list[dict[str, str]]:
        """What the first node reads: the prompt, or the chat as mappings of role and content."""
        messages = self.request.messages
        return self.request.prompt if messages is None else [asdict(message) for message in messages]

    @property
    def pixels(self) -> bool:
        return self.request.output == "video"
