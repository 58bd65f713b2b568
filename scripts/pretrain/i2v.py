r"""The tiny Wan2.1 image to video before its training: the bundled text to video model, widened.

The transformer takes further input channels (which latent frames are given, and the latents of the first frame) and
attends to what an image encoder sees. All that is new starts at zero where it meets what was there, so that the widened
model computes what the text to video model does, whatever the frame; training has to find the frame. VAE, text encoder
and tokenizer are copies. The image encoder is a CLIP vision tower that was never trained: random features, frozen.

    python scripts/pretrain/i2v.py widen --out build/i2v-start
    python train.py method=finetune card=wan21_i2v card.source=build/i2v-start run=i2v method.text_padding=folded \
        lr=1e-3 batch_size=24 steps=800 method.ema=0.98 eval.prompts=none
    python scripts/pretrain/i2v.py measure --folder outputs/i2v/export
    python scripts/pretrain/i2v.py bundle --export outputs/i2v/export --out cards/wan21_i2v/weights/tiny

Legend: F frames, H W pixels.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import numpy as np
import torch
from diffusers import WanImageToVideoPipeline, WanPipeline, WanTransformer3DModel
from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

from cards.card import Source
from cards.source import resolve_folder
from fastvideo_train.numerics import with_text_padding
from inference.engine import Engine
from inference.load import card_of
from inference.plain_request import plain_task
from inference.request import Request
from methods.shapeworld.heldout import EVAL_SET
from methods.shapeworld.judge import judge, summarise
from methods.shapeworld.render import render
from methods.shapeworld.scene import parse

SEED = 0
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
"""16 patches of a frame of 32x32 pixels and one token for the whole."""


def image_encoder() -> CLIPVisionModel:
    """A CLIP vision tower with random weights, the same at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return CLIPVisionModel(CLIPVisionConfig(**VISION)).eval()


def image_processor() -> CLIPImageProcessor:
    side = VISION["image_size"]
    return CLIPImageProcessor(size={"shortest_edge": side}, crop_size={"height": side, "width": side}, resample=3)


@torch.no_grad()
def widen(transformer: WanTransformer3DModel, *, image_dim: int, temporal: int) -> WanTransformer3DModel:
    """An image to video transformer that computes what ``transformer`` does, whatever its condition holds.

    ``temporal``: frames of a latent frame, the channels of the mask.
    """
    config = dict(transformer.config)
    channels, width = config["in_channels"], config["num_attention_heads"] * config["attention_head_dim"]
    config |= {"in_channels": 2 * channels + temporal, "image_dim": image_dim, "added_kv_proj_dim": width}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        wide = WanTransformer3DModel.from_config(config)
    weights = dict(transformer.state_dict())
    patch = wide.patch_embedding.weight.zero_()
    patch[:, :channels] = weights.pop("patch_embedding.weight")
    missing, unexpected = wide.load_state_dict(weights, strict=False)
    assert not unexpected and all("image" in key or "add" in key or "patch" in key for key in missing), missing
    for block in wide.blocks:
        torch.nn.init.zeros_(block.attn2.add_v_proj.weight)
        torch.nn.init.zeros_(block.attn2.add_v_proj.bias)
    return wide.eval()


def write_start(out: Path, base: Path) -> None:
    """Writes the folder that ``WanImageToVideoPipeline.from_pretrained`` loads."""
    pipeline = WanPipeline.from_pretrained(base, dtype=torch.float32)
    encoder = image_encoder()
    WanImageToVideoPipeline(
        tokenizer=pipeline.tokenizer,
        text_encoder=pipeline.text_encoder,
        image_encoder=encoder,
        image_processor=image_processor(),
        transformer=widen(
            pipeline.transformer,
            image_dim=encoder.config.hidden_size,
            temporal=pipeline.vae.config.scale_factor_temporal,
        ),
        vae=pipeline.vae,
        scheduler=pipeline.scheduler,
    ).save_pretrained(out)


def write_bundle(out: Path, export: Path) -> None:
    """Writes a run's export as it is bundled: transformer and VAE in fp16, as those of text to video are."""
    pipeline = WanImageToVideoPipeline.from_pretrained(export, dtype=torch.float32)
    pipeline.transformer.half()
    pipeline.vae.half()
    pipeline.save_pretrained(out)


def measure(folder: Path, *, guidance: float, count: int) -> dict[str, float]:
    """Rates of the judge on clips of the evaluation's prompts that start from a true first frame: that of a clip which
    shows the prompt. ``first_frame_db``: PSNR of the clips' first frames against those that they were given."""
    card = with_text_padding(card_of(folder), "folded")
    engine = Engine(batching="shape")
    instance = engine.load(card)
    items = EVAL_SET[:count]
    scenes = [parse(item.prompt) for item in items]
    frames = [render(scene, np.random.default_rng([SEED, i]))[0] for i, scene in enumerate(scenes)]
    requests = [
        Request(
            prompt=item.prompt,
            task=plain_task(card),
            seed=item.seed,
            guidance=guidance,
            inputs={"image": torch.from_numpy(frame.copy())},
        )
        for item, frame in zip(items, frames, strict=True)
    ]
    clips = [artifact.frames_FHWC() for artifact in engine.run_interleaved(requests, instance)]
    rates = summarise([judge(clip, item.prompt) for clip, item in zip(clips, items, strict=True)])
    error = np.mean([(clip[0].astype(float) - frame) ** 2 for clip, frame in zip(clips, frames, strict=True)])
    return rates | {"first_frame_db": 10 * math.log10(255**2 / float(error))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    start = commands.add_parser("widen", help="write the folder that training starts from")
    start.add_argument("--out", type=Path, required=True)
    bundle = commands.add_parser("bundle", help="write a run's export in fp16")
    bundle.add_argument("--export", type=Path, required=True)
    bundle.add_argument("--out", type=Path, required=True)
    judged = commands.add_parser("measure", help="print the judge's rates on clips from true first frames, as JSON")
    judged.add_argument("--folder", type=Path, required=True)
    judged.add_argument("--guidance", type=float, default=1.0)
    judged.add_argument("--count", type=int, default=len(EVAL_SET))
    arguments = parser.parse_args()
    if arguments.command == "widen":
        write_start(arguments.out, resolve_folder(Source(kind="bundled", location="wan21/weights/tiny")))
    elif arguments.command == "bundle":
        write_bundle(arguments.out, arguments.export)
    else:
        print(json.dumps(measure(arguments.folder, guidance=arguments.guidance, count=arguments.count)))


if __name__ == "__main__":
    main()
