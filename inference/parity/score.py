"""The ladder's rows of a score task: the library is transformers' ``CLIPModel``.

C0 pixels, embeddings and similarities, C1 whole scores. A norm is written differently here and there, so floats may be
a last bit of the card's dtype apart; scores are of unit scale. Nothing is trained, so there is no C2.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from inference.engine import Engine
from inference.instance import ModelInstance
from inference.parity.interleave import GateReport, score_difference, tensor_difference, worst
from inference.parity.reference import drive_slots
from inference.parity.requests import noise_frames
from inference.parity.transformers_library import ClipLibrary
from inference.request import Request
from loops.loop import ModelCall
from loops.score import tiled

PROMPTS = ("a red circle moves left", "")
SCORE_TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""By what the CLIP computes in."""


def score_rows(instance: ModelInstance, task: str, library: ClipLibrary, *, seed: int) -> Iterator[GateReport]:
    """The levels C0 and C1 as far as the card lists them."""
    if "C0" in instance.card.parity.levels:
        yield from _component_level(instance, task, library, seed)
    if "C1" in instance.card.parity.levels:
        yield from _loop_level(instance, task, library, seed)


def _component_level(instance: ModelInstance, task: str, library: ClipLibrary, seed: int) -> Iterator[GateReport]:
    card = instance.card
    tolerance, divisor = card.parity.tolerances["C0"], _divisor(instance)
    component = _component(instance, task)
    allowed = SCORE_TOLERANCE[instance.dtype(component)]
    frames_FHWC = noise_frames(3, 40, 24, seed)
    out = library.forward(PROMPTS[0], frames_FHWC)
    pixels_FCSS = instance.pixels(frames_FHWC)
    theirs_FCSS = library.inputs(PROMPTS[0], frames_FHWC)["pixel_values"]
    yield GateReport("C0", "pixels == the library's", tensor_difference(pixels_FCSS, theirs_FCSS), tolerance)
    encode = ModelCall(component, "encode", instance.tokenize(PROMPTS[0], card.sampling.max_sequence_length))
    text_1D = instance.call(encode)
    difference = tensor_difference(text_1D, out.text_embeds.float())
    yield GateReport("C0", "prompt embedding == the library's", difference, allowed)
    score = ModelCall(component, "score", {"pixels": pixels_FCSS, "text": text_1D.expand(len(pixels_FCSS), -1)})
    ours_F = instance.call(score)
    difference = tensor_difference(ours_F / divisor, out.logits_per_image[:, 0].float() / divisor)
    yield GateReport("C0", f"similarity / {divisor:g} == the library's", difference, allowed)
    again = ModelInstance.load(card, instance.device)
    repeated = (tensor_difference(text_1D, again.call(encode)), tensor_difference(ours_F, again.call(score)))
    yield GateReport("C0", "components == those of a second load", worst(repeated), tolerance)


def _loop_level(instance: ModelInstance, task: str, library: ClipLibrary, seed: int) -> Iterator[GateReport]:
    """The engine against the reference driver and the library's own forward over all frames at once."""
    score = instance.card.sampling.score
    assert score is not None
    engine = Engine(instance.device, cache_bytes=0)
    driven, forwards = [], []
    for i, prompt in enumerate(PROMPTS):
        frames_FHWC = noise_frames(1 + 2 * i * score.rows, 24, 40, seed + i)
        request = Request(prompt=prompt, task=task, frames=len(frames_FHWC), inputs={"pixels": frames_FHWC})
        ours = engine.run(request, instance).score
        assert ours is not None
        driven.append(score_difference(ours, drive_slots(instance, request)["score"]))
        logits_F = library.forward(prompt, tiled(frames_FHWC, score.grid)).logits_per_image[:, 0]
        forwards.append(tensor_difference(ours.frames_F, logits_F.double().cpu() / _divisor(instance)))
    tolerance = instance.card.parity.tolerances["C1"]
    yield GateReport("C1", "engine == reference driver", worst(driven), tolerance)
    allowed = SCORE_TOLERANCE[instance.dtype(_component(instance, task))]
    yield GateReport("C1", "engine == CLIPModel, whole clips in one forward", worst(forwards), allowed)


def _component(instance: ModelInstance, task: str) -> str:
    loop = next(node.loop for node in instance.card.programs[task].nodes if node.loop is not None)
    return instance.card.loops[loop].components["scorer"]


def _divisor(instance: ModelInstance) -> float:
    score = instance.card.sampling.score
    assert score is not None
    return score.divisor
