"""The ladder's rows of a text task: the library is transformers' ``generate``.

C0 the language model's logits, C1 whole completions, C2 what a rollout keeps. A completion's difference is that of its
log-probs; infinite where its tokens are others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from inference.engine import Engine
from inference.instance import ModelInstance
from inference.parity.interleave import GateReport, completion_difference, tensor_difference, worst
from inference.parity.reference import drive_slots
from inference.parity.requests import context_of, text_request
from inference.parity.transformers_library import GenerateLibrary
from loops.ar_decode import GrowingKV
from loops.loop import ModelCall, Profile

PROMPTS = ("a red circle moves left and", "b")
LOGPROB_TOLERANCE = 1e-4
"""Between a token's log-prob with a KV cache and without."""


def text_rows(instance: ModelInstance, task: str, library: GenerateLibrary, *, seed: int) -> Iterator[GateReport]:
    """The levels C0, C1 and C2 as far as the card lists them."""
    levels = instance.card.parity.levels
    if "C0" in levels:
        yield from _component_level(instance, task, library)
    if "C1" in levels:
        yield from _loop_level(instance, task, library, seed)
    if "C2" in levels:
        yield from _behaviour_level(instance, task, library, seed)


def _component_level(instance: ModelInstance, task: str, library: GenerateLibrary) -> Iterator[GateReport]:
    tolerance = instance.card.parity.tolerances["C0"]
    component, context = _component(instance, task), context_of(instance)
    ids = [instance.tokenize(prompt, context)["ids"] for prompt in PROMPTS]
    theirs = [library.tokens(prompt) for prompt in PROMPTS]
    yield GateReport("C0", "tokens == the library's tokenizer", worst(map(tensor_difference, ids, theirs)), tolerance)
    calls = [ModelCall(component, "next_logits", {"ids": ids_1L}, state=GrowingKV()) for ids_1L in ids]
    logits = [instance.call(call) for call in calls]
    expected = [library.next_logits(ids_1L) for ids_1L in theirs]
    difference = worst(map(tensor_difference, logits, expected))
    yield GateReport("C0", f"{component} == the library's module", difference, tolerance)
    again = ModelInstance.load(instance.card, instance.device)
    calls = [replace(call, state=GrowingKV()) for call in calls]
    difference = worst(map(tensor_difference, logits, (again.call(call) for call in calls)))
    yield GateReport("C0", "components == those of a second load", difference, tolerance)


def _loop_level(instance: ModelInstance, task: str, library: GenerateLibrary, seed: int) -> Iterator[GateReport]:
    """The engine against the reference driver and, where nothing is drawn, the library's ``generate``."""
    tolerance = instance.card.parity.tolerances["C1"]
    engine = Engine(instance.device, cache_bytes=0)
    for temperature in (0.0, 1.0):
        driven, generated = [], []
        for prompt in PROMPTS:
            request = text_request(instance, task, prompt, seed=seed, temperature=temperature)
            ours = engine.run(request, instance).completion
            driven.append(completion_difference(ours, drive_slots(instance, request)["completion"]))
            if temperature == 0:
                assert ours is not None and ours.logprobs is not None and request.max_tokens is not None
                tokens, logprobs = library.greedy(library.tokens(prompt), request.max_tokens)
                same = list(ours.token_ids) == tokens
                generated.append(tensor_difference(ours.logprobs, logprobs) if same else math.inf)
        yield GateReport("C1", f"engine == reference driver, temperature {temperature:g}", worst(driven), tolerance)
        if generated:
            what = "greedy tokens and their log-probs == generate's"
            yield GateReport("C1", what, worst(generated), tolerance)


def _behaviour_level(instance: ModelInstance, task: str, library: GenerateLibrary, seed: int) -> Iterator[GateReport]:
    """A rollout says what serving says, and its log-probs are those that a forward over the whole text gives."""
    engine = Engine(instance.device, cache_bytes=0)
    served, forced = [], []
    for prompt in PROMPTS:
        request = text_request(instance, task, prompt, seed=seed, temperature=1.0)
        rollout = engine.run(request, instance).completion
        serve = engine.run(replace(request, profile=Profile.SERVE), instance).completion
        assert rollout is not None and rollout.logprobs is not None and serve is not None
        served.append(completion_difference(replace(rollout, logprobs=None), serve))
        whole = library.forced(library.tokens(prompt), rollout.token_ids)
        forced.append(tensor_difference(rollout.logprobs, whole))
    yield GateReport("C2", "rollout == serve, token for token", worst(served), instance.card.parity.tolerances["C2"])
    what = "rollout log-probs == the library's forward over the whole text, with gradient"
    yield GateReport("C2", what, worst(forced), LOGPROB_TOLERANCE)


def _component(instance: ModelInstance, task: str) -> str:
    loop = next(node.loop for node in instance.card.programs[task].nodes if node.loop is not None)
    return instance.card.loops[loop].components["lm"]
