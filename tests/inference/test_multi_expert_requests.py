"""One request through a chain of experts: each reads what the one before it wrote, and draws by a seed of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cards.errors import UserError
from cards.multi_expert.card import build_card
from cards.unified.card import card_from_folder
from inference.engine import Engine
from inference.instance import ModelInstance
from inference.parity.interleave import artifact_difference
from inference.parity.library import library_of
from inference.parity.tokens import token_gates
from inference.request import Request
from inference.resolve import resolve
from inference.weight_sync import WeightSyncController
from loops.loop import Profile
from tests.support.tiny_experts import tiny_chain
from tests.support.tiny_unified import save_tiny_unified

NAMES = ("colour", "shape", "motion")
CLIP = {"steps": 2, "frames": 5, "height": 16, "width": 16}
ASKED = Request(
    prompt="a crimson ball",
    seed=3,
    solver="unipc",
    shift=3.0,
    guidance=1.0,
    max_tokens=8,
    temperature=1.0,
    output="latents",
    **CLIP,  # type: ignore[arg-type]
)


@pytest.fixture(scope="module")
def instance(wan_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> ModelInstance:
    card = tiny_chain(wan_folder, tmp_path_factory.mktemp("experts"), NAMES, initializer_range=0.12)
    return Engine().load(card)


def test_the_chain_and_its_video_are_the_librarys(instance: ModelInstance) -> None:
    request = replace(ASKED, temperature=0.0, guidance=3.0, negative_prompt="blue", output="video")
    ours = Engine().run(request, instance)
    library = library_of(instance.card, torch.device("cpu"))
    assert ours.refined == library.refine(ASKED.prompt, 8)
    latents, _ = library.sample(request, solver="unipc", shift=3.0)
    assert torch.equal(ours.latents, latents)


def test_each_reads_what_the_one_before_it_wrote(instance: ModelInstance) -> None:
    made = Engine().run(replace(ASKED, profile=Profile.ROLLOUT), instance)
    assert list(made.completions) == list(made.tokens) == [f"refine_{name}" for name in NAMES]
    texts = [made.completions[node].text for node in made.tokens]
    read = [instance.tokenizer_of("llm_colour_tokenizer").decode(one.prompt_ids) for one in made.tokens.values()]
    for before, said in zip((ASKED.prompt, *texts), read, strict=False):
        assert said == f"{before}<|im_start|>"
    assert made.refined == texts[-1] and len({ASKED.prompt, *texts}) == 4
    plain = Engine().run(replace(ASKED, refine=False, max_tokens=None, temperature=None), instance)
    assert plain.refined is None and not plain.completions


def test_a_text_that_is_too_long_for_the_next_expert_loses_its_beginning(instance: ModelInstance) -> None:
    """The models' context holds 256 tokens; 220 are for what one writes, so the next reads 36."""
    asked = replace(ASKED, temperature=5.0, max_tokens=220, steps=1, profile=Profile.ROLLOUT)
    made = Engine().run(asked, instance)
    lengths = [len(one.prompt_ids) for one in made.tokens.values()]
    assert lengths[0] < lengths[1] == 36 and lengths[2] <= 36
    tokenizer = instance.tokenizer_of("llm_shape_tokenizer")
    kept = made.tokens["refine_shape"].prompt_ids.tolist()
    assert tokenizer(made.completions["refine_colour"].text).input_ids[-35:] == kept[:-1]
    with pytest.raises(UserError, match="context holds 256"):
        Engine().run(replace(asked, prompt="a" * 300), instance)


def test_the_experts_draw_apart(instance: ModelInstance) -> None:
    """The noise of one says nothing of another's: a policy gradient takes them for independent."""
    nodes = resolve(ASKED, instance.card).nodes
    seeds = [nodes[f"refine_{name}"].seed for name in NAMES]
    assert seeds[0] == ASKED.seed and len(set(seeds)) == 3
    assert seeds == [nodes[f"refine_{name}"].seed for name in NAMES]
    shorter = resolve(replace(ASKED, overrides={"refine_shape": {"max_tokens": 2}}), instance.card).nodes
    assert (shorter["refine_shape"].max_tokens, shorter["refine_shape"].seed) == (2, seeds[1])
    assert shorter["refine_motion"] == nodes["refine_motion"]
    another = resolve(replace(ASKED, seed=4), instance.card).nodes
    assert not {another[node].seed for node in another} & set(seeds)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_chain_of_one_is_the_unified_card(wan_folder: Path, tmp_path: Path, temperature: float) -> None:
    folder = save_tiny_unified(wan_folder, tmp_path / "unified", initializer_range=0.12)
    one = build_card("tiny", source=str(folder), experts=["all"], refiners=str(folder / "llm"))
    request = replace(ASKED, temperature=temperature, profile=Profile.ROLLOUT)
    theirs = Engine().run(request, Engine().load(card_from_folder(folder)))
    ours = Engine().run(request, Engine().load(one))
    assert ours.refined == theirs.refined and torch.equal(ours.latents, theirs.latents)
    assert torch.equal(ours.tokens["refine_all"].logprobs, theirs.tokens["refine"].logprobs)


def test_interleaved_is_serial_bit_for_bit(instance: ModelInstance) -> None:
    requests = [
        replace(ASKED, prompt=prompt, seed=i, profile=profile, temperature=float(i % 2), max_tokens=5 + 3 * i)
        for i, (prompt, profile) in enumerate(
            [("a red ball", Profile.SERVE), ("b", Profile.ROLLOUT), ("two blue boxes", Profile.ROLLOUT)]
        )
    ]
    requests.append(replace(ASKED, refine=False, max_tokens=None, temperature=None))
    serial = Engine(cache_bytes=0).run_serial(requests, instance)
    together = Engine(cache_bytes=0).run_interleaved(requests, instance)
    assert [artifact_difference(a, b) for a, b in zip(serial, together, strict=True)] == [0.0] * 4


def test_training_recomputes_the_log_probs_of_each(instance: ModelInstance) -> None:
    rows = list(token_gates(instance, prompts=("a red ball", "b"), seed=5))
    assert len(rows) == 2 * len(NAMES) and all(row.passed for row in rows)


def test_a_sync_of_one_expert_is_of_that_one(instance: ModelInstance) -> None:
    engine = Engine()
    before = engine.run(ASKED, instance)
    weights = {name: 1.5 * tensor for name, tensor in instance.module("llm_shape").state_dict().items()}
    versions = instance.versions()
    WeightSyncController(engine).sync(instance, "llm_shape", weights)
    assert instance.versions() == versions | {"llm_shape": versions["llm_shape"] + 1}
    after = engine.run(ASKED, instance)
    assert after.completions["refine_colour"].text == before.completions["refine_colour"].text
    assert after.completions["refine_shape"].text != before.completions["refine_shape"].text
