"""The parts of the bundled tiny Wan2.1, all real library classes, and how they become one diffusers folder.

Knows sizes, the tokenizer's vocabulary and the folder's layout. Leaves training to ``train_vae.py`` and
``train_base.py`` and measuring to ``figures.py``.
"""

from __future__ import annotations

import shutil
import string
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
from torch import Tensor
from transformers import PreTrainedTokenizerBase, T5TokenizerFast, UMT5Config, UMT5EncoderModel

from methods.shapeworld.scene import captions, sample_scene

FLOW_SHIFT = 3.0
TEXT_WIDTH = 64
TRANSFORMER_CONFIG = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 4,
    "attention_head_dim": 32,
    "in_channels": 8,
    "out_channels": 8,
    "text_dim": TEXT_WIDTH,
    "freq_dim": 64,
    "ffn_dim": 512,
    "num_layers": 5,
    "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads",
    "eps": 1e-6,
    "image_dim": None,
    "added_kv_proj_dim": None,
    "rope_max_seq_len": 64,
}


def build_tokenizer() -> PreTrainedTokenizerBase:
    """A T5 unigram tokenizer of the world's words; single characters stand in for any other word."""
    rng = np.random.default_rng(0)
    words: set[str] = set()
    for _ in range(4000):
        for sentence in captions(sample_scene(rng)):
            words.update(sentence.replace(",", "").split())
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    pieces += [("▁" + word, -4.0) for word in sorted(words)]
    pieces += [("▁", -8.0)] + [(char, -8.0) for char in string.ascii_lowercase + string.digits + ",.;:'-?!"]
    return T5TokenizerFast(vocab=pieces, extra_ids=0, model_max_length=512)


def build_text_encoder(vocabulary: int) -> UMT5EncoderModel:
    """Two layers of UMT5, width 64."""
    return UMT5EncoderModel(
        UMT5Config(
            vocab_size=vocabulary,
            d_model=TEXT_WIDTH,
            d_kv=16,
            d_ff=128,
            num_layers=2,
            num_heads=4,
            relative_attention_num_buckets=16,
            relative_attention_max_distance=32,
            dropout_rate=0.0,
            pad_token_id=0,
            eos_token_id=1,
            is_encoder_decoder=False,
            use_cache=False,
            tie_word_embeddings=False,
        )
    )


def build_transformer() -> WanTransformer3DModel:
    """Five layers, width 128."""
    return WanTransformer3DModel(**TRANSFORMER_CONFIG)


def build_scheduler() -> UniPCMultistepScheduler:
    """The scheduler of Wan2.1's folders, at the flow shift that Wan uses for small frames."""
    return UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=FLOW_SHIFT
    )


def latent_statistics(vae: AutoencoderKLWan) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the latent channels, each (1, Z, 1, 1, 1)."""
    shape = (1, vae.config.z_dim, 1, 1, 1)
    return torch.tensor(vae.config.latents_mean).view(shape), torch.tensor(vae.config.latents_std).view(shape)


def save_folder(
    out: Path,
    *,
    vae: AutoencoderKLWan,
    tokenizer: PreTrainedTokenizerBase,
    text_encoder: UMT5EncoderModel,
    transformer: WanTransformer3DModel,
) -> None:
    """Writes the folder that ``WanPipeline.from_pretrained`` loads, replacing ``out`` at once.

    The VAE and the transformer are stored in fp16, the small text encoder in fp32.
    """
    fresh = out.with_name(out.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    pipeline = WanPipeline(
        tokenizer=tokenizer,
        text_encoder=text_encoder.float(),  # transformers loads what is stored; the rest loads as fp32 by default
        vae=vae.half(),
        scheduler=build_scheduler(),
        transformer=transformer.half(),
    )
    pipeline.save_pretrained(fresh, safe_serialization=True)
    for extra in ("README.md", "FIGURES.json"):
        if (out / extra).exists():
            shutil.copy(out / extra, fresh / extra)
    old = out.with_name(out.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if out.exists():
        out.rename(old)
    fresh.rename(out)
    shutil.rmtree(old, ignore_errors=True)


def load_folder(folder: Path) -> WanPipeline:
    """The plain pipeline in fp32, its progress bar off."""
    pipeline = WanPipeline.from_pretrained(folder, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
