"""One request through two loops: the text is what ``generate`` makes of the instruction, the video WanPipeline's of it;
what a rollout keeps of the text is what training recomputes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cards.card import ModelCard
from cards.errors import UserError
from cards.unified.card import LLM, build_card, card_from_folder
from inference.engine import Engine
from inference.instance import ModelInstance
from inference.parity.interleave import artifact_difference
from inference.parity.library import library_of
from inference.parity.tokens import padded, recompute, token_gates
from inference.request import Request
from inference.resolve import resolve
from inference.weight_sync import WeightSyncController
from loops.ar_decode import log_prob_call
from loops.loop import Profile
from tests.support.tiny_unified import save_tiny_unified

CLIP = {"frames": 5, "height": 16, "width": 16, "steps": 2}
ASKED = Request(prompt="a red ball", seed=3, max_tokens=12, temperature=1.0, output="latents", **CLIP)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def folder(wan_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("unified") / "model"
    return save_tiny_unified(wan_folder, place, initializer_range=0.12)


@pytest.fixture(scope="module")
def instance(folder: Path) -> ModelInstance:
    return Engine().load(card_from_folder(folder))


class Encodings:
    """Counts forwards by component."""

    def __init__(self) -> None:
        self.forwards: list[str] = []

    def on_forward(self, forward: Any) -> None:
        self.forwards.append(forward.component)

    def on_step(self, step: Any) -> None: ...

    def on_finish(self, request: Any, failure: Any) -> None: ...


# -- the library's own results


@pytest.mark.parametrize("prompt", ["a red ball", "a crimson ball drifting to the west", ""])
def test_greedy_refinement_and_its_video_are_the_librarys(instance: ModelInstance, prompt: str) -> None:
    request = replace(ASKED, prompt=prompt, negative_prompt="blue", guidance=3.0, temperature=0.0, output="video")
    ours = Engine().run(request, instance)
    library = library_of(instance.card, torch.device("cpu"))
    assert ours.refined == library.refine(prompt, 12)
    latents, video = library.sample(request, solver="unipc", shift=3.0)
    assert torch.equal(ours.latents, latents)
    assert ours.video is not None
    assert (((ours.video * 0.5 + 0.5).clamp(0, 1)) - video).abs().max() <= 1e-4


def test_the_refined_prompt_is_what_the_generator_gets(instance: ModelInstance) -> None:
    engine = Engine()
    refined = engine.run(ASKED, instance)
    assert refined.refined is not None and refined.refined != ASKED.prompt
    assert refined.completions["refine"].text == refined.refined
    assert refined.provenance.prompt == ASKED.prompt
    plain = replace(ASKED, max_tokens=None, temperature=None, refine=False)
    same = engine.run(replace(plain, prompt=refined.refined), instance)
    assert torch.equal(same.latents, refined.latents)
    original = engine.run(plain, instance)
    assert original.refined is None and not original.completions
    assert not torch.equal(original.latents, refined.latents)


def test_a_prompt_that_stays_as_it_is_needs_no_language_model(folder: Path) -> None:
    engine = Engine()
    instance = engine.load(card_from_folder(folder))
    engine.run(Request(prompt="a red ball", refine=False, seed=1, output="latents", **CLIP), instance)  # type: ignore[arg-type]
    assert not instance.built(LLM)
    engine.run(ASKED, instance)
    assert instance.built(LLM)


# -- requests together


@pytest.mark.parametrize("kv_bytes", [0, 2**20])
def test_interleaved_is_serial_bit_for_bit(instance: ModelInstance, kv_bytes: int) -> None:
    requests = [
        replace(ASKED, prompt=prompt, seed=i, profile=profile, temperature=float(i % 2), max_tokens=5 + 3 * i)
        for i, (prompt, profile) in enumerate(
            [("a red ball", Profile.SERVE), ("b", Profile.ROLLOUT), ("two blue boxes", Profile.ROLLOUT)]
        )
    ]
    requests.append(Request(prompt="a red circle", refine=False, seed=9, output="latents", **CLIP))  # type: ignore[arg-type]
    serial = Engine(cache_bytes=0, kv_bytes=kv_bytes).run_serial(requests, instance)
    together = Engine(cache_bytes=0, kv_bytes=kv_bytes).run_interleaved(requests, instance)
    assert [artifact_difference(a, b) for a, b in zip(serial, together, strict=True)] == [0.0] * 4
    batched = Engine(cache_bytes=0, kv_bytes=kv_bytes, batching="shape").run_interleaved(requests, instance)
    assert max(artifact_difference(a, b) for a, b in zip(serial, batched, strict=True)) <= 1e-4


def test_equal_rewrites_are_encoded_once(instance: ModelInstance) -> None:
    watch = Encodings()
    engine = Engine(observers=(watch,))
    engine.run_interleaved([replace(ASKED, temperature=0.0, guidance=1.0, seed=seed) for seed in range(3)], instance)
    assert watch.forwards.count("text_encoder") == 1


# -- what a rollout keeps


def test_a_rollout_keeps_tokens_and_log_probs_of_the_temperature_that_it_drew_at(instance: ModelInstance) -> None:
    rollout = Engine().run(replace(ASKED, temperature=0.7, profile=Profile.ROLLOUT), instance)
    kept, said = rollout.tokens["refine"], rollout.completions["refine"]
    assert tuple(kept.token_ids.tolist()) == said.token_ids and kept.temperature == 0.7
    assert len(kept.prompt_ids) == said.prompt_tokens
    library = library_of(instance.card, torch.device("cpu")).refiners["refine"]
    ids_1L = torch.cat([kept.prompt_ids, kept.token_ids])[None]
    with torch.no_grad():
        logits = library.model(input_ids=ids_1L, use_cache=False).logits[0, len(kept.prompt_ids) - 1 : -1].double()
    expected = torch.log_softmax(logits / 0.7, -1).gather(1, kept.token_ids[:, None])[:, 0]
    assert torch.equal(kept.logprobs, expected)
    served = Engine().run(replace(ASKED, temperature=0.7), instance)
    assert not served.tokens and torch.equal(served.latents, rollout.latents)


def test_the_mask_ends_with_the_first_end_token(instance: ModelInstance) -> None:
    eos = instance.card.sampling.text.eos  # type: ignore[union-attr]
    ends = set()
    for seed in range(12):
        request = replace(
            ASKED, seed=seed, steps=1, guidance=1.0, max_tokens=60, temperature=3.0, profile=Profile.ROLLOUT
        )
        kept = Engine().run(request, instance).tokens["refine"]
        assert bool(kept.mask.all())  # the loop ends with the token
        assert not any(int(token) in eos for token in kept.token_ids[:-1])
        ends.add(int(kept.token_ids[-1]) in eos)
        if len(ends) == 2:
            return
    pytest.fail(f"expected texts that ended and texts that were cut, got {ends}")


@pytest.fixture(scope="module")
def drawn(instance: ModelInstance) -> list[Any]:
    prompts = ("a red ball", "b", "two blue boxes heading west")
    return [
        Engine()
        .run(replace(ASKED, prompt=prompt, max_tokens=6 + 5 * i, profile=Profile.ROLLOUT), instance)
        .tokens["refine"]
        for i, prompt in enumerate(prompts)
    ]


def test_training_recomputes_the_log_probs(instance: ModelInstance, drawn: list[Any]) -> None:
    assert [recompute(instance, LLM, [one])[0] for one in drawn] == [0.0] * 3
    assert max(recompute(instance, LLM, drawn)) <= 1e-6
    again = recompute(instance, LLM, drawn)
    assert again == recompute(instance, LLM, drawn)
    assert all(row.passed for row in token_gates(instance, prompts=("a red ball", "b"), seed=5))


def test_a_changed_refiner_does_not_recompute(folder: Path, drawn: list[Any]) -> None:
    other = Engine().load(card_from_folder(folder))
    with torch.no_grad():
        next(iter(other.module(LLM).parameters())).mul_(1.01)
    assert recompute(other, LLM, drawn[:1])[0] > 1e-6


@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_padding_on_any_side_changes_nothing(instance: ModelInstance, drawn: list[Any], side: str) -> None:
    ids_BL, mask_BL = padded(drawn)
    alone = [
        instance.call(log_prob_call(LLM, ids[None, :length], torch.ones(1, length, dtype=torch.long), 1.0))[0]
        for ids, length in zip(ids_BL, mask_BL.sum(1).tolist(), strict=True)
    ]
    before = {"left": 7, "right": 0, "both": 3}[side]
    wide = ids_BL.shape[1] + 7
    ids, mask = torch.full((3, wide), 77), torch.zeros(3, wide, dtype=torch.long)
    for row, text in enumerate(alone):
        at = wide - len(text) if side == "left" else before
        ids[row, at : at + len(text)] = ids_BL[row, : len(text)]
        mask[row, at : at + len(text)] = 1
    out = instance.call(log_prob_call(LLM, ids, mask, 1.0))
    for row, text in enumerate(alone):
        assert (out[row][mask[row].bool()] - text).abs().max() <= 1e-6
    assert bool((out[mask == 0] == 0).all())


def test_gradients_of_log_probs_reach_the_refiner_alone(folder: Path, drawn: list[Any]) -> None:
    instance = Engine().load(card_from_folder(folder))
    for component in (LLM, "transformer"):
        instance.module(component).requires_grad_(True)
    instance.call(log_prob_call(LLM, *padded(drawn), 1.0), Profile.TRAIN).sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in instance.module(LLM).parameters())
    assert all(p.grad is None for p in instance.module("transformer").parameters())


# -- versions


def test_a_sync_of_the_refiner_leaves_encoded_texts_alone(folder: Path) -> None:
    watch = Encodings()
    engine = Engine(observers=(watch,))
    instance = engine.load(card_from_folder(folder))
    plain = replace(ASKED, refine=False, temperature=None, max_tokens=None, guidance=1.0)
    before = engine.run(ASKED, instance)
    engine.run(plain, instance)
    encoded = watch.forwards.count("text_encoder")
    weights = {name: 1.5 * tensor for name, tensor in instance.module(LLM).state_dict().items()}
    WeightSyncController(engine).sync(instance, LLM, weights)
    assert instance.versions() == {"text_encoder": 0, "transformer": 0, "vae": 0, LLM: 1}
    engine.run(plain, instance)
    assert watch.forwards.count("text_encoder") == encoded
    after = engine.run(ASKED, instance)
    assert after.refined != before.refined and after.provenance.weights_versions[LLM] == 1
    generator = {name: tensor.clone() for name, tensor in instance.module("transformer").state_dict().items()}
    WeightSyncController(engine).sync(instance, "transformer", generator)
    assert instance.versions() == {"text_encoder": 0, "transformer": 1, "vae": 0, LLM: 1}
    encoded = watch.forwards.count("text_encoder")
    assert engine.run(ASKED, instance).refined == after.refined
    assert watch.forwards.count("text_encoder") == encoded


# -- mistakes


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temperature": -1.0}, "temperature: got -1.0"),
        ({"max_tokens": 0}, "max_tokens: got 0"),
        ({"refine": "yes"}, "refine: got 'yes', expected True or False"),
        ({"refine": False, "temperature": 1.0}, "temperature: got 1.0, expected nothing"),
        ({"messages": ()}, "messages: got"),
        ({"overrides": {"refine": {"steps": 3}}}, "refine: unknown field 'steps'"),
        ({"overrides": {"refine": {"top_p": 2.0}}}, "refine: top_p: got 2.0"),
    ],
)
def test_a_wrong_request_is_refused_before_a_weight_loads(folder: Path, fields: dict[str, Any], words: str) -> None:
    plain = {"temperature": None, "max_tokens": None} | fields
    with pytest.raises(UserError) as caught:
        resolve(replace(ASKED, **plain), card_from_folder(folder))
    assert words in str(caught.value)


def test_all_problems_are_told_at_once(folder: Path) -> None:
    with pytest.raises(UserError) as caught:
        resolve(replace(ASKED, seed=-1, steps=0, top_p=3.0), card_from_folder(folder))
    for words in ("seed: got -1", "steps: got 0", "top_p: got 3.0"):
        assert str(caught.value).count(words) == 1


def test_other_cards_refine_nothing(wan_folder: Path) -> None:
    from inference.load import card_of

    with pytest.raises(UserError, match="refine: got False, expected nothing"):
        resolve(Request(prompt="a", refine=False), card_of(wan_folder))


def test_an_instruction_that_does_not_fit_is_told_before_anything_runs(instance: ModelInstance) -> None:
    with pytest.raises(UserError, match="context holds 256"):
        Engine().submit(replace(ASKED, prompt="a" * 300), instance)


def test_overrides_of_the_refinement_alone(instance: ModelInstance) -> None:
    resolved = resolve(replace(ASKED, overrides={"refine": {"max_tokens": 3}}), instance.card)
    assert resolved.params_of("refine").max_tokens == 3 and resolved.params_of("denoise").steps == 2
    assert (
        len(
            Engine()
            .run(replace(ASKED, overrides={"refine": {"max_tokens": 3}}), instance)
            .completions["refine"]
            .token_ids
        )
        == 3
    )


# -- sources


def test_generator_and_refiner_are_chosen_apart(
    make_wan_folder: Callable[..., Path], folder: Path, tmp_path: Path
) -> None:
    other = make_wan_folder(seed=5)
    card = build_card("tiny", source=str(other), refiner=str(folder / "llm"))
    mixed = Engine().load(card)
    assert card.components[LLM].source is not None and card.source.location == str(other)
    whole = Engine().load(card_from_folder(folder))
    a, b = Engine().run(ASKED, mixed), Engine().run(ASKED, whole)
    assert a.refined == b.refined and not torch.equal(a.latents, b.latents)
    assert a.provenance.card_digest != b.provenance.card_digest
    again = ModelCard.from_json(card.to_json())
    assert again.digest == card.digest


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"refiner": "nowhere/at/all"}, "no such folder, and not a hub id"),
        ({"refiner": "Qwen/Qwen3-9000B"}, "expected a folder or one of: Qwen/Qwen3-0.6B"),
    ],
)
def test_a_wrong_refiner_is_refused(wan_folder: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        build_card("tiny", source=str(wan_folder), **options)
    assert words in str(caught.value)


def test_a_refiner_whose_weights_do_not_fit_is_refused(folder: Path, wan_folder: Path, tmp_path: Path) -> None:
    import json
    import shutil

    broken = shutil.copytree(folder / "llm", tmp_path / "llm")
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "hidden_size": 64}))
    with pytest.raises(UserError, match="wrong shapes"):
        Engine().load(build_card("tiny", source=str(wan_folder), refiner=str(broken)))
    (broken / "model.safetensors").unlink()
    with pytest.raises(UserError, match="missing file"):
        Engine().load(build_card("tiny", source=str(wan_folder), refiner=str(broken)))


def test_another_family_cannot_stand_behind_a_refiner(folder: Path, tmp_path: Path) -> None:
    from cards.registry import family

    with pytest.raises(UserError, match="family 'wan_causal', expected 'wan21'"):
        causal = family("wan_causal").card("tiny")
        (tmp_path / "card.json").write_text(causal.to_json())
        build_card("tiny", source=str(tmp_path), refiner=str(folder / "llm"))
