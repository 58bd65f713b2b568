"""Interceptors: they change what asks for them and nothing else, do not clash, and are validated at submission."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cards.errors import UserError
from inference.engine import Engine
from inference.extend.interceptor import Interceptor, Parameters, Place
from inference.extend.zero_init import ZeroInit
from inference.instance import ModelInstance
from inference.load import card_of
from inference.request import Request
from loops.loop import ModelCall

BASE = Request(prompt="a red circle", seed=1, steps=4, guidance=1.0, frames=5, height=16, width=16, output="latents")
ZERO = replace(BASE, solver="euler", extensions={"zero_init": {"steps": 2}})


class Gain(Parameters):
    """How loud the prompt is."""

    factor: float = 1.0


class PromptGain(Interceptor):
    """Multiplies prompt embeddings: of the encoder's result, which is cached."""

    name = "prompt_gain"
    exact = True
    claims = frozenset({"text_encoder.encode.output"})
    parameters = Gain

    def after(self, call: ModelCall, output: Tensor, place: Place, parameters: Gain) -> Tensor:
        return output * parameters.factor if place.kind == "text_encoder" else output


class Late(Interceptor):
    """Tells the network another time, from the second step on."""

    name = "late"
    claims = frozenset({"transformer.velocity.input"})

    def before(self, call: ModelCall, place: Place, parameters: Any) -> ModelCall:
        if place.kind != "transformer" or place.step < 1:
            return call
        return replace(call, tensors={**call.tensors, "timestep": call.tensors["timestep"] * 0.5})


class Broken(Interceptor):
    """Raises at the second step, before or after the call."""

    name = "broken"

    def __init__(self, where: str):
        self.where = where

    def before(self, call: ModelCall, place: Place, parameters: Any) -> ModelCall:
        if self.where == "before" and place.kind == "transformer" and place.step == 1:
            raise ValueError("broken before")
        return call

    def after(self, call: ModelCall, output: Tensor, place: Place, parameters: Any) -> Tensor:
        if self.where == "after" and place.kind == "transformer" and place.step == 1:
            raise ValueError("broken after")
        return output


@pytest.fixture(scope="module")
def wan(wan_folder: Path) -> ModelInstance:
    card = card_of(wan_folder)
    short = card.sampling.model_copy(update={"max_sequence_length": 16})
    return Engine().load(card.model_copy(update={"sampling": short}))


def test_zero_init_leaves_the_noise_for_its_steps(wan: ModelInstance) -> None:
    """With Euler a zero velocity keeps the sample: after two of two such steps the result is the noise itself."""
    engine = Engine(interceptors=[ZeroInit()])
    noise = torch.randn((1, *wan.card.geometry.latent_shape(5, 16, 16)), generator=torch.Generator().manual_seed(1))
    still = engine.run(replace(ZERO, steps=2), wan).latents
    assert torch.equal(still, noise[0])
    assert not torch.equal(engine.run(ZERO, wan).latents, noise[0])
    plain = replace(ZERO, extensions=None)
    assert not torch.equal(engine.run(ZERO, wan).latents, engine.run(plain, wan).latents)
    off = replace(ZERO, extensions={"zero_init": {"steps": 0}})
    assert torch.equal(engine.run(off, wan).latents, Engine().run(plain, wan).latents)


@pytest.mark.parametrize("batching", ["off", "shape"])
def test_who_does_not_ask_is_not_changed_and_interleaved_is_serial(wan: ModelInstance, batching: str) -> None:
    gain = {"prompt_gain": {"factor": 2.0}}
    requests = [
        BASE,
        replace(BASE, extensions={"late": {}}, seed=2),
        replace(BASE, extensions=gain, guidance=3.0),
        replace(BASE, extensions={"late": {}, **gain}),
        replace(ZERO, guidance=2.0),
    ]
    extensions = [ZeroInit(), PromptGain(), Late()]
    alone = [Engine(interceptors=extensions).run(request, wan).latents for request in requests]
    assert torch.equal(alone[0], Engine().run(BASE, wan).latents)
    assert len({float(latents.sum()) for latents in alone}) == len(requests)
    together = Engine(interceptors=extensions, batching=batching).run_interleaved(requests, wan)  # type: ignore[arg-type]
    for artifact, expected in zip(together, alone, strict=True):
        torch.testing.assert_close(artifact.latents, expected, rtol=0, atol=0 if batching == "off" else 1e-4)


def test_a_changed_result_is_cached_apart_from_the_plain_one(wan: ModelInstance) -> None:
    engine = Engine(interceptors=[PromptGain()])
    loud = replace(BASE, extensions={"prompt_gain": {"factor": 3.0}})
    plain, changed, again = (engine.run(request, wan).latents for request in (BASE, loud, BASE))
    assert torch.equal(plain, again)
    assert not torch.equal(plain, changed)
    assert len(engine.features) == 2
    assert torch.equal(engine.run(loud, wan).latents, changed)
    assert engine.features.hits == 2


@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize("batching", ["off", "shape"])
def test_one_that_raises_fails_its_request_alone(wan: ModelInstance, where: str, batching: str) -> None:
    engine = Engine(interceptors=[Broken(where)], batching=batching)  # type: ignore[arg-type]
    bad = engine.submit(replace(BASE, extensions={"broken": {}}), wan)
    good = engine.submit(BASE, wan)
    while engine.tick():
        pass
    with pytest.raises(ValueError, match=f"broken {where}"):
        bad.result()
    assert bad.progress[0] == 2
    torch.testing.assert_close(good.result().latents, Engine().run(BASE, wan).latents, rtol=0, atol=1e-4)
    assert engine.ledger.tickets == 0


@pytest.mark.parametrize(
    ("extensions", "message"),
    [
        ({"zero_inti": {}}, "Did you mean"),
        ({"zero_init": {"step": 1}}, r"zero_init\.step: Extra inputs"),
        ({"zero_init": {"steps": -1}}, r"zero_init\.steps: .*greater than or equal to 0"),
        ({"zero_init": {"steps": True}}, r"zero_init\.steps: "),
    ],
)
def test_bad_parameters_are_refused_at_submission(wan: ModelInstance, extensions: Any, message: str) -> None:
    engine = Engine(interceptors=[ZeroInit()])
    with pytest.raises(UserError, match=message):
        engine.submit(replace(BASE, extensions=extensions), wan)
    assert engine.counts == (0, 0)


def test_interceptors_that_clash_are_refused_with_every_reason() -> None:
    class Other(ZeroInit):
        name = "other"

    with pytest.raises(UserError, match=r"'zero_init' and 'other' both change transformer\.velocity\.output"):
        Engine(interceptors=[ZeroInit(), Other()])
    with pytest.raises(UserError, match="two interceptors are called 'zero_init'"):
        Engine(interceptors=[ZeroInit(), ZeroInit()])


def test_an_exact_engine_takes_only_what_keeps_bits(wan: ModelInstance) -> None:
    with pytest.raises(UserError, match="exact"):
        Engine(interceptors=[ZeroInit()], exact=True)
    with pytest.raises(UserError, match="batching"):
        Engine(batching="shape", exact=True)
    engine = Engine(interceptors=[PromptGain()], exact=True)
    neutral = replace(BASE, extensions={"prompt_gain": {}})
    assert torch.equal(engine.run(neutral, wan).latents, Engine().run(BASE, wan).latents)
