"""Per-node overrides: a program of two denoising loops, each with values of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cards.errors import UserError
from cards.program import Node, Program
from inference.engine import Engine
from inference.instance import ModelInstance
from inference.load import card_of
from inference.parity.reference import drive_request
from inference.request import Request
from inference.resolve import resolve

BASE = Request(prompt="a red circle", seed=1, steps=3, guidance=1.0, frames=5, height=16, width=16, output="latents")


@pytest.fixture(scope="module")
def wan(wan_folder: Path) -> ModelInstance:
    """t2v with a second denoising loop after the first, which starts from noise of its own."""
    card = card_of(wan_folder)
    nodes = card.programs["t2v"].nodes
    again = Node(id="again", loop="denoise", reads=("text",), writes="latents")
    program = Program(nodes=(*nodes[:3], again, *nodes[3:]))
    short = card.sampling.model_copy(update={"max_sequence_length": 16})
    return Engine().load(card.model_copy(update={"sampling": short, "programs": {"t2v": program}}))


def test_a_node_runs_with_its_own_values(wan: ModelInstance) -> None:
    labels: list[str] = []
    own = replace(BASE, overrides={"again": {"steps": 5, "solver": "euler", "shift": 2.0}})
    got = Engine().run_interleaved([own], wan, lambda label, *_: labels.append(label))[0]
    assert labels[-5:] == [f"denoise {i}/5" for i in range(1, 6)]
    assert labels[1:4] == [f"denoise {i}/3" for i in range(1, 4)]
    alone = Engine().run(replace(BASE, steps=5, solver="euler", shift=2.0), wan)
    assert torch.equal(got.latents, alone.latents)
    assert torch.equal(got.latents, drive_request(wan, own)["latents"][0])


def test_a_loop_that_alone_is_guided_has_its_negative_prompt_encoded(wan: ModelInstance) -> None:
    own = replace(BASE, overrides={"again": {"guidance": 4.0}})
    handle = Engine().submit(own, wan)
    assert handle.progress == (0, 2 + 3 + 3)
    alone = Engine().run(replace(BASE, guidance=4.0), wan)
    assert torch.equal(Engine().run(own, wan).latents, alone.latents)


def test_the_demand_knows_the_overrides(wan: ModelInstance) -> None:
    engine = Engine()
    few, many = engine.submit(BASE, wan), engine.submit(replace(BASE, overrides={"again": {"steps": 50}}), wan)
    assert many.demand.seconds > few.demand.seconds


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"agian": {"steps": 2}}, "loop node.*Did you mean"),
        ({"encode_prompt": {"steps": 2}}, "loop node"),
        ({"again": {"step": 2}}, "again: .*Did you mean"),
        ({"again": {"seed": 2}}, "again: .*seed"),
        ({"again": {"steps": 0}}, "again: .*steps: got 0"),
        ({"again": {"guidance": -1.0}, "denoise": {"solver": "rk9"}}, "again: .*guidance: got -1.*; denoise: .*solver"),
    ],
)
def test_bad_overrides_are_refused_with_every_problem(wan: ModelInstance, overrides: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        resolve(replace(BASE, overrides=overrides), wan.card)
