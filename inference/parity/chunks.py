"""The ladder's rows of a chunked rollout: the other side is one forward over the whole clip, without a cache.

C0: one chunk of all frames is the library's forward, the cached chunks are the block-causal forward, decoded chunks are
the one-shot decode. C1: the engine is the reference driver, and both are a rollout that evaluates everything anew. C2:
a training rollout on the request's noises, with gradient, is what serving gave.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from cards.prediction import add_noise, network_timestep, velocity_to_x0
from inference.engine import Engine
from inference.instance import ModelInstance
from inference.parity.interleave import GateReport, tensor_difference, worst
from inference.parity.library import WanLibrary
from inference.parity.reference import drive_request
from inference.request import Request
from inference.resolve import denoise_spec, resolve
from loops.chunk_rollout import ChunkOptions, DecoderFeatures, rollout, rollout_noises, slab_spec
from loops.drive import drive
from loops.loop import LoopContext, ModelCall, Profile
from loops.options import read_options
from loops.registry import component_loop
from loops.slab import SlabHandle

PROMPT = "a red circle moves left"
CACHED_TOLERANCE = 1e-4
"""Between a forward on cached keys and values and one over the whole clip, on latents of unit scale: the products are
of other shapes."""
FRAMES_TOLERANCE = 1e-6
"""Between frames decoded chunk by chunk and at once, in [-1, 1]."""


def chunk_rows(instance: ModelInstance, task: str, library: WanLibrary, *, seed: int) -> Iterator[GateReport]:
    """The rows that chunking adds to the levels C0, C1 and C2, as far as the card lists them."""
    levels = instance.card.parity.levels
    clip = _Clip(instance, task, seed)
    if "C0" in levels:
        yield from _component_level(clip, library)
    if "C1" in levels:
        yield from _loop_level(clip)
    if "C2" in levels:
        yield chunk_gate(instance, prompt=PROMPT, seed=seed, tolerance=instance.card.parity.tolerances["C2"])


class _Clip:
    """A request of the card's own size and what its rollout is made of."""

    def __init__(self, instance: ModelInstance, task: str, seed: int):
        self.instance = instance
        self.request = Request(prompt=PROMPT, task=task, seed=seed)
        params = resolve(self.request, instance.card).params
        self.spec = denoise_spec(instance.card, task)
        self.options = read_options(ChunkOptions, self.spec, instance.card)
        self.shape = (1, *instance.card.geometry.latent_shape(params.frames, params.height, params.width))
        self.chunks = self.shape[2] // self.options.chunk
        assert self.spec.schedule.ladder is not None
        self.ladder = self.spec.schedule.ladder
        draws = len(self.ladder) + (self.options.context_noise > 0)
        generator = torch.Generator("cpu").manual_seed(seed)
        self.noises = rollout_noises(self.shape, self.options.chunk, draws, [generator])
        self.text = text_features(instance, self.request)

    @property
    def chunking(self) -> dict[str, Any]:
        return {"chunk": self.options.chunk, "window": self.options.window, "sinks": self.options.sinks}

    def call(self, method: str, latents: Tensor, timestep: Tensor, *, action: bool = True, **static: object) -> Tensor:
        """``action``: under that of the request, where the card has actions: none for every chunk."""
        component = self.spec.components["denoiser"]
        tensors = {"latents": latents, "timestep": timestep, "text": self.text}
        state = static.pop("state", None)
        embedder = self.spec.components.get("actions")
        if embedder is not None and action:
            chunks = 1 if state is not None else latents.shape[2] // self.options.chunk
            ids = torch.zeros(1, chunks, dtype=torch.long)
            vectors = self.instance.call(ModelCall(embedder, "embed", {"ids": ids}))
            tensors["action"] = vectors[:, 0] if state is not None else vectors
        return self.instance.call(
            ModelCall(component, method, tensors, {**self.instance.numerics(component), **static}, state=state)
        )


def text_features(instance: ModelInstance, request: Request) -> Tensor:
    """Text embedding (1, L, D) of a request's prompt, by the reference driver and not by an engine."""
    program = instance.card.programs[request.task]
    node = next(node for node in program.nodes if node.writes == "text")
    ctx = LoopContext(spec=None, slots={"prompt": request.prompt})
    return drive(component_loop(node), resolve(request, instance.card).params, instance, ctx).value


def _component_level(clip: _Clip, library: WanLibrary) -> Iterator[GateReport]:
    instance, frames = clip.instance, clip.shape[2]
    latents = torch.cat([drawn[0] for drawn in clip.noises], dim=2).to(instance.device)
    t = torch.tensor([617.25], device=instance.device)
    whole = clip.call("velocity_block_causal", latents, t, action=False, chunk=frames, window=None, sinks=0)
    difference = tensor_difference(whole, library.velocity(latents, t, clip.text))
    tolerance = instance.card.parity.tolerances["C0"]
    yield GateReport("C0", "one chunk of all frames == the library's transformer", difference, tolerance)
    timesteps_1J = torch.linspace(900.0, 100.0, clip.chunks, device=instance.device).unsqueeze(0)
    full = clip.call("velocity_block_causal", latents, timesteps_1J, **clip.chunking)
    kv = SlabHandle(
        slab_spec(
            instance.config(clip.spec.components["denoiser"]),
            clip.options,
            chunks=clip.chunks,
            shape=(1, clip.shape[1], clip.options.chunk, clip.shape[3], clip.shape[4]),
            dtype=instance.dtype(clip.spec.components["denoiser"]),
            device=instance.device_of(clip.spec.components["denoiser"]),
        )
    )
    parts = latents.split(clip.options.chunk, dim=2)
    cached = [clip.call("velocity_chunk", part, timesteps_1J[:, j], index=j, state=kv) for j, part in enumerate(parts)]
    difference = tensor_difference(torch.cat(cached, dim=2), full)
    yield GateReport("C0", "cached chunks == the block-causal forward", difference, CACHED_TOLERANCE)
    decoder, features = clip.spec.components["decoder"], DecoderFeatures()
    pieces = [instance.call(ModelCall(decoder, "decode_chunk", {"latents": part}, state=features)) for part in parts]
    once = instance.call(ModelCall(decoder, "decode", {"latents": latents}))
    difference = tensor_difference(torch.cat(pieces, dim=2), once)
    yield GateReport("C0", "frames decoded chunk by chunk == at once", difference, FRAMES_TOLERANCE)


def _loop_level(clip: _Clip) -> Iterator[GateReport]:
    instance = clip.instance
    ours = Engine(instance.device, cache_bytes=0).run(clip.request, instance)
    driven = drive_request(instance, clip.request)
    assert ours.video is not None
    difference = worst(
        (tensor_difference(ours.latents, driven["latents"][0]), tensor_difference(ours.video, driven["video"][0]))
    )
    yield GateReport("C1", "engine == reference driver", difference, instance.card.parity.tolerances["C1"])
    difference = tensor_difference(ours.latents, _uncached(clip)[0])
    yield GateReport("C1", "engine == rollout by whole forwards, without a cache", difference, CACHED_TOLERANCE)


def _uncached(clip: _Clip) -> Tensor:
    """Latents (1, C, T, H, W) of the rollout where each evaluation is one forward over the clip so far."""
    device, noise = clip.instance.device, clip.options.context_noise
    context: list[Tensor] = []
    x0s: list[Tensor] = []
    for j, drawn in enumerate(clip.noises):
        x = x0 = drawn[0].to(device)
        for rung, sigma in enumerate(clip.ladder):
            sigmas = torch.tensor([*[noise] * j, sigma], device=device)
            timesteps_1J = network_timestep(sigmas).unsqueeze(0)
            so_far = torch.cat([*context, x], dim=2)
            velocity = clip.call("velocity_block_causal", so_far, timesteps_1J, **clip.chunking)
            x0 = velocity_to_x0(x, velocity[:, :, -clip.options.chunk :].float(), sigma)
            if rung + 1 < len(clip.ladder):
                x = add_noise(x0, drawn[rung + 1].to(device), clip.ladder[rung + 1])
        x0s.append(x0)
        context.append(x0 if noise == 0 else add_noise(x0, drawn[len(clip.ladder)].to(device), noise))
    return torch.cat(x0s, dim=2)


def chunk_gate(instance: ModelInstance, *, prompt: str, seed: int, tolerance: float = 0.0) -> GateReport:
    """The behaviour gate (C2) of a chunked rollout: serving, a ROLLOUT request and a training rollout are one.

    The difference is nan for a NaN anywhere and inf where a chunk has no gradient, so that neither passes.
    """
    request = Request(prompt=prompt, seed=seed, output="latents")
    clip = _Clip(instance, request.task, seed)
    engine = Engine(instance.device, cache_bytes=0)
    served = engine.run(request, instance)
    recorded = engine.run(Request(prompt=prompt, seed=seed, output="latents", profile=Profile.ROLLOUT), instance)
    text = text_features(instance, request).requires_grad_(True)
    trained = rollout(instance, clip.spec, text, clip.noises, gradient=lambda chunk: True)
    differences = [
        tensor_difference(recorded.latents, served.latents),
        tensor_difference(trained.latents[0].detach(), served.latents),
        0.0 if trained.latents.requires_grad and trained.gradient_calls == clip.chunks else math.inf,
    ]
    what = f"rollout == serve == training's rollout, with gradient in {trained.gradient_calls} of {trained.calls} calls"
    return GateReport("C2", what, worst(differences), tolerance)
