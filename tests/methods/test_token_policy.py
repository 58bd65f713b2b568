"""A language model as a policy: its loss in closed form, and log-probs against transformers' own logits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

from inference.engine import Engine
from inference.instance import ModelInstance
from inference.load import card_of
from inference.request import Request
from loops.loop import Profile, TokenBehaviour
from methods.token_policy import (
    TokenLoss,
    TokenRows,
    mean_over_drawn,
    token_log_probs,
    token_policy_loss,
    token_updates,
)
from methods.world import World
from tests.support.tiny_qwen3 import save_tiny_qwen3

CPU = torch.device("cpu")


def behaviour(prompt: Sequence[int], drawn: Sequence[int], *, ended_at: int | None = None) -> TokenBehaviour:
    kept = len(drawn) if ended_at is None else ended_at + 1
    return TokenBehaviour(
        prompt_ids=torch.tensor(prompt),
        token_ids=torch.tensor(drawn),
        logprobs=-torch.arange(1.0, len(drawn) + 1, dtype=torch.float64),
        mask=torch.arange(len(drawn)) < kept,
        temperature=1.0,
    )


def rows_of_loss(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """log-probs with a gradient, a reference's, and which are drawn: 3 and 5 of 7."""
    generator = torch.Generator().manual_seed(seed)
    log_p = -torch.rand(2, 7, generator=generator, dtype=torch.float64)
    reference = -torch.rand(2, 7, generator=generator, dtype=torch.float64)
    drawn = torch.tensor([[False] * 2 + [True] * 3 + [False] * 2, [False] * 2 + [True] * 5])
    return log_p.requires_grad_(True), reference, drawn


def test_the_ratio_is_one_and_the_gradient_that_of_the_log_prob() -> None:
    log_p, reference, drawn = rows_of_loss()
    advantage = torch.tensor([1.5, -0.5], dtype=torch.float64)
    loss_B, parts = token_policy_loss(log_p, reference, advantage, drawn, kl=0.1)
    assert torch.equal(parts["ratio_deviation"], torch.zeros(2, dtype=torch.float64))
    assert torch.equal(parts["policy_loss"], -advantage)
    apart = (reference - log_p).detach()
    k3 = torch.exp(apart) - apart - 1
    lengths = torch.tensor([3.0, 5.0], dtype=torch.float64)
    expected = -advantage + 0.1 * (k3 * drawn).sum(1) / lengths
    torch.testing.assert_close(loss_B, expected)
    assert (k3[drawn] > 0).all()
    loss_B.sum().backward()
    gradient = (-advantage[:, None] + 0.1 * (1 - torch.exp(apart))) / lengths[:, None] * drawn
    torch.testing.assert_close(log_p.grad, gradient)


def test_a_model_that_equals_its_reference_has_no_kl_and_no_gradient_of_it() -> None:
    log_p, _, drawn = rows_of_loss()
    loss_B, parts = token_policy_loss(log_p, log_p.detach().clone(), torch.zeros(2).double(), drawn, kl=10.0)
    loss_B.sum().backward()
    assert torch.equal(parts["kl"], torch.zeros(2, dtype=torch.float64))
    assert log_p.grad is not None and not log_p.grad.any()


def test_off_policy_ratios_are_to_the_rollouts_log_probs() -> None:
    log_p, old, drawn = rows_of_loss()
    advantage = torch.tensor([1.5, -0.5], dtype=torch.float64)
    loss_B, _ = token_policy_loss(log_p, None, advantage, drawn, kl=0.0, old_BL=old)
    torch.testing.assert_close(loss_B, -advantage * mean_over_drawn(torch.exp(log_p - old), drawn))


def test_rows_hold_prompt_and_drawn_tokens_up_to_the_first_end() -> None:
    rows = TokenRows.of([behaviour((5, 6), (7, 8, 2, 9), ended_at=2), behaviour((5,), (7,))], CPU)
    assert rows.ids_BL.tolist() == [[5, 6, 7, 8, 2, 9], [5, 7, 0, 0, 0, 0]]
    assert rows.mask_BL.tolist() == [[1] * 6, [1, 1, 0, 0, 0, 0]]
    assert rows.drawn_BL.int().tolist() == [[0, 0, 1, 1, 1, 0], [0, 1, 0, 0, 0, 0]]
    assert rows.rolled_out_BL.tolist() == [[0, 0, -1, -2, -3, 0], [0, -1, 0, 0, 0, 0]]


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> ModelInstance:
    folder: Path = save_tiny_qwen3(tmp_path_factory.mktemp("lm") / "qwen3")
    card = card_of(folder)
    loop = card.loops["decode"].model_copy(update={"options": {"behaviour": True}})
    instance = ModelInstance.from_folder(card.model_copy(update={"loops": {"decode": loop}}), folder)
    instance.module("lm").requires_grad_(True)
    return instance


def rolled_out(lm: ModelInstance, prompts: Sequence[str], **options: Any) -> list[TokenBehaviour]:
    settings: dict[str, Any] = {"task": "text", "max_tokens": 9, "temperature": 1.0, "top_p": 1.0, "top_k": 0} | options
    requests = [Request(p, seed=i, profile=Profile.ROLLOUT, **settings) for i, p in enumerate(prompts)]
    return [artifact.tokens["decode"] for artifact in Engine(batching="shape").run_interleaved(requests, lm)]


PROMPTS = ("a crimson ball", "show me two", "x", "please draw an emerald box heading west")


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_padded_rows_give_what_transformers_gives_each_text_alone(lm: ModelInstance, temperature: float) -> None:
    texts = rolled_out(lm, PROMPTS, temperature=temperature)
    rows = TokenRows.of(texts, CPU)
    ours = token_log_probs(lm, "lm", rows, gradient=True)
    assert ours.requires_grad
    model = lm.module("lm")
    assert isinstance(model, Qwen3ForCausalLM)
    for row, text in enumerate(texts):
        ids = torch.cat([text.prompt_ids, text.token_ids])
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0].double() / temperature
        first = len(text.prompt_ids)
        theirs = torch.log_softmax(logits[first - 1 : -1], -1).gather(1, text.token_ids[:, None])[:, 0]
        drawn = rows.drawn_BL[row]
        torch.testing.assert_close(ours[row][drawn].detach(), theirs[text.mask], rtol=0, atol=1e-5)
        assert not ours[row][~drawn].any()
    assert (ours - rows.rolled_out_BL).abs().max() <= 1e-6 * max(1.0, rows.rolled_out_BL.abs().max().item())


def test_a_text_alone_gives_its_rollouts_log_probs_bit_for_bit(lm: ModelInstance) -> None:
    for text in rolled_out(lm, PROMPTS):
        rows = TokenRows.of([text], CPU)
        assert torch.equal(token_log_probs(lm, "lm", rows, gradient=True).detach(), rows.rolled_out_BL)


def gradients(lm: ModelInstance, texts: Any, advantages: Any, keep: Any = None, **settings: Any) -> list[Tensor]:
    module = lm.module("lm")
    module.zero_grad()
    keep = [True] * len(texts) if keep is None else keep
    made = token_updates(
        texts,
        advantages,
        keep,
        TokenLoss(**{"kl": 0.0, **settings}),
        component="lm",
        student=lm,
        reference=lm,
        world=World(),
        optimizer="lm",
    )
    updates = list(made)
    assert [update.step for update in updates if update.loss is not None][-1:] in ([True], [])
    for update in updates:
        if update.loss is not None:
            assert update.optimizer == "lm"
            update.loss.backward()
    return [p.grad.clone() if p.grad is not None else torch.zeros_like(p) for p in module.parameters()]


def test_the_loss_is_the_mean_over_texts_of_means_over_tokens(lm: ModelInstance) -> None:
    """The gradient of the batch is that of the policy gradient written out, text by text."""
    texts, advantages = rolled_out(lm, PROMPTS), np.array([1.0, -2.0, 0.5, 7.0])
    ours = gradients(lm, texts, advantages, micro_batch=3)
    module = lm.module("lm")
    module.zero_grad()
    for text, advantage in zip(texts, (1.0, -2.0, 0.5, 5.0), strict=True):  # clamped
        ids = torch.cat([text.prompt_ids, text.token_ids])[None]
        log_p = torch.log_softmax(module(input_ids=ids).logits[0].double(), -1)[len(text.prompt_ids) - 1 : -1]
        drawn = log_p.gather(1, text.token_ids[:, None])[:, 0][text.mask]
        (-advantage * drawn.mean() / len(texts)).backward()
    for ours_p, parameter in zip(ours, module.parameters(), strict=True):
        torch.testing.assert_close(ours_p, parameter.grad, rtol=1e-4, atol=1e-6)


def test_a_text_that_is_not_kept_counts_for_nothing(lm: ModelInstance) -> None:
    texts = rolled_out(lm, PROMPTS)
    ours = gradients(lm, texts, [1.0, 3.0, -1.0, 0.5], keep=[True, False, True, True])
    theirs = gradients(lm, [texts[0], *texts[2:]], [1.0, -1.0, 0.5])
    assert any(p.any() for p in ours)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    assert not any(p.any() for p in gradients(lm, texts, [1.0] * 4, keep=[False] * 4))
