"""A tiny random WanImageToVideoPipeline folder, written by the library's own save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def write_i2v_folder(
    folder: Path, *, scheduler: str = "UniPCMultistepScheduler", flow_shift: float = 3.0, seed: int = 0
) -> Path:
    """Real modules of 4 latent channels, 32 wide, with an image encoder of three layers."""
    import diffusers
    from diffusers import AutoencoderKLWan, WanImageToVideoPipeline, WanTransformer3DModel
    from transformers import (
        CLIPImageProcessor,
        CLIPVisionConfig,
        CLIPVisionModel,
        T5TokenizerFast,
        UMT5Config,
        UMT5EncoderModel,
    )

    torch.manual_seed(seed)
    words = ["<pad>", "</s>", "<unk>", "a", "the", "red", "green", "blue", "circle", "square", "moves", "left"]
    tokenizer = T5TokenizerFast(
        vocab=[(word if i < 3 else "▁" + word, -float(i)) for i, word in enumerate(words)], extra_ids=0
    )
    text = UMT5Config(
        vocab_size=len(words), d_model=24, d_kv=8, d_ff=32, num_layers=1, num_heads=2, pad_token_id=0, eos_token_id=1
    )
    vision = CLIPVisionConfig(
        hidden_size=20, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2, image_size=28, patch_size=14
    )
    z_dim, temporal = 4, 4
    transformer = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=2 * z_dim + temporal,
        out_channels=z_dim,
        text_dim=24,
        freq_dim=32,
        ffn_dim=48,
        num_layers=2,
        cross_attn_norm=True,
        rope_max_seq_len=64,
        image_dim=20,
        added_kv_proj_dim=32,
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
        scale_factor_temporal=temporal,
    )
    options: dict[str, Any] = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": flow_shift}
    if scheduler == "FlowMatchEulerDiscreteScheduler":
        options = {"shift": flow_shift}
    WanImageToVideoPipeline(
        tokenizer=tokenizer,
        text_encoder=UMT5EncoderModel(text).eval(),
        image_encoder=CLIPVisionModel(vision).eval(),
        image_processor=CLIPImageProcessor(
            size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}, resample=3
        ),
        transformer=transformer.eval(),
        vae=vae.eval(),
        scheduler=getattr(diffusers, scheduler)(**options),
    ).save_pretrained(folder)
    return folder


def picture(height: int, width: int, seed: int = 0) -> Tensor:
    """uint8 (H, W, 3): a gradient with noise on it."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randint(0, 120, (height, width, 3), generator=generator)
    ramp = torch.linspace(0, 130, width).round().long()[None, :, None]
    return (noise + ramp).to(torch.uint8)
