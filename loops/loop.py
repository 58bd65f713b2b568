"""The contract between a loop and whoever runs it.

``init -> (next -> advance)* -> finalize``. All per-request state is in the ``LoopState``; nothing per-request is ever
on a loop, a module or a global. A ``WorkPlan`` is data: the runner may merge equal calls of different requests into one
forward and split the result.
"""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from cards.card import LoopSpec, ModelCard


class Profile(StrEnum):
    """How a loop is run; the loop is the same, grad mode and capture differ."""

    SERVE = "serve"
    ROLLOUT = "rollout"
    TRAIN = "train"


class WorkUnit(StrEnum):
    """Kind of a step, for scheduling and metrics."""

    AR_PREFILL = "AR_PREFILL"
    AR_TOKEN = "AR_TOKEN"
    DIFFUSION_STEP = "DIFFUSION_STEP"
    DIFFUSION_WINDOW = "DIFFUSION_WINDOW"
    CHUNK_STEP = "CHUNK_STEP"
    ENCODER_CHUNK = "ENCODER_CHUNK"
    VAE_TILE = "VAE_TILE"
    AUDIO_CHUNK = "AUDIO_CHUNK"
    REWARD_BATCH = "REWARD_BATCH"
    LOGPROB_BATCH = "LOGPROB_BATCH"
    TRANSFER = "TRANSFER"
    CACHE_IO = "CACHE_IO"
    GRAPH_CAPTURE = "GRAPH_CAPTURE"


@dataclass(frozen=True)
class ModelCall:
    """One forward of one component, as data."""

    component: str
    """Component id on the card."""
    method: str
    """Operation of the family's table."""
    tensors: Mapping[str, Tensor]
    """Inputs, each with a leading batch dim of the same length."""
    static: Mapping[str, Any] = field(default_factory=dict)
    """Inputs that are not tensors; equal for calls that may merge."""
    branch: str = "main"
    """Guidance branch: main, conditional or unconditional."""
    state: Any = None
    """Handle that the forward reads and grows, such as the KV of a request; a merged call has a tuple, one a row. It is
    no tensor: the operation finds it as ``static["state"]``."""

    def __post_init__(self) -> None:
        if self.state is not None:
            object.__setattr__(self, "static", {**self.static, "state": self.state})

    @property
    def rows(self) -> int:
        """Length of the batch dim."""
        return next(iter(self.tensors.values())).shape[0]

    def merge_key(self) -> tuple[Any, ...]:
        """Calls with equal keys may share a forward; prompts, seeds, steps and branches do not matter.

        A call whose ``state`` has no ``batch_key`` has a key of its own and is merged with no other.
        """
        batch_key = None if self.state is None else self.state.batch_key
        if self.state is not None and batch_key is None:
            return (self.component, self.method, "alone", id(self))
        shapes = tuple((name, t.dtype, tuple(t.shape[1:])) for name, t in sorted(self.tensors.items()))
        static = tuple(sorted((name, value) for name, value in self.static.items() if name != "state"))
        return (self.component, self.method, static, shapes, batch_key)

    @staticmethod
    def merged(calls: Sequence[ModelCall]) -> ModelCall:
        """One call over the rows of calls with equal keys, and over their states where they carry any."""
        first = calls[0]
        tensors = {name: torch.cat([call.tensors[name] for call in calls]) for name in first.tensors}
        state = None if first.state is None else tuple(call.state for call in calls)
        return ModelCall(first.component, first.method, tensors, first.static, branch="merged", state=state)


@dataclass(frozen=True)
class Resources:
    """What a step needs, for admission."""

    seconds: float = 0.0
    """Predicted device seconds."""
    peak_bytes: int = 0
    """Activations while it runs."""


@dataclass(frozen=True)
class WorkPlan:
    """One step: one or more calls whose results are told back together."""

    unit: WorkUnit
    calls: tuple[ModelCall, ...]
    label: str
    """For progress and traces, e.g. ``denoise 3/20``."""
    resources: Resources = Resources()
    cache_key: tuple[Any, ...] | None = None
    """Equal keys have equal results: the runner may evaluate one and share it."""
    emits: Literal["", "frames"] = ""
    """``frames``: the output of its last call is the clip's next frames (1, 3, F, H, W) in [-1, 1], which may leave."""


@dataclass(frozen=True)
class Done:
    """The loop has nothing left to evaluate."""


@dataclass(frozen=True)
class StepResult:
    """Outputs of a plan's calls, in order."""

    outputs: tuple[Tensor, ...]


@dataclass(frozen=True)
class SDE:
    """Noise in the steps of a sampler, so that each has a log-prob; the maths is in ``loops.sde``."""

    kind: str = "flow"
    """flow | dance | cps."""
    level: float = 0.7
    """a > 0, how much noise; at most 1 for cps."""
    window: tuple[int, int] | None = None
    """Steps [start, stop) that are taken with noise, the others follow the ODE; None: all."""
    seed: int | None = None
    """Of the steps' noise: requests of one seed then start at the same latents and part ways; None goes on with the
    request's own generator."""

    def steps(self, total: int) -> range:
        """The steps of ``total`` that are taken with noise."""
        return range(total) if self.window is None else range(*self.window)


@dataclass(frozen=True)
class SamplingParams:
    """What a denoising loop needs of a request, resolved and checked against the card."""

    frames: int
    height: int
    """Pixels."""
    width: int
    """Pixels."""
    steps: int
    guidance: float
    """Standard convention; > 1 evaluates an unconditional branch too."""
    guidance_policy: str
    solver: str
    shift: float
    seed: int
    actions: tuple[str, ...] = ()
    """One a chunk, of those that a card of chunked clips names; () where it names none."""
    sde: SDE | None = None
    """None follows the ODE."""

    @property
    def guided(self) -> bool:
        return self.guidance > 1.0


@dataclass(frozen=True)
class TokenParams:
    """What a text loop needs of a request, resolved and checked against the card."""

    max_tokens: int
    temperature: float
    """0 takes the most likely token."""
    top_p: float
    """In (0, 1]; 1 keeps every token."""
    top_k: int
    """0 keeps every token."""
    stop: tuple[str, ...]
    """The text ends before the first of these."""
    seed: int

    @property
    def guided(self) -> bool:
        """A text request has no unconditional branch."""
        return False

    @property
    def steps(self) -> int:
        """Forwards at most: each gives one token."""
        return self.max_tokens


class KV(Protocol):
    """Keys and values of one request's tokens in one component.

    The forward appends to it and nobody else; whoever supplies it frees it when the request ends.
    """

    cache: Any
    """What the component's library takes as its cache; the operation fills in a growing one where it is None."""

    @property
    def length(self) -> int:
        """Tokens held. A fresh handle may hold a prefix of the prompt that another request filled, but never all of it:
        the last token of the prompt is always fed."""

    @property
    def batch_key(self) -> Hashable | None:
        """Handles with equal keys may be rows of one forward, whatever their lengths; None: this one never is. One with
        a key has a method ``together(handles)``: the cache of a forward over them all, whose ``inputs(token_ids)`` are
        the arguments of the forward and whose ``rollback()`` undoes one that failed midway."""

    def record(self, token_ids: Sequence[int]) -> None:
        """Tells which tokens the forward appended after the prompt, so that a later prompt may share them."""


@runtime_checkable
class KVSource(Protocol):
    """Opens the KV of one request."""

    def open(self, component: str, token_ids: tuple[int, ...]) -> KV:
        """A handle for a prompt of these tokens."""


@dataclass(frozen=True)
class BehaviourRecord:
    """What a ROLLOUT keeps of a request beyond its result. Opt-in fields are None unless asked for."""

    sigmas: Tensor
    """(N,) float32, the sampler's own, in the order in which they were visited."""
    timesteps: Tensor
    """(N,) as the network saw them."""
    trajectory: Tensor | None = None
    """(N, C, T, H, W) inputs of the network."""
    velocities: Tensor | None = None
    """(N, C, T, H, W) what the solver was told, after guidance."""
    sde_steps: Tensor | None = None
    """(K,) int64, steps that were taken with noise; this field and those below are kept of every SDE request."""
    sde_sigmas: Tensor | None = None
    """(K + 1,) float32, before each of these steps and after the last."""
    sde_states: Tensor | None = None
    """(K + 1, C, T, H, W) float32, the latents at these sigmas: each step begins where the one before ended."""
    sde_log_probs: Tensor | None = None
    """(K,) float32, of each step as it was taken."""
    conditions: Mapping[str, Tensor] | None = None
    """What every forward took besides latents and timestep, by name (1, ...), and ``negative_text`` of a guided
    request: shared with whoever else was given the same, not to be written to."""


@dataclass(frozen=True)
class TokenBehaviour:
    """What a ROLLOUT keeps of a text: the tokens and how likely each was when it was drawn.

    Legend: P tokens of the prompt, N drawn.
    """

    prompt_ids: Tensor
    """(P,) int64 on CPU, as the model read them."""
    token_ids: Tensor
    """(N,) int64 on CPU, the end token among them."""
    logprobs: Tensor
    """(N,) float64 on CPU: log p of each at ``temperature``; no top-k, no top-p."""
    mask: Tensor
    """(N,) bool on CPU: True up to the first end token."""
    temperature: float
    """1 where the most likely token was taken."""


@dataclass(frozen=True)
class LoopContext:
    """What a loop may read besides its request."""

    spec: LoopSpec | None
    slots: Mapping[str, Any]
    """Values that earlier nodes wrote."""
    profile: Profile = Profile.SERVE
    capture: frozenset[str] = frozenset()
    """Opt-in fields of the BehaviourRecord."""
    kv: Any = None
    """Where KV is held: a KVSource of a text, a ``loops.slab.SlabSource`` of a chunked clip; None gives each request a
    cache of its own."""
    pixels: bool = True
    """The request wants more than latents."""
    world: Any = None
    """What a clip that may go on later continues from, a ``loops.chunk_rollout.World``; None begins and ends one."""


@dataclass
class LoopState:
    """All of a request's state in a loop; can be saved and resumed."""

    step: int
    total: int
    params: Any
    """SamplingParams | TokenParams | None, by the loop's kind."""
    tensors: dict[str, Tensor]
    solver: Any = None
    generator: torch.Generator | None = None
    plugins: dict[tuple[str, str], Any] = field(default_factory=dict)
    """(plugin, guidance branch) -> its state for this request."""
    captured: dict[str, list[Tensor]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    """Constants that ``init`` settled, e.g. the loop's dtype."""
    shared: Mapping[str, Any] = field(default_factory=dict)
    """Objects of the instance that ``advance`` reads, such as its tokenizer: not the request's own, and not saved."""

    def save(self) -> bytes:
        """Everything that ``next`` and ``advance`` need but ``shared``, tensors on CPU included."""
        stream = io.BytesIO()
        generator = None if self.generator is None else self.generator.get_state()
        torch.save({**self.__dict__, "generator": generator, "shared": {}}, stream)
        return stream.getvalue()

    @classmethod
    def resume(cls, data: bytes, shared: Mapping[str, Any] | None = None) -> LoopState:
        """Inverse of :meth:`save`, given what the state shared. Unpickles: only for bytes that this process wrote."""
        fields = torch.load(io.BytesIO(data), weights_only=False)
        fields["shared"] = {} if shared is None else shared
        if fields["generator"] is not None:
            generator = torch.Generator("cpu")
            generator.set_state(fields["generator"])
            fields["generator"] = generator
        return cls(**fields)


@dataclass(frozen=True)
class LoopResult:
    """What a loop leaves: one value for its slot, and its behaviour under ROLLOUT."""

    value: Any
    behaviour: BehaviourRecord | TokenBehaviour | None = None
    also: Mapping[str, Any] = field(default_factory=dict)
    """Further slots that the loop filled on its way."""


class Instance(Protocol):
    """What a loop and the reference driver may ask of a loaded model."""

    card: ModelCard

    @property
    def tokenizer(self) -> Any: ...

    def tokenizer_of(self, component: str | None) -> Any: ...

    def dtype(self, component: str) -> torch.dtype: ...

    def config(self, component: str) -> Any: ...

    def device_of(self, component: str) -> torch.device: ...

    def numerics(self, component: str) -> dict[str, Any]: ...

    def tokenize(self, prompt: Any, max_sequence_length: int, component: str | None = None) -> dict[str, Tensor]: ...

    def pixels(self, frames_NHWC: Tensor) -> Tensor: ...

    def prepared(self, operation: str, value: Any, params: Any) -> dict[str, Tensor] | None: ...

    def call(self, call: ModelCall, profile: Profile = Profile.SERVE) -> Tensor: ...


class Loop(ABC):
    """See the module's docstring. A loop object is stateless and shared by all requests."""

    takes_sde: ClassVar[bool] = False
    """Whether it honours ``SamplingParams.sde``."""

    @abstractmethod
    def init(self, params: Any, instance: Instance, ctx: LoopContext) -> LoopState:
        """All per-request state: seeded noise, conditioning, solver; ``params`` is of the loop's own kind."""

    @abstractmethod
    def next(self, state: LoopState) -> WorkPlan | Done:
        """The next step as data; runs nothing and changes nothing."""

    @abstractmethod
    def advance(self, state: LoopState, result: StepResult) -> LoopState:
        """Takes the results of the plan that ``next`` gave."""

    @abstractmethod
    def finalize(self, state: LoopState) -> LoopResult:
        """The loop's value, once ``next`` says Done."""
