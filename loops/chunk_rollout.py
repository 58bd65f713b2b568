"""The chunked rollout: a clip chunk by chunk, each denoised down a ladder on the keys and values of those before it.

A chunk starts as noise. At each rung the network's velocity gives ``x0_hat = x - s v``, which is noised afresh to the
next rung. The last one is the chunk: it is decoded, its frames may leave, and one more forward at ``context_noise``
overwrites its keys and values with those of the clean chunk, which the chunks after it see (Self Forcing,
arXiv 2506.08009, Alg. 1). Noise is drawn chunk by chunk from the request's generator, in the order in which it is used.

A clip that may go on later continues from a :class:`World` and leaves one. Where the card names actions, each chunk is
under one of them: its embedding, evaluated once for all chunks before the first, goes with every forward of the chunk.

A training rollout (:func:`rollout`) is this loop with noises that are given, an early exit from the ladder and a
gradient in the exit rung. Knows nothing about a family's network or decoder.

Legend: B batch, C latent channels, T latent frames of a chunk, H W latent cells, F frames.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from cards.card import LoopSpec, ModelCard
from cards.chunks import chunk_count, settled_window
from cards.errors import UserError, unknown_name
from cards.prediction import add_noise, network_timestep, velocity_to_x0
from loops.loop import (
    BehaviourRecord,
    Done,
    Instance,
    Loop,
    LoopContext,
    LoopResult,
    LoopState,
    ModelCall,
    Profile,
    Resources,
    SamplingParams,
    StepResult,
    WorkPlan,
    WorkUnit,
)
from loops.options import LoopOptions, read_options
from loops.slab import SlabHandle, SlabSource, SlabSpec

KV = ("kv", "main")
FEATURES = ("decoder", "main")
NOISES = "noises"
WORLD = "world"
Phase = Literal["actions", "rung", "decode", "context"]


class ChunkOptions(LoopOptions):
    """Options of ``chunk_rollout``."""

    chunk: int = Field(ge=1)
    """Latent frames a chunk."""
    window: int | None = Field(default=None, ge=1)
    """Most recent chunks that attention sees, the current one among them; None: all."""
    sinks: int = Field(default=0, ge=0)
    """First chunks that attention sees for ever beyond the window."""
    context_noise: float = Field(default=0.0, ge=0, lt=1)
    """Sigma to which a finished chunk is noised for the pass that keeps its keys and values."""
    actions: tuple[str, ...] = ()
    """Names of the actions that a chunk may be under, the first of them meaning none; () where the card has none."""

    def check(self, spec: LoopSpec, card: ModelCard) -> None:
        problems = []
        if not spec.schedule.ladder:
            problems.append("schedule: got no ladder, expected one")
        if spec.solver != "lcm":
            problems.append(f"solver: got {spec.solver!r}, expected 'lcm', which noises afresh")
        if spec.guidance.scale != 1:
            problems.append(f"guidance: got {spec.guidance.scale:g}, expected 1 (one store of keys and values)")
        if self.chunk % card.geometry.patch[0]:
            problems.append(f"chunk: got {self.chunk}, expected a multiple of {card.geometry.patch[0]} (a patch)")
        if not {"denoiser", "decoder"} <= set(spec.components):
            problems.append(f"components: got {sorted(spec.components)}, expected the parts denoiser and decoder")
        if len(set(self.actions)) != len(self.actions):
            problems.append(f"actions: got {list(self.actions)}, expected each name once")
        if bool(self.actions) != ("actions" in spec.components):
            problems.append(
                f"actions: got {len(self.actions)} names and parts {sorted(spec.components)}; expected names with a "
                "part actions, which embeds them, or neither"
            )
        try:
            chunk_count(card.sampling.frames, self.chunk, card.geometry)
        except UserError as error:
            problems.append(f"sampling: {error}")
        if problems:
            raise UserError(f"card {card.name!r}, loop kind {spec.kind!r}: " + "; ".join(problems))

    def check_params(self, params: SamplingParams, spec: LoopSpec, card: ModelCard) -> None:
        if params.guidance != 1:
            raise UserError(
                f"guidance: got {params.guidance:g}, expected 1: {card.name} rolls out without guidance; leave it out"
            )
        self.action_ids(params.actions, chunk_count(params.frames, self.chunk, card.geometry), card.name)

    def action_ids(self, names: Sequence[str], chunks: int, card: str) -> list[int]:
        """The actions of a clip of ``chunks`` chunks, each as its place in the card's list; without any, the first for
        every chunk. Empty for a card without actions. Raises ``UserError`` for other names or another number."""
        if names and not self.actions:
            raise UserError(f"actions: got {list(names)}, expected nothing: {card} has no actions")
        for name in names:
            if name not in self.actions:
                raise unknown_name(f"action of {card}", str(name), self.actions)
        if names and len(names) != chunks:
            raise UserError(f"actions: got {len(names)}, expected one a chunk: {chunks}")
        return [self.actions.index(name) for name in (names if names else self.actions[:1] * chunks)]


def steps_per_chunk(rungs: int, *, pixels: bool) -> int:
    """Rungs, the context pass and, for pixels, the decode."""
    return rungs + 1 + pixels


@dataclass
class DecoderFeatures:
    """What the decoder keeps of the frames before. The operation reads and replaces ``features``."""

    features: list[Any] | None = None
    devices: dict[int, torch.device] = field(default_factory=dict)
    """Of its tensors before :meth:`rest`."""
    batch_key: ClassVar[None] = None
    """A chunk's decode is merged with no other's."""

    def rest(self) -> None:
        """Moves it to host memory, until :meth:`wake`."""
        features = [] if self.features is None else self.features
        self.devices = {i: t.device for i, t in enumerate(features) if isinstance(t, Tensor)}
        self._move({i: torch.device("cpu") for i in self.devices})

    def wake(self) -> None:
        """Inverse of :meth:`rest`."""
        self._move(self.devices)

    def _move(self, devices: dict[int, torch.device]) -> None:
        for index, device in devices.items():
            assert self.features is not None
            self.features[index] = self.features[index].to(device)


@dataclass(frozen=True)
class Walk:
    """What a rollout runs: constants of its state."""

    component: str
    decoder: str | None
    """None: latents are all that is wanted."""
    static: dict[str, Any]
    sigmas: tuple[float, ...]
    """Of the rungs that run; a rollout that exits early has the first ones of the ladder."""
    chunks: int
    shape: tuple[int, int, int, int, int]
    """(B, C, T, H, W) of a chunk."""
    context_noise: float
    seconds: float
    """Predicted, of one forward of the network."""
    record: bool
    first: int = 0
    """Chunks that came before this rollout's own."""
    goes_on: bool = False
    """Whether another rollout may follow."""
    embedder: str | None = None
    """Component that embeds actions; None where the card has none."""
    actions: tuple[int, ...] = ()
    """Of each chunk, its place in the card's list."""

    @property
    def lead(self) -> int:
        """Steps before the first chunk."""
        return self.embedder is not None

    @property
    def total(self) -> int:
        """Steps in all."""
        return self.lead + self.chunks * self.per_chunk

    @property
    def per_chunk(self) -> int:
        return steps_per_chunk(len(self.sigmas), pixels=self.decoder is not None)

    @property
    def draws(self) -> int:
        """Noises of a chunk: one a rung, and one of the context where it has any."""
        return len(self.sigmas) + (self.context_noise > 0)

    def at(self, step: int) -> tuple[int, Phase, int]:
        """(chunk of this rollout, phase, rung) of a step; the rung is 0 outside the ladder."""
        if step < self.lead:
            return 0, "actions", 0
        chunk, k = divmod(step - self.lead, self.per_chunk)
        if k < len(self.sigmas):
            return chunk, "rung", k
        return chunk, "decode" if self.decoder is not None and k == len(self.sigmas) else "context", 0


@dataclass(frozen=True)
class World:
    """A rollout between two chunks, for one that goes on later; what a rollout of the same seed draws and sees next."""

    chunks: int = 0
    """Rolled out so far."""
    kv: SlabHandle | None = None
    """None before the first chunk. Written in place by the rollout that goes on, which marks it first: whoever made the
    world commits the slab, or rolls it back."""
    features: list[Any] | None = None
    """Of the decoder; None before the first decode. Never written to."""
    generator: Tensor | None = None
    """State of the generator of noises; None is that of the seed."""


class ChunkRolloutLoop(Loop):
    """``chunk_rollout``. Reads the slot ``text``; gives latents and, for pixels, the slot ``video``; of a clip that may
    go on the slot ``world``."""

    def init(self, params: SamplingParams | None, instance: Instance, ctx: LoopContext) -> LoopState:
        assert ctx.spec is not None and params is not None
        options = read_options(ChunkOptions, ctx.spec, instance.card)
        options.check_params(params, ctx.spec, instance.card)
        shape = instance.card.geometry.latent_shape(params.frames, params.height, params.width)
        assert ctx.spec.schedule.ladder is not None
        walk = _walk(
            instance,
            ctx.spec,
            ctx.spec.schedule.ladder,
            (1, *shape),
            pixels=ctx.pixels,
            record=ctx.profile is not Profile.SERVE,
            actions=params.actions,
        )
        source = ctx.kv if isinstance(ctx.kv, SlabSource) else None
        generator = torch.Generator("cpu").manual_seed(params.seed)
        features: list[Any] | None = None
        if ctx.world is None:
            kv = SlabHandle(_slab_spec(instance, walk, options), source)
        else:
            world: World = ctx.world
            walk = replace(walk, first=world.chunks, goes_on=True)
            kv = world.kv if world.kv is not None else SlabHandle(_slab_spec(instance, walk, options), source)
            if kv.resting:
                kv.wake()
            kv.mark()
            if world.generator is not None:
                generator.set_state(world.generator)
            if world.features is not None and walk.decoder is not None:
                features = _features_on(world.features, instance.device_of(walk.decoder))
        state = _begin(walk, ctx.slots["text"], kv, params, features)
        captured = {**state.captured, **{name: [] for name in ctx.capture}}
        return _fresh(replace(state, generator=generator, captured=captured))

    def next(self, state: LoopState) -> WorkPlan | Done:
        if state.step >= state.total:
            return Done()
        walk: Walk = state.facts["walk"]
        chunk, phase, rung = walk.at(state.step)
        where = f"chunk {walk.first + chunk + 1}/{walk.first + walk.chunks}"
        if phase == "actions":
            assert walk.embedder is not None
            call = ModelCall(walk.embedder, "embed", {"ids": torch.tensor([walk.actions])})
            return WorkPlan(WorkUnit.ENCODER_CHUNK, (call,), "actions")
        if phase == "decode":
            assert walk.decoder is not None
            tensors = {"latents": state.captured["x0"][-1].detach()}
            call = ModelCall(walk.decoder, "decode_chunk", tensors, state=state.plugins[FEATURES])
            return WorkPlan(WorkUnit.VAE_TILE, (call,), f"{where}, decode", emits="frames")
        sigma = walk.sigmas[rung] if phase == "rung" else walk.context_noise
        latents = state.tensors["latents"] if phase == "rung" else state.tensors["latents"].detach()
        sigma_B = torch.full((latents.shape[0],), sigma, device=latents.device)
        tensors = {"latents": latents, "timestep": network_timestep(sigma_B), "text": state.tensors["text"]}
        if walk.embedder is not None:
            tensors["action"] = state.tensors["actions"][:, chunk].expand(latents.shape[0], -1)
        static = {**walk.static, "index": walk.first + chunk}
        call = ModelCall(walk.component, "velocity_chunk", tensors, static, state=state.plugins[KV])
        label = f"{where}, rung {rung + 1}/{len(walk.sigmas)}" if phase == "rung" else f"{where}, context"
        return WorkPlan(WorkUnit.CHUNK_STEP, (call,), label, Resources(seconds=walk.seconds))

    def advance(self, state: LoopState, result: StepResult) -> LoopState:
        walk: Walk = state.facts["walk"]
        chunk, phase, rung = walk.at(state.step)
        (output,) = result.outputs
        moved = replace(state, step=state.step + 1)
        if phase == "actions":
            return replace(moved, tensors={**moved.tensors, "actions": output})
        if phase == "decode":
            return _kept(moved, video=output)
        if phase == "context":
            return _fresh(moved) if moved.step < moved.total else moved
        latents = state.tensors["latents"]
        visited = {"trajectory": latents, "velocities": output}
        moved = _kept(moved, **{name: tensor for name, tensor in visited.items() if name in state.captured})
        x0 = velocity_to_x0(latents, output.float(), walk.sigmas[rung])
        if rung + 1 < len(walk.sigmas):
            noise, sigma = _draw(state, chunk, rung + 1), walk.sigmas[rung + 1]
            return _with_latents(moved, add_noise(x0, noise, sigma))
        moved = _kept(moved, x0=x0)
        if walk.context_noise == 0:
            return _with_latents(moved, x0)
        return _with_latents(moved, add_noise(x0, _draw(state, chunk, rung + 1), walk.context_noise))

    def finalize(self, state: LoopState) -> LoopResult:
        walk: Walk = state.facts["walk"]
        clip = {name: torch.cat(parts, dim=2) for name, parts in state.captured.items() if name in ("x0", "video")}
        behaviour = None
        if walk.record:
            sigmas = torch.tensor(walk.sigmas, dtype=torch.float32).repeat(walk.chunks)
            kept: dict[str, Any] = {
                n: torch.cat(rows) for n, rows in state.captured.items() if n in ("trajectory", "velocities")
            }
            behaviour = BehaviourRecord(sigmas, network_timestep(sigmas), **kept)
        also: dict[str, Any] = {"video": clip["video"]} if "video" in clip else {}
        if walk.goes_on:
            also[WORLD] = _world_of(state)
        return LoopResult(clip["x0"], behaviour, also)


# -- a rollout's parts


def _walk(
    instance: Instance,
    spec: LoopSpec,
    sigmas: Sequence[float],
    shape_BCTHW: tuple[int, ...],
    *,
    pixels: bool,
    record: bool,
    actions: Sequence[str] = (),
) -> Walk:
    """``shape_BCTHW``: of the whole clip. ``actions``: names, one a chunk; none is the card's first for all."""
    options = read_options(ChunkOptions, spec, instance.card)
    batch, channels, frames, height, width = shape_BCTHW
    component, patch = spec.components["denoiser"], instance.card.geometry.patch
    tokens = options.chunk * height * width // (patch[0] * patch[1] * patch[2])
    return Walk(
        component=component,
        decoder=spec.components["decoder"] if pixels else None,
        static=instance.numerics(component),
        sigmas=tuple(sigmas),
        chunks=frames // options.chunk,
        shape=(batch, channels, options.chunk, height, width),
        context_noise=options.context_noise,
        seconds=spec.cost.base_seconds + spec.cost.per_token_seconds * tokens,
        record=record,
        embedder=spec.components.get("actions"),
        actions=tuple(options.action_ids(actions, frames // options.chunk, instance.card.name)),
    )


def _slab_spec(instance: Instance, walk: Walk, options: ChunkOptions) -> SlabSpec:
    return slab_spec(
        instance.config(walk.component),
        options,
        chunks=None if walk.goes_on else walk.chunks,
        shape=walk.shape,
        dtype=instance.dtype(walk.component),
        device=instance.device_of(walk.component),
    )


def slab_spec(
    config: Any,
    options: ChunkOptions,
    *,
    chunks: int | None,
    shape: tuple[int, int, int, int, int],
    dtype: torch.dtype,
    device: torch.device | str,
) -> SlabSpec:
    """The slab of a rollout of ``chunks`` chunks of ``shape`` (B, C, T, H, W), by a diffusers transformer's config.

    ``chunks`` None: of one without end. Raises ``UserError`` where such a one would grow without bound.
    """
    batch, _, frames, height, width = shape
    if chunks is not None:
        window, sinks = settled_window(chunks, options.window, options.sinks)
    elif options.window is not None:
        window, sinks = options.window, options.sinks
    else:
        raise UserError(
            "window: got none, which sees every chunk there ever was; a session has no end and needs a bound: "
            "card.window=<chunks>, or cards.wan_causal.card.with_rollout(card, window=<chunks>)"
        )
    patch = config.patch_size
    return SlabSpec(
        layers=config.num_layers,
        batch=batch,
        chunk_tokens=frames * height * width // (patch[0] * patch[1] * patch[2]),
        window_chunks=window,
        sink_chunks=sinks,
        heads=config.num_attention_heads,
        head_dim=config.attention_head_dim,
        dtype=dtype,
        device=device,
    )


def _features_on(features: list[Any], device: torch.device | str) -> list[Any]:
    """A decoder's features in a new list, on a device."""
    return [item.to(device) if isinstance(item, Tensor) else item for item in features]


def _world_of(state: LoopState) -> World:
    """What a complete rollout leaves to the next."""
    walk: Walk = state.facts["walk"]
    assert state.generator is not None
    features = state.plugins[FEATURES].features if walk.decoder is not None else None
    return World(walk.first + walk.chunks, state.plugins[KV], features, state.generator.get_state())


def _begin(
    walk: Walk,
    text_BLD: Tensor,
    kv: SlabHandle,
    params: SamplingParams | None,
    features: list[Any] | None = None,
) -> LoopState:
    """The state before its first noise. ``features``: what the decoder kept of the chunks before."""
    decoding = walk.decoder is not None
    return LoopState(
        step=0,
        total=walk.total,
        params=params,
        tensors={"text": text_BLD},
        plugins={KV: kv, **({FEATURES: DecoderFeatures(features)} if decoding else {})},
        captured={"x0": [], **({"video": []} if decoding else {})},
        facts={"walk": walk},
    )


def _draw(state: LoopState, chunk: int, index: int) -> Tensor:
    """A chunk's noise (B, C, T, H, W) float32 on the state's device: the given one, else the generator's next."""
    walk: Walk = state.facts["walk"]
    if NOISES in state.shared:
        noise: Tensor = state.shared[NOISES][chunk][index]
    else:
        noise = torch.randn(walk.shape, generator=state.generator, dtype=torch.float32)
    return noise.to(state.tensors["text"].device)


def _fresh(state: LoopState) -> LoopState:
    """The state at the first rung of its step's chunk."""
    walk: Walk = state.facts["walk"]
    chunk, _, _ = walk.at(state.step)
    return _with_latents(state, _draw(state, chunk, 0))


def _with_latents(state: LoopState, latents: Tensor) -> LoopState:
    return replace(state, tensors={**state.tensors, "latents": latents})


def _kept(state: LoopState, **parts: Tensor) -> LoopState:
    """The state with one more part of each of these."""
    return replace(
        state, captured={**state.captured, **{name: [*state.captured[name], part] for name, part in parts.items()}}
    )


# -- training


@dataclass(frozen=True)
class Rollout:
    """What a training rollout leaves."""

    latents: Tensor
    """(B, C, T, H, W) of the whole clip; with the graph of the exit rung of each chunk that carries gradient."""
    sigma: float
    """Of the exit rung."""
    calls: int
    """Forwards of the denoiser: (exit + 2) a chunk."""
    gradient_calls: int
    """Those of them that carried gradient."""


def never(chunk: int) -> bool:
    """No chunk carries gradient."""
    return False


def rollout_noises(
    shape_BCTHW: Sequence[int], chunk: int, draws: int, generators: Sequence[torch.Generator]
) -> list[list[Tensor]]:
    """Noises [chunk][draw] (B, C, T, H, W) float32 of a clip of ``shape_BCTHW``, each row by a generator of its own in
    the order in which a request of that seed draws them. ``draws``: noises a chunk, see :func:`rollout`."""
    _, channels, frames, height, width = shape_BCTHW
    row = (1, channels, chunk, height, width)
    return [
        [torch.cat([torch.randn(row, generator=g, dtype=torch.float32) for g in generators]) for _ in range(draws)]
        for _ in range(frames // chunk)
    ]


def rollout(
    instance: Instance,
    spec: LoopSpec,
    text_BLD: Tensor,
    noises: Sequence[Sequence[Tensor]],
    *,
    exit: int | None = None,
    gradient: Callable[[int], bool] = never,
) -> Rollout:
    """A rollout of the serving loop on given noises, without a decode.

    Args:
        spec: the card's ``chunk_rollout`` loop.
        noises: [chunk][draw] (B, C, T, H, W): its first latents, one a further rung up to the exit, and one for the
            context where that has noise. More are not read.
        exit: rung of the ladder whose prediction is taken, for every chunk; None: the last, as serving does.
        gradient: chunk -> whether its exit rung runs with gradient. The rungs before it and the context pass never do,
            so no gradient crosses from a chunk to an earlier one.
    """
    ladder = spec.schedule.ladder
    assert ladder is not None
    last = len(ladder) - 1 if exit is None else exit
    if not 0 <= last < len(ladder):
        raise UserError(f"exit: got {exit}, expected a rung of the ladder, 0 .. {len(ladder) - 1}")
    options = read_options(ChunkOptions, spec, instance.card)
    first = noises[0][0]
    clip = (*first.shape[:2], len(noises) * options.chunk, *first.shape[3:])
    walk = _walk(instance, spec, ladder[: last + 1], clip, pixels=False, record=False)
    _check_noises(noises, walk)
    kv = SlabHandle(_slab_spec(instance, walk, options), training=True)
    loop, calls, gradient_calls = ChunkRolloutLoop(), 0, 0
    state = _fresh(replace(_begin(walk, text_BLD, kv, None), shared={NOISES: noises}))
    while not isinstance(plan := loop.next(state), Done):
        chunk, phase, rung = walk.at(state.step)
        with_gradient = phase == "rung" and rung == last and gradient(chunk)
        (call,) = plan.calls
        output = instance.call(call, Profile.TRAIN if with_gradient else Profile.ROLLOUT)
        state = loop.advance(state, StepResult((output,)))
        calls, gradient_calls = calls + (phase != "actions"), gradient_calls + with_gradient
    return Rollout(loop.finalize(state).value, walk.sigmas[-1], calls, gradient_calls)


def _check_noises(noises: Sequence[Sequence[Tensor]], walk: Walk) -> None:
    for chunk, drawn in enumerate(noises):
        shapes = [tuple(noise.shape) for noise in drawn[: walk.draws]]
        if shapes != [walk.shape] * walk.draws:
            raise UserError(
                f"noises of chunk {chunk}: got shapes {shapes}, expected {walk.draws} of (B, C, T, H, W) = {walk.shape}"
            )
