"""Observers see every forward and step, may refuse a step, and change no bit."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from inference.engine import Engine
from inference.extend.activation_trace import ActivationTrace
from inference.extend.nan_watch import NaNWatch, NotFiniteError
from inference.extend.observer import Observer, Step
from inference.extend.profiler import Profiler
from inference.instance import ModelInstance, Resident
from inference.load import card_of
from inference.parity.aligner import align
from inference.request import Request

BASE = Request(prompt="a red circle", seed=1, steps=3, guidance=1.0, frames=5, height=16, width=16, output="latents")
GUIDED = replace(BASE, prompt="two blue squares", seed=2, guidance=3.0, output="video")


@pytest.fixture(scope="module")
def instance(wan_folder: Path) -> ModelInstance:
    card = card_of(wan_folder)
    short = card.sampling.model_copy(update={"max_sequence_length": 16})
    return Engine().load(card.model_copy(update={"sampling": short}))


class Notes(Observer):
    """Keeps what it is shown."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, str, int, bool]] = []
        self.finished: list[tuple[str, bool]] = []

    def on_step(self, step: Step) -> None:
        self.steps.append((step.request_id, step.plan.label, step.number, step.cached))

    def on_finish(self, request_id: str, failure: BaseException | None) -> None:
        self.finished.append((request_id, failure is None))


@pytest.mark.parametrize("batching", ["off", "shape"])
def test_observed_requests_keep_their_bits(instance: ModelInstance, batching: Any) -> None:
    plain = Engine(batching=batching).run_interleaved([BASE, GUIDED], instance)
    watched = Engine(batching=batching, observers=[NaNWatch(), Profiler(), Notes()]).run_interleaved(
        [BASE, GUIDED], instance
    )
    for a, b in zip(plain, watched, strict=True):
        assert torch.equal(a.latents, b.latents)


def test_every_step_of_every_request_is_shown_in_order_cached_ones_too(instance: ModelInstance) -> None:
    notes = Notes()
    engine = Engine(observers=[notes])
    first, second = engine.submit(GUIDED, instance), engine.submit(replace(GUIDED, seed=3), instance)
    while engine.tick():
        pass
    labels = ["encode_prompt", "encode_negative", "denoise 1/3", "denoise 2/3", "denoise 3/3", "decode"]
    for handle in (first, second):
        mine = [(label, number) for who, label, number, _ in notes.steps if who == handle.id]
        assert mine == [(label, number) for number, label in enumerate(labels)]
    assert notes.finished == [(first.id, True), (second.id, True)]
    third = engine.submit(GUIDED, instance)
    while engine.tick():
        pass
    assert [cached for who, *_, cached in notes.steps if who == third.id] == [True, True, False, False, False, False]


def nan_view(instance: ModelInstance, from_step: int, row_of: torch.Tensor) -> ModelInstance:
    """A view whose transformer turns one request's rows to NaN from its n-th appearance on."""
    module = copy.deepcopy(instance.module("transformer"))
    seen = [0]

    def spoil(_: Any, args: Any, kwargs: dict[str, Any], output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        text = kwargs["encoder_hidden_states"]
        hit = torch.tensor([torch.equal(row, row_of) for row in text])
        if hit.any():
            seen[0] += 1
        if seen[0] <= from_step or not hit.any():
            return output
        value = output[0].clone()
        value[hit] = float("nan")
        return (value, *output[1:])

    module.register_forward_hook(spoil, with_kwargs=True)
    return instance.view({"transformer": Resident(module)})


@pytest.mark.parametrize("batching", ["off", "shape"])
def test_nan_fails_its_request_at_its_step_and_no_other(instance: ModelInstance, batching: Any) -> None:
    engine = Engine(batching=batching, observers=[NaNWatch()])
    (poison,) = engine.encode(["green"], instance)
    view = nan_view(instance, 1, poison[0])
    bad = engine.submit(replace(BASE, prompt="green"), view)
    good = engine.submit(BASE, view)
    while engine.tick():
        pass
    with pytest.raises(NotFiniteError, match=r"denoise 2/3: transformer\.velocity gave \d+ of \d+ values"):
        bad.result()
    assert bad.progress[0] == 2  # the encoding and one step
    plain = Engine(batching=batching)
    pair = plain.run_interleaved([replace(BASE, prompt="green"), BASE], instance)
    assert torch.equal(good.result().latents, pair[1].latents) or batching == "shape"
    torch.testing.assert_close(good.result().latents, pair[1].latents, rtol=0, atol=1e-4)


def test_a_result_that_an_observer_refused_is_not_cached(instance: ModelInstance) -> None:
    module = copy.deepcopy(instance.module("text_encoder"))
    with torch.no_grad():
        next(module.parameters()).fill_(float("nan"))
    view = instance.view({"text_encoder": Resident(module)})
    engine = Engine(observers=[NaNWatch()])
    handles = [engine.submit(replace(BASE, seed=seed), view) for seed in (1, 2)]
    while engine.tick():
        pass
    for handle in handles:
        with pytest.raises(NotFiniteError, match="encode_prompt"):
            handle.result()
    assert len(engine.features) == 0


def test_the_profiler_counts_forwards_by_component_and_rows(instance: ModelInstance) -> None:
    profiler = Profiler()
    Engine(batching="shape", observers=[profiler]).run_interleaved([BASE, replace(BASE, seed=2), GUIDED], instance)
    counts = {(key[0], key[3]): tally.forwards for key, tally in profiler.tallies.items()}
    # Two prompts and the negative one are encoded, each by itself; then all three step together, one of them guided.
    assert counts == {("text_encoder", 1): 3, ("transformer", 4): 3, ("vae", 1): 1}
    assert profiler.seconds() == pytest.approx(sum(profiler.seconds(c) for c in ("text_encoder", "transformer", "vae")))
    assert profiler.table().splitlines()[1].split()[0] in ("transformer.velocity", "vae.decode", "text_encoder.encode")


def test_a_trace_lists_submodules_in_the_order_in_which_they_ran() -> None:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    x = torch.randn(5, 3)
    trace = ActivationTrace(module, keep=True)
    with trace.recording() as activations:
        expected = module(x)
        module(x)
    assert [(a.name, a.call) for a in activations] == [(n, c) for c in (0, 1) for n in ("0", "1", "2", "")]
    assert torch.equal(activations[3].value, expected)  # type: ignore[arg-type]
    assert activations[1].largest == float(torch.relu(module[0](x)).max().detach())
    module(x)
    assert len(activations) == 8  # the hooks are gone


def test_the_aligner_names_the_first_submodule_that_differs(instance: ModelInstance) -> None:
    ours = instance.module("transformer")
    theirs = copy.deepcopy(ours)
    inputs = {
        "hidden_states": torch.randn(1, 4, 2, 4, 4),
        "timestep": torch.tensor([500.0]),
        "encoder_hidden_states": torch.randn(1, 16, 24),
    }

    def run(module: Any) -> Any:
        with torch.no_grad():
            return module(**inputs)

    same = align(ours, lambda: run(ours), theirs, lambda: run(theirs))
    assert same.first_divergence is None and len(same.rows) > 30
    assert "agree within" in same.report()
    with torch.no_grad():
        theirs.blocks[1].attn1.to_k.weight[0, 0] += 1e-2  # type: ignore[index, union-attr]
    apart = align(ours, lambda: run(ours), theirs, lambda: run(theirs))
    assert apart.first_divergence is not None and apart.first_divergence.name == "blocks.1.attn1.to_k"
    assert "> blocks.1.attn1.to_k" in apart.report()
    loose = align(ours, lambda: run(ours), theirs, lambda: run(theirs), tolerance=10.0)
    assert loose.first_divergence is None
