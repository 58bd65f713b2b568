"""A compiled component: close to the library's, equal to itself however it is interleaved, and with new weights after
a sync. CUDA graphs are tried where there is a GPU."""

from __future__ import annotations

import copy
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cards.errors import UserError
from inference.cache.keys import feature_key
from inference.compiling import compile_component
from inference.engine import Engine
from inference.instance import ModelInstance
from inference.load import card_of
from inference.request import Request
from inference.weight_sync import WeightSyncController

BASE = Request(prompt="a red circle", seed=1, steps=3, guidance=2.0, frames=5, height=16, width=16, output="latents")
SIZES = (BASE, replace(BASE, seed=2, width=32), replace(BASE, seed=3, guidance=1.0))


def load(folder: Path, device: str = "cpu") -> ModelInstance:
    card = card_of(folder)
    short = card.sampling.model_copy(update={"max_sequence_length": 16})
    return Engine(device).load(card.model_copy(update={"sampling": short}), tasks=("t2v",))


@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, ("g++", "c++", "clang++"))), reason="torch.compile needs a C++ compiler")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")  # torch's own, inside inductor
def test_a_compiled_transformer_is_close_interleaves_to_the_bit_and_follows_a_sync(wan_folder: Path) -> None:
    plain, fast = load(wan_folder), load(wan_folder)
    role = fast.view({})
    before = feature_key(fast, ("transformer", "velocity", "x"))
    compile_component(fast, "transformer")
    compile_component(fast, "transformer")
    assert feature_key(role, ("transformer", "velocity", "x")) != before
    engine = Engine(cache_bytes=0)
    eager = engine.run_serial(SIZES, plain)
    serial = engine.run_serial(SIZES, fast)
    together = engine.run_interleaved(SIZES, fast)
    for mine, other, library in zip(serial, together, eager, strict=True):
        assert torch.equal(mine.latents, other.latents)
        torch.testing.assert_close(mine.latents, library.latents, rtol=0, atol=1e-4)
    changed = copy.deepcopy(plain.module("transformer"))
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.mul_(1.05)
    weights = {name: value.clone() for name, value in changed.state_dict().items()}
    controller = WeightSyncController(engine)
    for instance in (plain, fast):
        controller.sync(instance, "transformer", weights)
    after = engine.run(BASE, fast).latents
    assert (after - serial[0].latents).abs().max() > 1e-3
    torch.testing.assert_close(after, engine.run(BASE, plain).latents, rtol=0, atol=1e-4)


def test_cuda_graphs_want_a_gpu_and_nothing_is_compiled_twice_in_two_ways(wan_folder: Path) -> None:
    instance = load(wan_folder)
    with pytest.raises(UserError, match="expected cuda"):
        compile_component(instance, "transformer", cuda_graphs=True)
    assert instance.residents["transformer"].compiled == ""
    instance.residents["transformer"].compiled = "graphs"
    with pytest.raises(UserError, match="load it again"):
        compile_component(instance, "transformer")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_graphs_are_close_and_results_outlive_the_next_replay(wan_folder: Path) -> None:
    plain, fast = load(wan_folder, "cuda"), load(wan_folder, "cuda")
    compile_component(fast, "transformer", cuda_graphs=True)
    engine = Engine("cuda", cache_bytes=0)
    eager, graphs = engine.run_serial(SIZES, plain), engine.run_interleaved(SIZES, fast)
    for mine, library in zip(graphs, eager, strict=True):
        torch.testing.assert_close(mine.latents, library.latents, rtol=0, atol=1e-3)
