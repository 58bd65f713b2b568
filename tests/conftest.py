"""Fixtures shared by all rooms: tiny random Wan folders in the diffusers layout, written by the libraries' own save."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="session")
def make_wan_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes a random WanPipeline folder: heads, head width, layers, z channels and flow shift are free."""

    def make(
        *,
        heads: int = 2,
        head_dim: int = 16,
        layers: int = 2,
        z_dim: int = 4,
        flow_shift: float = 3.0,
        scheduler: str = "UniPCMultistepScheduler",
        seed: int = 0,
    ) -> Path:
        import diffusers
        from diffusers import AutoencoderKLWan, WanPipeline, WanTransformer3DModel
        from transformers import T5TokenizerFast, UMT5Config, UMT5EncoderModel

        torch.manual_seed(seed)
        words = ["<pad>", "</s>", "<unk>", *"a the red green blue circle square triangle moves left right".split()]
        tokenizer = T5TokenizerFast(
            vocab=[(word if i < 3 else "▁" + word, -float(i)) for i, word in enumerate(words)], extra_ids=0
        )
        text = UMT5Config(
            vocab_size=len(words), d_model=24, d_kv=8, d_ff=32, num_layers=1, num_heads=2, pad_token_id=0, eos_token_id=1
        )
        transformer = WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=heads,
            attention_head_dim=head_dim,
            in_channels=z_dim,
            out_channels=z_dim,
            text_dim=24,
            freq_dim=32,
            ffn_dim=48,
            num_layers=layers,
            cross_attn_norm=True,
            rope_max_seq_len=64,
        )
        vae = AutoencoderKLWan(
            base_dim=8,
            z_dim=z_dim,
            dim_mult=[1, 1, 1],
            num_res_blocks=1,
            temperal_downsample=[True, True],
            latents_mean=torch.randn(z_dim).tolist(),
            latents_std=(torch.rand(z_dim) + 0.5).tolist(),
            scale_factor_spatial=4,
            scale_factor_temporal=4,
        )
        if scheduler == "FlowMatchEulerDiscreteScheduler":
            sampler = diffusers.FlowMatchEulerDiscreteScheduler(shift=flow_shift)
        else:
            sampler = getattr(diffusers, scheduler)(
                prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=flow_shift
            )
        folder = tmp_path_factory.mktemp("wan")
        WanPipeline(
            tokenizer=tokenizer,
            text_encoder=UMT5EncoderModel(text).eval(),
            transformer=transformer.eval(),
            vae=vae.eval(),
            scheduler=sampler,
        ).save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def wan_folder(make_wan_folder: Callable[..., Path]) -> Path:
    """One tiny random Wan folder."""
    return make_wan_folder()
