"""Text requests: checked, run beside clips in one engine, and equal to themselves alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cards.card import ModelCard
from cards.errors import UserError
from inference.artifact import Artifact
from inference.cache.paged import PagedPool
from inference.cache.paged_source import PagedSource
from inference.cache.paged_transformers import paged_spec
from inference.engine import Cancelled, Engine
from inference.instance import ModelInstance
from inference.load import card_of
from inference.parity.reference import drive_request
from inference.request import Message, Request
from inference.resolve import resolve
from inference.running import Running
from loops.loop import ModelCall, Profile, StepResult, TokenParams
from tests.support.tiny_qwen3 import save_tiny_qwen3

CLIP = Request(prompt="a red circle", seed=1, steps=3, guidance=1.0, frames=5, height=16, width=16, output="latents")
CLIPS = (
    CLIP,
    replace(CLIP, prompt="two blue squares", seed=2, steps=5, guidance=3.0, solver="euler"),
    replace(CLIP, prompt="", seed=3, steps=4, guidance=2.0, solver="dpm2", output="video"),
)
TEXT = Request(prompt="abc", task="text", seed=1, max_tokens=10, temperature=0.0)
TEXTS = (
    TEXT,
    replace(TEXT, prompt="the longest of all prompts here, abc end é", temperature=1.0, seed=2),
    replace(TEXT, prompt="d", temperature=0.8, top_p=0.9, seed=3, max_tokens=17, profile=Profile.ROLLOUT),
    replace(TEXT, prompt="", messages=(Message("user", "abc"),), top_k=5, temperature=1.3, seed=4),
    replace(TEXT, prompt="abcabc", max_tokens=1),
    replace(TEXT, prompt="end", stop=("a", "e"), temperature=1.0, seed=6, max_tokens=20),
)


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_qwen3(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def lm(text_folder: Path) -> ModelInstance:
    return Engine().load(text_folder)


@pytest.fixture(scope="module")
def wan(wan_folder: Path) -> ModelInstance:
    card = card_of(wan_folder)
    short = card.sampling.model_copy(update={"max_sequence_length": 16})
    return Engine().load(card.model_copy(update={"sampling": short}))


@pytest.fixture(scope="module")
def card(lm: ModelInstance) -> ModelCard:
    return lm.card


def same(ours: Artifact, theirs: Artifact) -> bool:
    """Equal bits of everything that a request leaves."""
    if (ours.completion is None) != (theirs.completion is None) or (ours.video is None) != (theirs.video is None):
        return False
    if ours.completion is not None and theirs.completion is not None:
        a, b = ours.completion, theirs.completion
        if replace(a, logprobs=None) != replace(b, logprobs=None) or (a.logprobs is None) != (b.logprobs is None):
            return False
        if a.logprobs is not None and b.logprobs is not None and not torch.equal(a.logprobs, b.logprobs):
            return False
    if ours.video is not None and theirs.video is not None and not torch.equal(ours.video, theirs.video):
        return False
    return torch.equal(ours.latents, theirs.latents)


# -- one engine for clips and text


@pytest.mark.parametrize("batching", ["off", "shape"])
def test_text_beside_clips_is_text_and_clips_alone_to_the_bit(
    lm: ModelInstance, wan: ModelInstance, batching: str
) -> None:
    """With batching, text is still to the bit (its calls are merged with none) and clips within 1e-4."""
    alone = [*Engine(cache_bytes=0).run_serial(TEXTS, lm), *Engine(cache_bytes=0).run_serial(CLIPS, wan)]
    engine = Engine(batching=batching, cache_bytes=0)  # type: ignore[arg-type]
    mixed: list[tuple[Request, ModelInstance]] = [*((r, lm) for r in TEXTS), *((r, wan) for r in CLIPS)]
    order = [0, 6, 1, 2, 7, 3, 4, 8, 5]
    labels: list[str] = []
    handles = {i: engine.submit(*mixed[i], listener=lambda label, *_: labels.append(label)) for i in order}
    while engine.tick():
        pass
    first, last = labels.index("denoise 1/3"), len(labels) - 1 - labels[::-1].index("denoise 5/5")
    assert any(label.startswith("token") for label in labels[first:last])
    for i, expected in enumerate(alone):
        got = handles[i].result()
        if batching == "off" or i < len(TEXTS):
            assert same(got, expected)
        else:
            assert (got.latents - expected.latents).abs().max().item() <= 1e-4


def test_a_request_does_not_depend_on_its_neighbours(lm: ModelInstance) -> None:
    alone = Engine().run(TEXTS[1], lm)
    together = Engine(batching="shape").run_interleaved([TEXTS[1], *TEXTS, TEXTS[1]], lm)
    assert same(together[0], alone)
    assert same(together[-1], alone)


def test_the_engine_is_the_reference_driver(lm: ModelInstance) -> None:
    from loops.drive import drive
    from loops.loop import LoopContext
    from loops.registry import loop_of_kind

    resolved = resolve(TEXTS[2], lm.card)
    spec = lm.card.loops["decode"]
    ctx = LoopContext(spec=spec, slots={"prompt": resolved.prompt}, profile=Profile.ROLLOUT)
    expected = drive(loop_of_kind(spec.kind), resolved.params, lm, ctx).value
    got = Engine().run(TEXTS[2], lm).completion
    assert got is not None
    assert got.token_ids == expected.token_ids
    assert torch.equal(got.logprobs, expected.logprobs)  # type: ignore[arg-type]
    assert drive_request(lm, TEXT) == {}


def test_one_that_fails_or_is_cancelled_takes_no_other_with_it(lm: ModelInstance, wan: ModelInstance) -> None:
    engine = Engine()
    too_long = engine.submit(replace(TEXT, max_tokens=10_000), lm)
    cancelled = engine.submit(TEXTS[1], lm)
    kept, clip = engine.submit(TEXTS[2], lm), engine.submit(CLIP, wan)
    while cancelled.progress[0] < 3:
        engine.tick()
    cancelled.cancel()
    while engine.tick():
        pass
    with pytest.raises(UserError, match="context holds 256"):
        too_long.result()
    with pytest.raises(Cancelled):
        cancelled.result()
    assert cancelled.progress == (3, 10)
    assert same(kept.result(), Engine().run(TEXTS[2], lm))
    assert same(clip.result(), Engine().run(CLIP, wan))


# -- artifact


def test_an_artifact_says_how_to_make_it_again(lm: ModelInstance) -> None:
    first = Engine().run(replace(TEXTS[2], seed=None), lm)
    p = first.provenance.params
    assert isinstance(p, TokenParams)
    assert first.provenance.card_digest == lm.card.digest
    assert same(Engine().run(replace(TEXTS[2], seed=p.seed), lm), first)
    assert first.completion is not None
    assert first.text == first.completion.text
    assert first.completion.logprobs is not None
    assert first.completion.logprobs.shape == (len(first.completion.token_ids),)
    assert first.completion.prompt_tokens == 1


def test_a_clip_has_no_text_and_a_text_no_clip(lm: ModelInstance, wan: ModelInstance) -> None:
    with pytest.raises(ValueError, match="made a clip"):
        _ = Engine().run(CLIP, wan).text
    text = Engine().run(TEXT, lm)
    assert (text.video, text.behaviour, text.latents.numel()) == (None, None, 0)
    with pytest.raises(ValueError, match="latents only"):
        text.frames_FHWC()


def test_progress_ends_where_the_text_ended(lm: ModelInstance) -> None:
    engine = Engine()
    handle = engine.submit(replace(TEXTS[5], stop=tuple("abcdefghijklmnopqrstuvwxyz0123456789 .,-")), lm)
    assert handle.progress == (0, 20)
    while engine.tick():
        pass
    completion = handle.result().completion
    assert completion is not None
    assert handle.progress == (len(completion.token_ids),) * 2


# -- requests


def test_what_is_not_said_comes_from_the_card(card: ModelCard) -> None:
    text = card.sampling.text
    assert text is not None
    p = resolve(Request(prompt="a", task="text"), card).params
    assert (p.max_tokens, p.temperature, p.top_p, p.top_k, p.stop) == (text.max_tokens, 0.0, 1.0, 0, ())
    assert resolve(Request(prompt="a", task="text", temperature=0, top_k=0, seed=0), card).params.seed == 0


BAD: dict[str, tuple[Any, ...]] = {
    "prompt": (None, 3, b"x"),
    "max_tokens": (0, -1, 2.5, "4", True),
    "temperature": (-0.1, float("nan"), float("inf"), "1", True),
    "top_p": (0, -0.5, 1.01, float("nan"), "1", True),
    "top_k": (-1, 1.5, "4", False),
    "stop": ("end", ("",), (3,), 5),
    "messages": ((), "hello", ({"role": "user", "content": "a"},), (Message("user", 3),)),  # type: ignore[arg-type]
    "seed": (-1, 1.0, "7", False),
    "output": ("latents", "text", None),
    "profile": ("serve",),
    "capture": (("trajectory",),),
    "steps": (4,),
    "guidance": (1.0, 0),
    "negative_prompt": ("", "blurry"),
    "frames": (9,),
}


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, values in BAD.items() for v in values])
def test_a_bad_value_is_refused_with_what_was_got(card: ModelCard, field: str, value: Any) -> None:
    fields: dict[str, Any] = {"prompt": "" if field == "messages" else "a", "task": "text", "seed": 1, field: value}
    with pytest.raises(UserError) as error:
        resolve(Request(**fields), card)
    message = str(error.value)
    assert message.startswith("the request cannot run: ")
    assert message.count("got") == 1
    assert field in message
    assert "expected" in message


def test_every_bad_value_is_named_at_once(card: ModelCard) -> None:
    fields = {name: values[0] for name, values in BAD.items()}
    with pytest.raises(UserError) as error:
        resolve(Request(**fields, task="text"), card)
    assert [name for name in BAD if name not in str(error.value)] == []


def test_a_prompt_beside_messages_is_refused(card: ModelCard) -> None:
    with pytest.raises(UserError, match="beside messages"):
        resolve(Request(prompt="a", task="text", messages=(Message("user", "b"),)), card)


@pytest.mark.parametrize("field", ["messages", "max_tokens", "temperature", "top_p", "top_k", "stop"])
def test_a_clip_takes_no_field_of_a_text(wan: ModelInstance, field: str) -> None:
    fields: dict[str, Any] = {field: 0}
    with pytest.raises(UserError, match=rf"{field}: got 0, expected nothing \(task 't2v' does not have it\)"):
        resolve(Request(prompt="a", **fields), wan.card)


def test_a_task_that_the_card_does_not_have_lists_those_it_has(card: ModelCard) -> None:
    with pytest.raises(UserError, match=r"'t2v'.*text"):
        resolve(Request(prompt="a"), card)


# -- KV from a pool of pages: requests of different lengths in one forward


def source(pool: PagedPool, namespace: str, root: str | None) -> PagedSource:
    return PagedSource(namespace, lambda component: (pool, root))


LENGTHS = ("a", "abc end", "the quick brown fox jumps", "x" * 60)


@pytest.fixture
def pool(lm: ModelInstance) -> PagedPool:
    return PagedPool(paged_spec(lm.module("lm").config, blocks=48))  # type: ignore[arg-type]


def running(lm: ModelInstance, prompt: str, source: PagedSource | None, tokens: int = 12) -> Running:
    request = replace(TEXT, prompt=prompt, max_tokens=tokens, profile=Profile.ROLLOUT)
    return Running(resolve(request, lm.card), lm, kv=source)


def run_together(lm: ModelInstance, requests: list[Running]) -> list[int]:
    """All requests a step a round, equal calls merged; rows of every forward."""
    rows = []
    while pending := [(r, plan) for r in requests if (plan := r.plan()) is not None]:
        groups: dict[tuple[Any, ...], list[tuple[Running, ModelCall]]] = {}
        for r, plan in pending:
            groups.setdefault(plan.calls[0].merge_key(), []).append((r, plan.calls[0]))
        for group in groups.values():
            calls = [call for _, call in group]
            rows.append(len(calls))
            logits = lm.call(calls[0] if len(calls) == 1 else ModelCall.merged(calls))
            for (r, _), row in zip(group, logits.split(1), strict=True):
                r.advance(StepResult((row,)))
    return rows


def test_paged_requests_are_growing_ones_to_the_bit(lm: ModelInstance, pool: PagedPool) -> None:
    for i, prompt in enumerate(LENGTHS):
        ours, theirs = running(lm, prompt, source(pool, f"r{i}", None)), running(lm, prompt, None)
        for one in (ours, theirs):
            run_together(lm, [one])
        assert same(ours.artifact(), theirs.artifact())
        pool.close(f"r{i}")
    assert len(pool) == 0


def test_requests_of_different_lengths_share_every_token_forward(lm: ModelInstance, pool: PagedPool) -> None:
    """Log-probs of the merged run against each alone: float32 forwards of other shapes."""
    together = [running(lm, prompt, source(pool, f"r{i}", None), tokens=8 + 2 * i) for i, prompt in enumerate(LENGTHS)]
    rows = run_together(lm, together)
    assert rows == [1] * 4 + [4] * 7 + [3] * 2 + [2] * 2 + [1] * 2
    worst = 0.0
    for i, (prompt, one) in enumerate(zip(LENGTHS, together, strict=True)):
        alone = running(lm, prompt, None, tokens=8 + 2 * i)
        run_together(lm, [alone])
        ours, theirs = one.artifact().completion, alone.artifact().completion
        assert ours is not None
        assert theirs is not None
        assert ours.token_ids == theirs.token_ids
        worst = max(worst, (ours.logprobs - theirs.logprobs).abs().max().item())  # type: ignore[operator]
    print(f"merged differs from solo by {worst:.1e} in log-prob")
    assert worst <= 1e-4


def test_a_second_turn_prefills_only_what_the_first_did_not_say(lm: ModelInstance, pool: PagedPool) -> None:
    first = running(lm, LENGTHS[2], source(pool, "first", "weights v0"))
    run_together(lm, [first])
    completion = first.artifact().completion
    assert completion is not None
    said = lm.tokenizer(LENGTHS[2]).input_ids + list(completion.token_ids)
    kv = source(pool, "second", "weights v0").open("lm", (*said, 5, 6, 7))
    # The last token that was said was never fed, so it is not held.
    assert kv.length == (len(said) - 1) // pool.spec.block_tokens * pool.spec.block_tokens
    assert kv.length > len(lm.tokenizer(LENGTHS[2]).input_ids)


def test_a_merged_forward_that_fails_leaves_every_row_as_it_was(lm: ModelInstance) -> None:
    """The pool runs out of blocks for the second row: the first row's new token is taken back too."""
    small = PagedPool(paged_spec(lm.module("lm").config, blocks=2, block_tokens=8))  # type: ignore[arg-type]
    pair = [running(lm, prompt, source(small, name, None)) for prompt, name in (("x" * 3, "a"), ("y" * 8, "b"))]
    plans = []
    for r in pair:
        plan = r.plan()
        assert plan is not None
        r.advance(StepResult((lm.call(plan.calls[0]),)))
        plan = r.plan()
        assert plan is not None
        plans.append(plan)
    with pytest.raises(UserError):
        lm.call(ModelCall.merged([plan.calls[0] for plan in plans]))
    kept = [plan.calls[0].state.length for plan in plans]
    assert kept == [3, 8]
    assert torch.equal(lm.call(plans[0].calls[0]), alone_second_token(lm, "x" * 3))


def alone_second_token(lm: ModelInstance, prompt: str) -> torch.Tensor:
    one = running(lm, prompt, None)
    plan = one.plan()
    assert plan is not None
    one.advance(StepResult((lm.call(plan.calls[0]),)))
    plan = one.plan()
    assert plan is not None
    return lm.call(plan.calls[0])
