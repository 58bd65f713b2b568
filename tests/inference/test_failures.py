"""One request's failure is its own: in a merged forward too, and the neighbours keep their bits."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from inference.engine import Engine
from inference.instance import ModelInstance, Resident
from inference.load import card_of
from inference.request import Request
from loops.loop import ModelCall

BASE = Request(prompt="a red circle", seed=1, steps=3, guidance=1.0, frames=5, height=16, width=16, output="latents")
POISON = "green green green"
GOOD = tuple(replace(BASE, prompt=p, seed=i) for i, p in enumerate(("a red circle", "two blue squares", "a triangle")))


@pytest.fixture(scope="module")
def instance(wan_folder: Path) -> ModelInstance:
    card = card_of(wan_folder)
    short = card.sampling.model_copy(update={"max_sequence_length": 16})
    return Engine().load(card.model_copy(update={"sampling": short}))


@contextlib.contextmanager
def watched(instance: ModelInstance, hook: Callable[[torch.Tensor], None]) -> Iterator[ModelInstance]:
    """A view whose transformer shows every forward's text (rows, tokens, width) to ``hook`` first."""
    module = copy.deepcopy(instance.module("transformer"))

    def before(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        hook(kwargs["encoder_hidden_states"])

    module.register_forward_pre_hook(before, with_kwargs=True)
    yield instance.view({"transformer": Resident(module)})


def text_of(instance: ModelInstance, prompt: str) -> torch.Tensor:
    tokens = instance.tokenize(prompt, instance.card.sampling.max_sequence_length)
    return instance.call(ModelCall("text_encoder", "encode", tokens))


def finish(engine: Engine, view: ModelInstance, requests: tuple[Request, ...]) -> list[Any]:
    handles = [engine.submit(request, view) for request in requests]
    while engine.tick():
        pass
    assert all(handle.done for handle in handles)
    return handles


@pytest.mark.parametrize("at", [0, 1, 3])
@pytest.mark.parametrize("max_rows", [2, 32])
def test_a_row_that_breaks_a_merged_forward_fails_alone_and_leaves_the_others_their_bits(
    instance: ModelInstance, at: int, max_rows: int
) -> None:
    poison = text_of(instance, POISON)[0]

    def refuse(text_BLD: torch.Tensor) -> None:
        if any(torch.equal(row, poison) for row in text_BLD):
            raise RuntimeError("poisoned row")

    requests = (*GOOD[:at], replace(BASE, prompt=POISON), *GOOD[at:])
    with watched(instance, refuse) as view:
        handles = finish(Engine(batching="shape", max_rows=max_rows), view, requests)
        without = finish(Engine(batching="shape", max_rows=max_rows), view, GOOD)
    with pytest.raises(RuntimeError, match="poisoned row"):
        handles.pop(at).result()
    for ours, theirs in zip(handles, without, strict=True):
        assert torch.equal(ours.result().latents, theirs.result().latents)


def test_two_that_break_are_both_found(instance: ModelInstance) -> None:
    bad = [text_of(instance, prompt)[0] for prompt in (POISON, "blue")]

    def refuse(text_BLD: torch.Tensor) -> None:
        if any(torch.equal(row, one) for row in text_BLD for one in bad):
            raise RuntimeError("poisoned row")

    requests = (replace(BASE, prompt=POISON), GOOD[0], replace(BASE, prompt="blue"), GOOD[1])
    with watched(instance, refuse) as view:
        handles = finish(Engine(batching="shape"), view, requests)
    failed = []
    for handle in handles:
        try:
            handle.result()
            failed.append(False)
        except RuntimeError:
            failed.append(True)
    assert failed == [True, False, True, False]


def test_a_batch_too_large_for_the_device_goes_on_in_smaller_ones(instance: ModelInstance) -> None:
    """An allocator limit of two rows: nobody fails, and no forward that ran to its end was larger."""
    rows: list[int] = []

    def limit(text_BLD: torch.Tensor) -> None:
        if text_BLD.shape[0] > 2:
            raise torch.OutOfMemoryError("out of memory")
        rows.append(text_BLD.shape[0])

    requests = tuple(replace(BASE, seed=seed) for seed in range(5))
    with watched(instance, limit) as view:
        handles = finish(Engine(batching="shape"), view, requests)
    for request, handle in zip(requests, handles, strict=True):
        alone = Engine().run(request, instance).latents
        torch.testing.assert_close(handle.result().latents, alone, rtol=0, atol=1e-4)
    assert max(rows) == 2


def test_a_request_too_large_by_itself_fails_alone(instance: ModelInstance) -> None:
    def limit(text_BLD: torch.Tensor) -> None:
        if text_BLD.shape[0] > 1:
            raise torch.OutOfMemoryError("out of memory")

    guided = replace(BASE, guidance=3.0, guidance_policy="batched")  # two rows in one call
    with watched(instance, limit) as view:
        big, small = finish(Engine(batching="shape"), view, (guided, GOOD[1]))
    with pytest.raises(torch.OutOfMemoryError):
        big.result()
    assert torch.equal(small.result().latents, Engine().run(GOOD[1], instance).latents)
