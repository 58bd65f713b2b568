"""The text loop against transformers' generate, and what stops it, stores it and resumes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3ForCausalLM

from cards.errors import UserError
from inference.instance import ModelInstance
from inference.load import card_of
from loops.ar_decode import KV_KEY, ARDecodeLoop, Completion, GrowingKV
from loops.drive import drive
from loops.loop import Done, LoopContext, LoopState, Profile, StepResult, TokenParams, WorkUnit
from tests.support.tiny_qwen3 import CONFIGS, END, save_tiny_qwen3

GREEDY = TokenParams(max_tokens=24, temperature=0.0, top_p=1.0, top_k=0, stop=(), seed=0)
PROMPTS = ("a", "abc end", "the quick brown fox", "a prompt that is longer than all the others: " + "abcdend é " * 6)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = save_tiny_qwen3(tmp_path_factory.mktemp("qwen3"), **CONFIGS[name])
        return made[name]

    return folder


@pytest.fixture(scope="module")
def instance(folders: Callable[[str], Path]) -> ModelInstance:
    return ModelInstance.load(card_of(folders("gqa")))


def context(instance: ModelInstance, prompt: Any, **options: Any) -> LoopContext:
    return LoopContext(spec=instance.card.loops["decode"], slots={"prompt": prompt}, **options)


def decode(instance: ModelInstance, prompt: Any, params: TokenParams = GREEDY, **options: Any) -> Completion:
    value = drive(ARDecodeLoop(), params, instance, context(instance, prompt, **options)).value  # type: ignore[arg-type]
    assert isinstance(value, Completion)
    return value


def generated(folder: Path, instance: ModelInstance, prompt: str, **options: Any) -> Any:
    model = Qwen3ForCausalLM.from_pretrained(folder).eval()
    ids = instance.tokenizer(prompt, return_tensors="pt")
    return model.generate(
        **ids, do_sample=False, max_new_tokens=24, return_dict_in_generate=True, output_logits=True, **options
    ), ids.input_ids.shape[1]


# -- greedy is generate()


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_is_generate_token_for_token(folders: Callable[[str], Path], name: str) -> None:
    folder = folders(name)
    instance = ModelInstance.load(card_of(folder))
    said = set()
    for prompt in PROMPTS:
        out, length = generated(folder, instance, prompt)
        ours = decode(instance, prompt)
        assert list(ours.token_ids) == out.sequences[0, length:].tolist()
        assert ours.prompt_tokens == length
        assert ours.text == instance.tokenizer.decode(out.sequences[0, length:], skip_special_tokens=True)
        said.add(ours.token_ids)
    assert len(said) == len(PROMPTS)


def test_the_logits_are_those_of_generate_to_the_bit(folders: Callable[[str], Path], instance: ModelInstance) -> None:
    out, _ = generated(folders("gqa"), instance, PROMPTS[3])
    loop, ctx = ARDecodeLoop(), context(instance, PROMPTS[3])
    state = loop.init(GREEDY, instance, ctx)
    for expected in out.logits:
        plan = loop.next(state)
        assert not isinstance(plan, Done)
        logits = instance.call(plan.calls[0])
        assert torch.equal(logits, expected)
        state = loop.advance(state, StepResult((logits,)))
    assert isinstance(loop.next(state), Done)


@pytest.mark.parametrize("at", [0, 5])
def test_an_end_token_ends_it_as_in_generate(folders: Callable[[str], Path], instance: ModelInstance, at: int) -> None:
    """The token that comes at ``at`` is made the end token; at 0 the completion is that token alone."""
    whole = decode(instance, PROMPTS[2])
    end = whole.token_ids[at]
    first = whole.token_ids.index(end)
    text = instance.card.sampling.text.model_copy(update={"eos": (END, end)})  # type: ignore[union-attr]
    sampling = instance.card.sampling.model_copy(update={"text": text})
    ended = decode(instance.view({}, instance.card.model_copy(update={"sampling": sampling})), PROMPTS[2])
    out, length = generated(folders("gqa"), instance, PROMPTS[2], eos_token_id=[END, end])
    assert list(ended.token_ids) == out.sequences[0, length:].tolist()
    assert ended.token_ids == whole.token_ids[: first + 1]
    assert ended.finish == "stop"


# -- units and limits


def test_one_prefill_then_one_unit_a_token(instance: ModelInstance) -> None:
    loop, ctx = ARDecodeLoop(), context(instance, PROMPTS[1])
    state = loop.init(replace(GREEDY, max_tokens=4), instance, ctx)
    units, rows, lengths = [], [], []
    while not isinstance(plan := loop.next(state), Done):
        assert loop.next(state).label == plan.label  # type: ignore[union-attr]
        units.append(plan.unit)
        rows.append(tuple(plan.calls[0].tensors["ids"].shape))
        state = loop.advance(state, StepResult((instance.call(plan.calls[0]),)))
        lengths.append(state.plugins[KV_KEY].length)
    prompt = len(instance.tokenizer(PROMPTS[1]).input_ids)
    assert units == [WorkUnit.AR_PREFILL] + [WorkUnit.AR_TOKEN] * 3
    assert rows == [(1, prompt)] + [(1, 1)] * 3
    assert lengths == [prompt, prompt + 1, prompt + 2, prompt + 3]
    assert loop.finalize(state).value.finish == "length"


@pytest.mark.parametrize("tokens", [1, 2, 7])
def test_max_tokens_is_the_number_of_tokens(instance: ModelInstance, tokens: int) -> None:
    got = decode(instance, PROMPTS[1], replace(GREEDY, max_tokens=tokens))
    assert got.token_ids == decode(instance, PROMPTS[1]).token_ids[:tokens]
    assert got.finish == "length"


def test_what_does_not_fit_the_context_is_refused_with_figures(instance: ModelInstance) -> None:
    prompt = len(instance.tokenizer(PROMPTS[1]).input_ids)
    decode(instance, PROMPTS[1], replace(GREEDY, max_tokens=2, stop=()))
    with pytest.raises(UserError, match=rf"prompt of {prompt} tokens.*holds 256.*max_tokens <= {256 - prompt}"):
        decode(instance, PROMPTS[1], replace(GREEDY, max_tokens=257 - prompt))
    with pytest.raises(UserError, match="300 tokens"):
        decode(instance, "x" * 300)
    with pytest.raises(UserError, match="no tokens"):
        decode(instance, "")


# -- stop strings


def test_a_stop_string_that_spans_tokens_ends_the_text_before_it(instance: ModelInstance) -> None:
    """Every one, two and three neighbouring characters of the greedy text, as a stop string of its own."""
    params = replace(GREEDY, max_tokens=16)
    whole = decode(instance, PROMPTS[2], params)
    spans = 0
    for width in (1, 2, 3):
        for at in range(len(whole.text) - width):
            stop = whole.text[at : at + width]
            if "�" in stop:
                continue
            got = decode(instance, PROMPTS[2], replace(params, stop=("not in the text", stop)))
            assert got.text == whole.text[: whole.text.index(stop)]
            assert got.finish == "stop"
            n = len(got.token_ids)
            assert got.token_ids == whole.token_ids[:n]
            assert stop in instance.tokenizer.decode(list(got.token_ids), skip_special_tokens=True)
            assert stop not in instance.tokenizer.decode(list(got.token_ids[:-1]), skip_special_tokens=True)
            last = instance.tokenizer.decode([got.token_ids[-1]], skip_special_tokens=True)
            spans += stop not in last
    assert spans >= 3


def test_the_first_of_several_stop_strings_counts_whatever_their_order(instance: ModelInstance) -> None:
    whole = decode(instance, PROMPTS[1]).text
    plain = [c for c in dict.fromkeys(whole) if c != "�"]
    early, late = plain[1], plain[-1]
    assert whole.index(early) < whole.index(late)
    for stop in ((early, late), (late, early)):
        got = decode(instance, PROMPTS[1], replace(GREEDY, stop=stop)).text
        assert got == whole[: min(whole.index(early), whole.index(late))]


# -- seeds and log-probs


def test_a_seed_is_a_completion(instance: ModelInstance) -> None:
    drawn = replace(GREEDY, temperature=1.0, max_tokens=12)
    texts = [decode(instance, PROMPTS[0], replace(drawn, seed=seed)).token_ids for seed in (1, 2, 1)]
    assert texts[0] == texts[2]
    assert texts[0] != texts[1]


@pytest.mark.parametrize(("temperature", "top_p"), [(0.0, 1.0), (0.7, 0.8), (1.5, 1.0)])
def test_logprobs_are_those_of_one_forward_over_all_tokens(
    folders: Callable[[str], Path], instance: ModelInstance, temperature: float, top_p: float
) -> None:
    """Whatever the tokens were drawn with: temperature 1 and no top-p in the log-prob. Bound: float32 of two shapes."""
    params = replace(GREEDY, temperature=temperature, top_p=top_p, seed=5)
    got = decode(instance, PROMPTS[2], params, profile=Profile.ROLLOUT)
    assert decode(instance, PROMPTS[2], params).logprobs is None
    assert got.token_ids == decode(instance, PROMPTS[2], params).token_ids
    prompt = instance.tokenizer(PROMPTS[2]).input_ids
    model = Qwen3ForCausalLM.from_pretrained(folders("gqa")).eval()
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *got.token_ids]])).logits[0, len(prompt) - 1 : -1].double()
    expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(got.token_ids)[:, None])[:, 0]
    assert got.logprobs is not None
    assert got.logprobs.dtype == torch.float64
    assert (got.logprobs - expected).abs().max().item() < 1e-4


# -- chat


def test_a_chat_is_the_templates_tokens(instance: ModelInstance) -> None:
    messages = [{"role": "system", "content": "abc"}, {"role": "user", "content": "end é"}]
    said = "<|im_start|>system\nabc<|im_end|>\n<|im_start|>user\nend é<|im_end|>\n<|im_start|>assistant\n"
    assert decode(instance, messages) == decode(instance, said)


def test_a_model_without_a_template_takes_no_chat(tmp_path: Path) -> None:
    plain = ModelInstance.load(card_of(save_tiny_qwen3(tmp_path, chat=False)))
    with pytest.raises(UserError, match="no chat template"):
        decode(plain, [{"role": "user", "content": "a"}])
    decode(plain, "a", replace(GREEDY, max_tokens=1))


# -- stop and resume


@pytest.mark.parametrize("at", [1, 6])
def test_a_loop_resumed_half_way_ends_in_the_same_bits(instance: ModelInstance, at: int) -> None:
    params = replace(GREEDY, temperature=1.0, seed=9, max_tokens=12)
    loop, ctx = ARDecodeLoop(), context(instance, PROMPTS[2], profile=Profile.ROLLOUT)
    whole = drive(loop, params, instance, ctx).value  # type: ignore[arg-type]

    def step(state: LoopState) -> LoopState:
        plan = loop.next(state)
        assert not isinstance(plan, Done)
        return loop.advance(state, StepResult((instance.call(plan.calls[0]),)))

    state = loop.init(params, instance, ctx)
    for _ in range(at):
        state = step(state)
    saved = state.save()
    while not isinstance(loop.next(state), Done):
        state = step(state)
    for _ in range(2):
        resumed = LoopState.resume(saved, {"tokenizer": instance.tokenizer})
        assert resumed.plugins[KV_KEY] is not state.plugins[KV_KEY]
        while not isinstance(loop.next(resumed), Done):
            resumed = step(resumed)
        value = loop.finalize(resumed).value
        assert value.token_ids == whole.token_ids
        assert torch.equal(value.logprobs, whole.logprobs)


def test_a_saved_state_holds_no_tokenizer(instance: ModelInstance) -> None:
    state = ARDecodeLoop().init(GREEDY, instance, context(instance, "a"))
    assert state.shared["tokenizer"] is instance.tokenizer
    assert LoopState.resume(state.save()).shared == {}


# -- KV from elsewhere


class Prefilled:
    """A source whose handles hold the first tokens of every prompt already, as one that shares prefixes does."""

    def __init__(self, instance: ModelInstance, kept: int):
        self.instance = instance
        self.kept = kept
        self.opened: list[tuple[str, tuple[int, ...]]] = []

    def open(self, component: str, token_ids: tuple[int, ...]) -> GrowingKV:
        self.opened.append((component, token_ids))
        kv = GrowingKV()
        if self.kept:
            ids = torch.tensor([token_ids[: self.kept]])
            plan = replace_ids(self.instance, ids, kv)
            self.instance.call(plan)
        return kv


def replace_ids(instance: ModelInstance, ids: torch.Tensor, kv: GrowingKV) -> Any:
    loop = ARDecodeLoop()
    plan = loop.next(loop.init(GREEDY, instance, context(instance, "a")))
    assert not isinstance(plan, Done)
    return replace(plan.calls[0], tensors={"ids": ids}, state=kv)


@pytest.mark.parametrize("kept", [0, 1, 5])
def test_only_what_the_kv_does_not_hold_is_prefilled(instance: ModelInstance, kept: int) -> None:
    source = Prefilled(instance, kept)
    prompt = tuple(instance.tokenizer(PROMPTS[2]).input_ids)
    loop = ARDecodeLoop()
    state = loop.init(GREEDY, instance, context(instance, PROMPTS[2], kv=source))
    assert source.opened == [("lm", prompt)]
    assert state.tensors["ids"].tolist() == [list(prompt[kept:])]
    assert decode(instance, PROMPTS[2], kv=source).token_ids == decode(instance, PROMPTS[2]).token_ids


def test_a_kv_that_holds_the_whole_prompt_is_a_fault(instance: ModelInstance) -> None:
    length = len(instance.tokenizer(PROMPTS[2]).input_ids)
    with pytest.raises(ValueError, match="all but one"):
        decode(instance, PROMPTS[2], kv=Prefilled(instance, length))
