"""Folded text padding: the same function as full padding, in values and gradients, and no trace of it when off."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cards.wan21.padding import BUCKET, FoldedPadding, fold, install

LENGTH, WIDTH = 64, 24


def text_of(*lengths: int, seed: int = 0) -> Tensor:
    """Embeddings (B, LENGTH, WIDTH) of prompts of these lengths, zero behind them."""
    rows = torch.randn(len(lengths), LENGTH, WIDTH, generator=torch.Generator().manual_seed(seed))
    for row, length in zip(rows, lengths, strict=True):
        row[length:] = 0
    return rows


@pytest.fixture
def transformer(make_wan_folder: Callable[..., Path]) -> Any:
    from diffusers import WanTransformer3DModel

    folder = make_wan_folder(heads=3, head_dim=16)
    return WanTransformer3DModel.from_pretrained(folder, subfolder="transformer").eval().requires_grad_(False)


def forward(transformer: Any, text: Tensor, latents: Tensor | None = None) -> Tensor:
    if latents is None:
        latents = torch.randn(text.shape[0], 4, 3, 4, 4, generator=torch.Generator().manual_seed(7))
    timestep = torch.linspace(900.0, 100.0, text.shape[0])
    return transformer(hidden_states=latents, timestep=timestep, encoder_hidden_states=text, return_dict=False)[0]


def test_fold_keeps_every_token_and_at_least_one_padding() -> None:
    for longest in range(LENGTH + 1):
        text = text_of(longest, longest // 2)
        kept = fold(text)
        assert torch.equal(kept, text[:, : kept.shape[1]])
        assert not text[:, kept.shape[1] :].any()
        if kept.shape[1] < LENGTH:
            assert kept.shape[1] % BUCKET == 0
            assert not kept[:, -1].any()  # the one that stands for all
        else:
            assert longest >= LENGTH - BUCKET


def test_an_empty_prompt_folds() -> None:
    assert fold(torch.zeros(2, LENGTH, WIDTH)).shape == (2, BUCKET, WIDTH)


@pytest.mark.parametrize("lengths", [(5,), (1, 15), (16, 3), (0, 31, 47), (63,)])
def test_folded_equals_full(transformer: Any, lengths: tuple[int, ...]) -> None:
    text = text_of(*lengths)
    full = forward(transformer, text)
    install(transformer, LENGTH)
    torch.testing.assert_close(forward(transformer, fold(text)), full, atol=2e-6, rtol=0)


def test_cutting_without_the_raised_logit_is_another_function(transformer: Any) -> None:
    text = text_of(5)
    assert (forward(transformer, fold(text)) - forward(transformer, text)).abs().max() > 1e-4


def test_full_text_stays_bit_for_bit_the_librarys(transformer: Any) -> None:
    text = text_of(5, 40)
    full = forward(transformer, text)
    install(transformer, LENGTH)
    install(transformer, LENGTH)  # again is no harm
    assert all(isinstance(block.attn2.processor, FoldedPadding) for block in transformer.blocks)
    assert torch.equal(forward(transformer, text), full)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_those_of_full_padding(transformer: Any, checkpointing: bool) -> None:
    text = text_of(5, 20)
    transformer.requires_grad_(True)

    def gradients(text: Tensor) -> list[Tensor]:
        transformer.zero_grad()
        forward(transformer, text).square().mean().backward()
        return [p.grad.clone() for p in transformer.parameters() if p.grad is not None]

    full = gradients(text)
    install(transformer, LENGTH)
    if checkpointing:
        transformer.train()
        transformer.enable_gradient_checkpointing()
    folded = gradients(fold(text))
    assert len(full) == len(folded)
    for a, b in zip(folded, full, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-3)


def test_a_card_says_how_its_calls_pad(wan_folder: Path) -> None:
    """The same request under both numerics: equal up to rounding, and only the folded one cuts the text."""
    from inference.engine import Engine
    from inference.instance import ModelInstance
    from inference.load import card_of
    from inference.request import Request

    card = card_of(wan_folder)
    folded = card.model_copy(update={"precision": card.precision.model_copy(update={"text_padding": "folded"})})
    assert folded.digest != card.digest
    instance = ModelInstance.from_folder(card, wan_folder)
    engine = Engine("cpu", batching="shape")
    requests = [
        Request(prompt=p, seed=i, steps=4, guidance=g, output="latents")
        for i, (p, g) in enumerate([("a red circle", 1.0), ("the blue square moves left", 1.0), ("a circle", 4.0)])
    ]
    seen: list[int] = []
    transformer = instance.module("transformer")
    handle = transformer.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["encoder_hidden_states"].shape[1]), with_kwargs=True
    )
    full = engine.run_interleaved(requests, instance)
    assert set(seen) == {card.sampling.max_sequence_length}
    seen.clear()
    cut = engine.run_interleaved(requests, instance.view({}, folded))
    handle.remove()
    assert set(seen) == {BUCKET}
    for a, b in zip(full, cut, strict=True):
        torch.testing.assert_close(a.latents, b.latents, atol=1e-4, rtol=0)
    again = engine.run_interleaved(requests, instance)
    assert all(torch.equal(a.latents, b.latents) for a, b in zip(full, again, strict=True))


def test_the_encoder_reads_no_more_padding_than_a_forward(wan_folder: Path) -> None:
    """Folded, a prompt's features are those of the whole padding up to rounding; each numerics has its own in the
    cache, and in full padding the encoder sees every token as the library's does."""
    from inference.engine import Engine
    from inference.instance import ModelInstance
    from inference.load import card_of

    card = card_of(wan_folder)
    folded = card.model_copy(update={"precision": card.precision.model_copy(update={"text_padding": "folded"})})
    instance = ModelInstance.from_folder(card, wan_folder)
    engine = Engine("cpu")
    seen: list[int] = []
    encoder = instance.module("text_encoder")
    handle = encoder.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[1]))
    longest = card.sampling.max_sequence_length
    prompts = ["", "a red circle", " ".join(["circle"] * longest)]
    full = engine.encode(prompts, instance)
    assert seen == [longest] * 3
    seen.clear()
    cut = engine.encode(prompts, instance.view({}, folded))
    assert seen == [BUCKET, BUCKET, longest]
    engine.encode(prompts, instance)  # both are kept
    assert len(seen) == 3
    handle.remove()
    for a, b in zip(full, cut, strict=True):
        assert a.shape == b.shape
        assert torch.equal(a != 0, b != 0)
        torch.testing.assert_close(a, b, atol=2e-6, rtol=0)
