"""The parity ladder: what a card promises, level by level, against the library on the same files.

C0 component, C1 loop, C2 behaviour, C3 batch invariance, then the interleave gate. C4, the quality of artifacts, is an
evaluation's to judge. A level that the card does not list is not run. The rows of clips are here, those of texts,
scores and chunked clips in ``text``, ``score`` and ``chunks``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cards.card import ModelCard
from inference.artifact import Artifact
from inference.engine import Engine
from inference.instance import ModelInstance
from inference.parity.behaviour import behaviour_gate
from inference.parity.chunks import chunk_rows
from inference.parity.interleave import GateReport, interleave_gate, tensor_difference, worst
from inference.parity.library import WanLibrary, library_of
from inference.parity.reference import drive_request
from inference.parity.requests import TEXT_PROMPTS, gate_tasks
from inference.parity.score import score_rows
from inference.parity.text import text_rows
from inference.parity.tokens import token_gates
from inference.request import Request
from inference.resolve import CHUNK_LOOP, SCORE_LOOP, TEXT_LOOP, denoise_spec, refine_nodes, resolve
from loops.denoise import initial_noise
from loops.loop import ModelCall

PROMPT = "a red circle moves left"
SOLVERS = ("unipc", "euler")
GUIDANCE = (1.0, 5.0)
STEPS = 4
FRAMES_TOLERANCE = 1e-4
"""Of decoded frames in [0, 1]."""


def run_ladder(card: ModelCard, device: torch.device | str = "cpu", *, seed: int = 0) -> Iterator[GateReport]:
    """Loads the card and the library's model, and reports each row as soon as it is measured.

    Raises ``UserError`` for a card none of whose tasks has a ladder.
    """
    tasks = gate_tasks(card)
    levels = card.parity.levels
    engine = Engine(device, cache_bytes=0)
    instance = engine.load(card)
    library = library_of(card, engine.device) if {"C0", "C1", "C2"} & set(levels) else None
    for task, kind in tasks.items():
        if library is None:
            break
        yield from ROWS.get(kind, clip_rows)(instance, task, library, seed=seed)
    del library
    if "C3" in levels:
        yield interleave_gate(instance, batching="shape")
    if card.parity.interleave_required:
        yield interleave_gate(instance)


def clip_rows(instance: ModelInstance, task: str, library: WanLibrary, *, seed: int) -> Iterator[GateReport]:
    """The levels C0, C1 and C2 of a clip task, as far as the card lists them."""
    card = instance.card
    if "C0" in card.parity.levels:
        yield from component_level(instance, library, seed=seed)
    if "C1" in card.parity.levels:
        yield from loop_level(instance, library, seed=seed)
    if "C2" in card.parity.levels:
        yield from token_gates(instance, prompts=TEXT_PROMPTS, seed=seed)
        for solver in _solvers(card):
            report = behaviour_gate(
                instance, prompt=PROMPT, seed=seed, solver=solver, tolerance=card.parity.tolerances["C2"]
            )
            yield replace(report, what=f"{report.what}, {solver}")


def rollout_rows(instance: ModelInstance, task: str, library: WanLibrary, *, seed: int) -> Iterator[GateReport]:
    """The levels C0, C1 and C2 of a chunked clip: the components as those of any clip, then what chunking adds."""
    if "C0" in instance.card.parity.levels:
        yield from component_level(instance, library, seed=seed)
    yield from chunk_rows(instance, task, library, seed=seed)


ROWS: dict[str, Callable[..., Iterator[GateReport]]] = {
    CHUNK_LOOP: rollout_rows,
    SCORE_LOOP: score_rows,
    TEXT_LOOP: text_rows,
}
"""By the kind of a task's first loop; the others are clips."""


# -- C0


def component_level(instance: ModelInstance, library: WanLibrary, *, seed: int) -> Iterator[GateReport]:
    """Each component against the library's module called directly, and against a second load of the folder."""
    tolerance = instance.card.parity.tolerances["C0"]
    calls = _component_calls(instance, seed)
    ours = {cid: instance.call(call) for cid, call in calls.items()}
    net = calls["transformer"].tensors
    theirs = {
        "text_encoder": library.encode(PROMPT),
        "transformer": library.velocity(net["latents"], net["timestep"], net["text"]),
        "vae": library.decode(calls["vae"].tensors["latents"]),
    }
    for cid, expected in theirs.items():
        # The VAE's moments are multiplied here and divided there: one rounding apart.
        allowed = FRAMES_TOLERANCE if cid == "vae" else tolerance
        yield GateReport("C0", f"{cid} == the library's module", tensor_difference(ours[cid], expected), allowed)
    again = ModelInstance.load(instance.card, instance.device)
    difference = worst(tensor_difference(ours[cid], again.call(call)) for cid, call in calls.items())
    yield GateReport("C0", "components == those of a second load", difference, tolerance)


def _component_calls(instance: ModelInstance, seed: int) -> dict[str, ModelCall]:
    """One call a component, on inputs of the card's own sizes."""
    card = instance.card
    s = card.sampling
    noise, _ = initial_noise(seed, card.geometry.latent_shape(s.frames, s.height, s.width))
    latents = noise.to(instance.device)
    encode = ModelCall("text_encoder", "encode", instance.tokenize(PROMPT, s.max_sequence_length))
    tensors = {
        "latents": latents,
        "timestep": torch.tensor([617.25], device=instance.device),
        "text": instance.call(encode),
    }
    return {
        "text_encoder": encode,
        "transformer": ModelCall("transformer", "velocity", tensors, instance.numerics("transformer")),
        "vae": ModelCall("vae", "decode", {"latents": latents}),
    }


# -- C1


def loop_level(instance: ModelInstance, library: WanLibrary, *, seed: int) -> Iterator[GateReport]:
    """The engine against the reference driver and the library's pipeline."""
    card = instance.card
    tolerance = card.parity.tolerances["C1"]
    engine = Engine(instance.device, cache_bytes=0)
    frames: list[float] = []
    for solver in _solvers(card):
        for guidance in GUIDANCE:
            request = _request(card, seed=seed, solver=solver, guidance=guidance)
            ours = engine.run(request, instance)
            where = f"{solver}, guidance {guidance:g}"
            driven = drive_request(instance, request)
            yield GateReport("C1", f"engine == reference driver, {where}", _to_driven(ours, driven), tolerance)
            latents, video = library.sample(request, solver=solver, shift=ours.provenance.params.shift)
            difference = tensor_difference(ours.latents, latents)
            yield GateReport("C1", f"engine == {library.pipeline.__class__.__name__}, {where}", difference, tolerance)
            frames.append(tensor_difference(_unit(ours), video))
    yield GateReport("C1", "decoded frames == the library's, all of the above", worst(frames), FRAMES_TOLERANCE)


def _solvers(card: ModelCard) -> tuple[str, ...]:
    """UniPC and Euler; a distilled card runs its own alone."""
    spec = denoise_spec(card, Request.task)
    return SOLVERS if spec.schedule.ladder is None else (spec.solver,)


def _request(card: ModelCard, **fields: Any) -> Request:
    """A request with every field set, so that the library can be asked the very same."""
    ladder = denoise_spec(card, Request.task).schedule.ladder
    steps = STEPS if ladder is None else len(ladder)
    fields |= {"temperature": 0.0} if refine_nodes(card, Request.task) else {}
    resolved = resolve(Request(prompt=PROMPT, negative_prompt="blue square", steps=steps, **fields), card)
    p = resolved.params
    return replace(resolved.request, frames=p.frames, height=p.height, width=p.width)


def _to_driven(ours: Artifact, driven: dict[str, Tensor]) -> float:
    assert ours.video is not None
    return worst(
        (tensor_difference(ours.latents, driven["latents"][0]), tensor_difference(ours.video, driven["video"][0]))
    )


def _unit(artifact: Artifact) -> Tensor:
    """Video (3, F, H, W) in [0, 1]."""
    assert artifact.video is not None
    return (artifact.video.float() * 0.5 + 0.5).clamp(0, 1)
