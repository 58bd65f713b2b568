"""Folded text padding beside image tokens: the same function as the library's attention, in values and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from torch import Tensor

from cards.wan21.padding import BUCKET
from cards.wan21_i2v.components import TEXT_TOKENS, predict_velocity
from tests.support.tiny_i2v import write_i2v_folder

IMAGE_TOKENS = 5


@pytest.fixture(scope="module")
def transformer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = write_i2v_folder(tmp_path_factory.mktemp("i2v"))
    return WanTransformer3DModel.from_pretrained(folder, subfolder="transformer").eval().requires_grad_(False)


def tensors(*lengths: int) -> dict[str, Tensor]:
    """Inputs of rows whose prompts have these lengths."""
    rows, generator = len(lengths), torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(rows, *shape, generator=generator)

    text_BLD = noise(TEXT_TOKENS, 24)
    for row, length in zip(text_BLD, lengths, strict=True):
        row[length:] = 0
    condition = noise(8, 2, 4, 4)
    return {
        "latents": noise(4, 2, 4, 4).requires_grad_(True),
        "condition": condition,
        "image_embeds": noise(IMAGE_TOKENS, 20),
        "text": text_BLD,
        "timestep": torch.linspace(900.0, 100.0, rows),
    }


def velocity(transformer: Any, given: dict[str, Tensor], padding: str) -> Tensor:
    return predict_velocity(transformer, given, {"dtype": "float32", "text_padding": padding})


def library(transformer: Any, given: dict[str, Tensor]) -> Tensor:
    return transformer(
        hidden_states=torch.cat([given["latents"], given["condition"]], dim=1),
        timestep=given["timestep"],
        encoder_hidden_states=given["text"],
        encoder_hidden_states_image=given["image_embeds"],
        return_dict=False,
    )[0]


@pytest.mark.parametrize("lengths", [(5,), (0, 1, 15), (16, 3), (500,)])
def test_folded_equals_the_library(transformer: Any, lengths: tuple[int, ...]) -> None:
    given = tensors(*lengths)
    theirs = library(transformer, given)
    (their_gradient,) = torch.autograd.grad(theirs.square().sum(), given["latents"])
    ours = velocity(transformer, given, "folded")
    (our_gradient,) = torch.autograd.grad(ours.square().sum(), given["latents"])
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    torch.testing.assert_close(our_gradient, their_gradient, rtol=1e-4, atol=1e-4)
    assert torch.equal(velocity(transformer, given, "full"), theirs)  # what was installed leaves no trace


def test_the_forward_sees_cut_text_and_the_whole_image(transformer: Any) -> None:
    seen: list[int] = []
    attention = transformer.blocks[0].attn2
    hook = attention.register_forward_pre_hook(lambda module, args: seen.append(args[1].shape[1]))
    velocity(transformer, tensors(5), "folded")
    velocity(transformer, tensors(5), "full")
    hook.remove()
    assert seen == [IMAGE_TOKENS + BUCKET, IMAGE_TOKENS + TEXT_TOKENS]


def test_the_image_is_attended_to(transformer: Any) -> None:
    given = tensors(5)
    other = {**given, "image_embeds": -given["image_embeds"]}
    assert (velocity(transformer, given, "folded") - velocity(transformer, other, "folded")).abs().max() > 1e-4
