"""Geometry against the shapes that diffusers' own VAE and transformer give, and closed forms."""

from __future__ import annotations

import pytest
import torch

from cards.errors import UserError
from cards.geometry import Geometry

WAN = Geometry(spatial=8, temporal=4, channels=16)


def test_wan_480p_in_closed_form() -> None:
    assert WAN.latent_shape(81, 480, 832) == (16, 21, 60, 104)
    assert WAN.tokens(81, 480, 832) == 21 * 30 * 52
    assert WAN.latent_shape(1, 16, 16) == (16, 1, 2, 2)


@pytest.mark.parametrize("size", [(1, 16, 16), (5, 16, 24), (9, 24, 8)])
def test_latents_have_the_shape_that_the_library_encodes_to(size: tuple[int, int, int]) -> None:
    from diffusers import AutoencoderKLWan

    vae = AutoencoderKLWan(
        base_dim=4,
        z_dim=3,
        dim_mult=[1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[True, True],
        latents_mean=[0.0] * 3,
        latents_std=[1.0] * 3,
    )
    with torch.no_grad():
        encoded = vae.encode(torch.zeros(1, 3, *size)).latent_dist.mode()
    assert tuple(encoded.shape[1:]) == Geometry(spatial=4, temporal=4, channels=3).latent_shape(*size)


@pytest.mark.parametrize("frames", [0, -3, 2, 4, 8, 80, 82])
def test_frames_that_are_not_4k_plus_1_name_the_nearest_that_are(frames: int) -> None:
    with pytest.raises(UserError, match=rf"frames: got {frames}, expected 4k \+ 1") as error:
        WAN.check(frames, 16, 16)
    low, high = (int(word) for word in str(error.value).split("; use ")[1].split(" or "))
    assert high == low + 4
    assert low >= 1
    WAN.check(low, 16, 16)
    WAN.check(high, 16, 16)


def test_every_problem_of_a_size_is_named_at_once() -> None:
    with pytest.raises(UserError) as error:
        WAN.latent_shape(8, 100, 0)
    for word in ("frames: got 8", "height: got 100 pixels", "multiple of 16; use 96", "width: got 0", "use 16"):
        assert word in str(error.value)
