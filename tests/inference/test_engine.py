"""The engine: equal to the reference driver, one encoding a prompt, nothing needless, and nobody fails another."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from cards.card import Precision
from cards.errors import UserError
from cards.program import Program
from inference.engine import Cancelled, Engine
from inference.instance import ModelInstance, Resident
from inference.load import card_of
from inference.parity.interleave import interleave_gate
from inference.parity.reference import drive_request
from inference.request import Request
from loops.loop import Profile

TEXT_TOKENS = 16
BASE = Request(prompt="a red circle", seed=1, steps=3, guidance=1.0, frames=5, height=16, width=16, output="latents")
MIXED = (
    replace(BASE, seed=1, steps=2, guidance=1.0, solver="unipc", output="video"),
    replace(BASE, prompt="two blue squares", seed=2, steps=5, guidance=3.0, solver="euler"),
    replace(BASE, prompt="", negative_prompt="green", seed=3, steps=3, guidance=5.0, solver="dpm2", output="video"),
    replace(BASE, prompt="a triangle moves left", seed=4, steps=4, guidance=2.0, guidance_policy="batched"),
)


def load(folder: Path) -> ModelInstance:
    """The folder with short prompts, so that a forward costs little."""
    card = card_of(folder)
    short = card.sampling.model_copy(update={"max_sequence_length": TEXT_TOKENS})
    return Engine().load(card.model_copy(update={"sampling": short}))


@pytest.fixture(scope="module")
def instance(wan_folder: Path) -> ModelInstance:
    return load(wan_folder)


@pytest.fixture
def own_instance(wan_folder: Path) -> ModelInstance:
    """One that a test may change."""
    return load(wan_folder)


@contextlib.contextmanager
def counted(module: nn.Module) -> Iterator[list[int]]:
    """Rows of every forward of a module, seen by a hook on the real thing."""
    rows: list[int] = []

    def count(_: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        first = args[0] if args else next(iter(kwargs.values()))
        assert isinstance(first, torch.Tensor)
        rows.append(first.shape[0])

    handle = module.register_forward_pre_hook(count, with_kwargs=True)
    try:
        yield rows
    finally:
        handle.remove()


def broken_view(instance: ModelInstance, component: str = "transformer") -> ModelInstance:
    """The instance with one component that raises."""

    def fail(*_: object) -> None:
        raise RuntimeError("this module is broken")

    module = copy.deepcopy(instance.module(component))
    module.register_forward_pre_hook(fail)
    return instance.view({component: Resident(module)})


# -- equal to the reference driver, alone and together


@pytest.mark.parametrize("request_", MIXED, ids=lambda r: f"{r.solver}-g{r.guidance}")
def test_the_engine_is_the_reference_driver_to_the_bit(instance: ModelInstance, request_: Request) -> None:
    artifact = Engine().run(request_, instance)
    slots = drive_request(instance, request_)
    assert torch.equal(artifact.latents, slots["latents"][0])
    assert (artifact.video is None) == (request_.output == "latents")
    if artifact.video is not None:
        assert torch.equal(artifact.video, slots["video"][0])


def test_mixed_requests_interleaved_are_serial_to_the_bit(instance: ModelInstance) -> None:
    report = interleave_gate(instance, MIXED)
    assert report.difference == 0
    assert report.passed


def test_mixed_requests_batched_are_serial_within_1e_4(instance: ModelInstance) -> None:
    report = interleave_gate(instance, MIXED, batching="shape")
    print(f"batched differs from serial by {report.difference:.1e}")
    assert report.difference <= 1e-4
    assert report.passed


def test_batching_shares_forwards_between_requests(instance: ModelInstance) -> None:
    requests = [replace(BASE, seed=seed, prompt=prompt) for seed, prompt in enumerate("abcde")]
    with counted(instance.module("transformer")) as rows:
        Engine(batching="shape").run_interleaved(requests, instance)
    assert rows == [5, 5, 5]
    with counted(instance.module("transformer")) as rows:
        Engine(batching="shape", max_rows=2).run_interleaved(requests, instance)
    assert rows == [2, 2, 1] * 3
    with counted(instance.module("transformer")) as rows:
        Engine().run_interleaved(requests, instance)
    assert rows == [1] * 15


def test_requests_of_other_sizes_or_weights_share_no_forward(instance: ModelInstance) -> None:
    other = instance.view({"transformer": Resident(instance.module("transformer"))})
    engine = Engine(batching="shape")
    handles = [
        engine.submit(BASE, instance),
        engine.submit(replace(BASE, width=32), instance),
        engine.submit(BASE, other),
    ]
    with counted(instance.module("transformer")) as rows:
        while engine.tick():
            pass
    assert rows == [1] * 9
    assert torch.equal(handles[0].result().latents, handles[2].result().latents)


# -- each prompt is encoded once


@pytest.mark.parametrize("batching", ["off", "shape"])
@pytest.mark.parametrize("cache_bytes", [0, 2**20])
def test_k_samples_of_a_prompt_encode_it_once(instance: ModelInstance, batching: str, cache_bytes: int) -> None:
    engine = Engine(batching=batching, cache_bytes=cache_bytes)  # type: ignore[arg-type]
    with counted(instance.module("text_encoder")) as rows:
        engine.run_interleaved([replace(BASE, seed=seed) for seed in range(4)], instance)
    assert rows == [1]


def test_guided_samples_encode_the_prompt_and_the_negative_one_once_each(instance: ModelInstance) -> None:
    requests = [replace(BASE, seed=seed, guidance=3.0, negative_prompt="green") for seed in range(3)]
    engine = Engine()
    with counted(instance.module("text_encoder")) as rows:
        engine.run_interleaved(requests, instance)
        engine.run_serial(requests, instance)
    assert rows == [1, 1]


def test_a_cached_encoding_is_that_of_a_fresh_one(instance: ModelInstance) -> None:
    engine = Engine()
    first, second = engine.run_serial([BASE, BASE], instance)
    assert torch.equal(first.latents, second.latents)
    assert engine.features.hits == 1


def test_a_bump_of_the_encoder_encodes_again_and_one_of_the_transformer_does_not(instance: ModelInstance) -> None:
    engine = Engine()
    with counted(instance.module("text_encoder")) as rows:
        engine.run(BASE, instance)
        instance.bump("transformer")
        engine.run(BASE, instance)
        assert rows == [1]
        instance.bump("text_encoder")
        engine.run(BASE, instance)
        assert rows == [1, 1]


def test_a_bump_after_a_change_of_the_weights_is_seen_in_the_result(own_instance: ModelInstance) -> None:
    engine = Engine()
    before = engine.run(BASE, own_instance)
    with torch.no_grad():
        for parameter in own_instance.module("text_encoder").parameters():
            parameter.mul_(1.5)
    own_instance.bump("text_encoder")
    after = engine.run(BASE, own_instance)
    assert not torch.equal(before.latents, after.latents)
    assert torch.equal(after.latents, drive_request(own_instance, BASE)["latents"][0])
    assert after.provenance.weights_versions["text_encoder"] == before.provenance.weights_versions["text_encoder"] + 1


def test_views_share_the_entries_of_a_shared_encoder(instance: ModelInstance) -> None:
    role = instance.view({"transformer": Resident(copy.deepcopy(instance.module("transformer")))})
    engine = Engine()
    with counted(instance.module("text_encoder")) as rows:
        engine.run(BASE, instance)
        engine.run(BASE, role)
    assert rows == [1]


def test_an_encoder_of_its_own_has_its_own_entries(instance: ModelInstance) -> None:
    module = copy.deepcopy(instance.module("text_encoder"))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1.5)
    role = instance.view({"text_encoder": Resident(module)})
    engine = Engine()
    ours, theirs = engine.run(BASE, instance), engine.run(BASE, role)
    assert not torch.equal(ours.latents, theirs.latents)
    assert torch.equal(theirs.latents, drive_request(role, BASE)["latents"][0])


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")  # torch: slower, not wrong
@pytest.mark.parametrize("batching", ["off", "shape"])
def test_the_same_weights_in_another_precision_share_nothing(instance: ModelInstance, batching: str) -> None:
    half = instance.view({}, instance.card.model_copy(update={"precision": Precision(serve="bfloat16")}))
    alone = [drive_request(view, BASE)["latents"][0] for view in (instance, half)]
    assert not torch.equal(*alone)
    engine = Engine(batching=batching)  # type: ignore[arg-type]
    handles = [engine.submit(BASE, view) for view in (instance, half)]
    while engine.tick():
        pass
    for handle, expected in zip(handles, alone, strict=True):
        assert torch.equal(handle.result().latents, expected)


def test_encode_gives_what_the_library_encodes(instance: ModelInstance, wan_folder: Path) -> None:
    from diffusers import WanPipeline

    pipeline = WanPipeline.from_pretrained(wan_folder, dtype=torch.float32)
    prompts = ["a red circle", "", "two  blue &amp; squares", "a red circle"]
    expected, _ = pipeline.encode_prompt(prompts, do_classifier_free_guidance=False, max_sequence_length=TEXT_TOKENS)
    engine = Engine()
    ours = torch.cat(engine.encode(prompts, instance))
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-6)
    with counted(instance.module("text_encoder")) as rows:
        engine.run(BASE, instance)
    assert rows == []


def test_a_result_that_holds_a_graph_is_not_cached(own_instance: ModelInstance) -> None:
    own_instance.module("text_encoder").requires_grad_(True)
    engine = Engine()
    artifact = engine.run(replace(BASE, profile=Profile.TRAIN), own_instance)
    assert artifact.latents.requires_grad
    assert len(engine.features) == 0
    engine.run(BASE, own_instance)
    assert len(engine.features) == 1


# -- only what is needed runs


@pytest.mark.parametrize(("output", "calls"), [("latents", 0), ("video", 1)])
def test_the_decoder_runs_only_for_pixels(own_instance: ModelInstance, output: str, calls: int) -> None:
    decodes: list[int] = []
    own_instance.module("vae").post_quant_conv.register_forward_hook(lambda *_: decodes.append(1))  # type: ignore[union-attr]
    artifact = Engine().run(replace(BASE, output=output), own_instance)  # type: ignore[arg-type]
    assert len(decodes) == calls
    assert (artifact.video is None) == (calls == 0)
    if calls == 0:
        with pytest.raises(ValueError, match="output='video'"):
            artifact.frames_FHWC()


def test_the_negative_prompt_is_encoded_only_when_guided(instance: ModelInstance) -> None:
    with counted(instance.module("text_encoder")) as rows:
        Engine(cache_bytes=0).run(replace(BASE, negative_prompt="green", guidance=1.0), instance)
    assert rows == [1]


def test_a_fresh_seed_is_drawn_and_reported(instance: ModelInstance) -> None:
    engine = Engine()
    first, second = engine.run_serial([replace(BASE, seed=None)] * 2, instance)
    assert first.provenance.params.seed != second.provenance.params.seed
    again = engine.run(replace(BASE, seed=first.provenance.params.seed), instance)
    assert torch.equal(first.latents, again.latents)


# -- failures


@pytest.mark.parametrize("batching", ["off", "shape"])
def test_a_failing_request_fails_alone(instance: ModelInstance, batching: str) -> None:
    engine = Engine(batching=batching)  # type: ignore[arg-type]
    good, bad, late = (
        engine.submit(BASE, instance),
        engine.submit(BASE, broken_view(instance)),
        engine.submit(replace(BASE, seed=2), instance),
    )
    while engine.tick():
        pass
    with pytest.raises(RuntimeError, match="this module is broken"):
        bad.result()
    assert bad.done
    assert torch.equal(good.result().latents, drive_request(instance, BASE)["latents"][0]) or batching == "shape"
    torch.testing.assert_close(
        late.result().latents, drive_request(instance, replace(BASE, seed=2))["latents"][0], rtol=0, atol=1e-4
    )


def test_a_request_without_its_slot_fails_alone(instance: ModelInstance) -> None:
    """A program that never encodes the negative prompt: a guided request misses its slot, others do not."""
    program = instance.card.programs["t2v"]
    nodes = tuple(node for node in program.nodes if node.id != "encode_negative")
    card = instance.card.model_copy(update={"programs": {"t2v": Program(nodes=nodes)}})
    view = instance.view({}, card)
    engine = Engine()
    bad, good = engine.submit(replace(BASE, guidance=3.0), view), engine.submit(BASE, view)
    while engine.tick():
        pass
    with pytest.raises(KeyError, match="negative_text"):
        bad.result()
    assert torch.equal(good.result().latents, drive_request(instance, BASE)["latents"][0])


def test_requests_that_share_a_failed_encoding_all_hear_of_it(instance: ModelInstance) -> None:
    view = broken_view(instance, "text_encoder")
    engine = Engine()
    handles = [engine.submit(replace(BASE, seed=seed), view) for seed in range(3)]
    while engine.tick():
        pass
    for handle in handles:
        with pytest.raises(RuntimeError, match="this module is broken"):
            handle.result()
    assert len(engine.features) == 0


def test_an_engine_without_a_model_says_so() -> None:
    with pytest.raises(UserError, match=r"engine\.load"):
        Engine().submit(BASE)


@pytest.mark.parametrize("options", [{"batching": "shpae"}, {"policy": "fiar"}])
def test_unknown_settings_list_the_names(options: dict[str, str]) -> None:
    with pytest.raises(UserError, match="Did you mean"):
        Engine(**options)  # type: ignore[arg-type]


# -- cancelling, order, progress


def test_cancelling_takes_effect_before_the_next_step(instance: ModelInstance) -> None:
    engine = Engine()
    handle, other = engine.submit(replace(BASE, steps=6), instance), engine.submit(replace(BASE, seed=2), instance)
    for _ in range(3):
        engine.tick()
    assert handle.progress == (3, 7)
    assert not handle.done
    handle.cancel()
    with counted(instance.module("transformer")) as rows:
        engine.tick()
    assert rows == [1]
    assert handle.progress == (3, 7)
    with pytest.raises(Cancelled):
        handle.result()
    while engine.tick():
        pass
    assert torch.equal(other.result().latents, drive_request(instance, replace(BASE, seed=2))["latents"][0])


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("fair", ["a1", "b1", "a2", "b2", "a3", "b3", "a4"]),
        ("fifo", ["a1", "a2", "a3", "a4", "b1", "b2", "b3"]),
    ],
)
def test_fair_takes_turns_and_fifo_finishes_the_oldest(instance: ModelInstance, policy: str, order: list[str]) -> None:
    seen: list[str] = []

    def listener(name: str) -> Callable[[str, int, int], None]:
        return lambda label, done, total: seen.append(f"{name}{done}")

    engine = Engine(policy=policy, cache_bytes=0)  # type: ignore[arg-type]
    engine.submit(replace(BASE, steps=3), instance, listener("a"))
    engine.submit(replace(BASE, prompt="another", steps=2), instance, listener("b"))
    while engine.tick():
        pass
    assert seen == order


def test_a_run_leaves_the_requests_of_others_where_they_are(instance: ModelInstance) -> None:
    engine = Engine()
    handle = engine.submit(BASE, instance)
    engine.run(replace(BASE, seed=2), instance)
    engine.run_interleaved([replace(BASE, seed=3)], instance)
    assert handle.progress[0] == 0
    with pytest.raises(UserError):
        engine.run_interleaved([BASE, replace(BASE, steps=0)], instance)
    engine.tick()
    assert handle.progress[0] == 2  # its prompt was encoded for others already, so its first turn is a solver step
    with pytest.raises(TimeoutError, match="step 2 of 4"):
        handle.result(timeout=0)
    while engine.tick():
        pass
    assert torch.equal(handle.result().latents, drive_request(instance, BASE)["latents"][0])


def test_the_listener_hears_every_step(instance: ModelInstance) -> None:
    heard: list[tuple[str, int, int]] = []
    Engine().run_interleaved([replace(BASE, steps=2, output="video")], instance, lambda *step: heard.append(step))
    assert heard == [("encode_prompt", 1, 4), ("denoise 1/2", 2, 4), ("denoise 2/2", 3, 4), ("decode", 4, 4)]
