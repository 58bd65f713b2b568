"""Trains the bundled tiny Wan transformer and its text encoder together, by flow matching on ShapeWorld latents.

Knows the training recipe. Leaves the parts' sizes to ``tiny_wan.py``, the VAE to ``train_vae.py``, figures to
``figures.py``.

Captions are noisy on purpose, as alt text on the web is: in some of them one attribute is wrong. The base therefore
knows its prompts and is yet far from perfect without guidance, and later training has something to sharpen.

    python scripts/pretrain/train_base.py --vae build/pretrain/vae --out cards/wan21/weights/tiny
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKLWan
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, UMT5EncoderModel

from cards.wan21.padding import install
from methods.shapeworld.heldout import is_held_out, training_caption, training_scene
from methods.shapeworld.render import render
from methods.shapeworld.scene import COLOURS, COUNTS, MOTIONS, RELATIONS, SHAPES, Scene
from scripts.pretrain.figures import evaluate_pipeline
from scripts.pretrain.places import PlaceHead, place_labels
from scripts.pretrain.tiny_wan import (
    FLOW_SHIFT,
    build_text_encoder,
    build_tokenizer,
    build_transformer,
    latent_statistics,
    load_folder,
    save_folder,
)
from scripts.pretrain.train_vae import to_tensor

# Shapes: B batch, Z latent channels, T x H x W latent cells (3 x 8 x 8), L text tokens, D text width.

TEXT_TOKENS = 512  # WanPipeline pads every prompt's embedding with zeros to this length
TRAIN_TOKENS = 24  # longer than any caption by at least one
CAPTION_DROPOUT = 0.1


def embed(
    tokenizer: PreTrainedTokenizerBase, encoder: UMT5EncoderModel, texts: list[str], head: PlaceHead
) -> tuple[Tensor, Tensor]:
    """Prompt embeddings (B, TRAIN_TOKENS, D): each text at its real length, then zeros; and the head's loss on them."""
    tokens = tokenizer(texts, padding=True, return_tensors="pt")
    hidden = encoder(tokens.input_ids, tokens.attention_mask).last_hidden_state
    hidden = hidden * tokens.attention_mask[..., None]
    loss = head.loss(hidden, place_labels(tokenizer, texts, tokens.input_ids))
    return nn.functional.pad(hidden, (0, 0, 0, TRAIN_TOKENS - hidden.shape[1])), loss


def corrupt(scene: Scene, rng: np.random.Generator) -> Scene:
    """``scene`` with one attribute replaced by a wrong one; never a held-out combination."""
    choices = ["colour", "shape"]
    choices += ["motion"] if scene.motion is not None else []
    choices += ["relation"] if scene.relation is not None else []
    choices += ["count"] if scene.count > 1 else []
    while True:
        what = str(rng.choice(choices))
        if what in ("colour", "shape"):
            i = int(rng.integers(len(scene.things)))
            taken = {t.colour for t in scene.things} if what == "colour" else {scene.things[i].shape}
            wrong = _other(rng, COLOURS if what == "colour" else SHAPES, taken)
            things = list(scene.things)
            things[i] = dataclasses.replace(things[i], **{what: wrong})
            changed = dataclasses.replace(scene, things=tuple(things))
        elif what == "motion":
            changed = dataclasses.replace(scene, motion=_other(rng, MOTIONS, {scene.motion}))
        elif what == "relation":
            changed = dataclasses.replace(scene, relation=_other(rng, RELATIONS, {scene.relation}))
        else:
            count = int(rng.choice([n for n in COUNTS if n != scene.count]))
            changed = dataclasses.replace(scene, count=count)
        if not is_held_out(changed):
            return changed


def _other(rng: np.random.Generator, names: tuple[str, ...], taken: set[str | None]) -> str:
    return str(rng.choice([name for name in names if name not in taken]))


def draw_caption(scene: Scene, noise: float, rng: np.random.Generator) -> str:
    """A training caption: dropped now and then, wrong with probability ``noise``, else true."""
    if rng.random() < CAPTION_DROPOUT:
        return ""
    return training_caption(rng, corrupt(scene, rng) if rng.random() < noise else scene)


def row_weights(scenes: list[Scene], pairs: float | None) -> np.ndarray:
    """The chance (N,) of each scene to be drawn, so that a share ``pairs`` of all draws has two objects."""
    two = np.array([scene.relation is not None for scene in scenes])
    if pairs is None:
        return np.full(len(scenes), 1.0 / len(scenes))
    return np.where(two, pairs / two.sum(), (1.0 - pairs) / (~two).sum())


@torch.no_grad()
def encode_world(vae: AutoencoderKLWan, scenes: list[Scene], rng: np.random.Generator) -> Tensor:
    """Normalised latents (N, Z, T, H, W) of one clip a scene."""
    mean, std = latent_statistics(vae)
    parts = []
    began = time.time()
    for i in range(0, len(scenes), 64):
        clips = to_tensor(np.stack([render(scene, rng) for scene in scenes[i : i + 64]]))
        parts.append((vae.encode(clips).latent_dist.mode() - mean) / std)
        if i % 3200 == 0:
            print(f"encoded {i}/{len(scenes)} clips, {time.time() - began:.0f} s", flush=True)
    return torch.cat(parts)


def build_optimizers(model: nn.ModuleDict, lr: float, muon_lr: float) -> list[torch.optim.Optimizer]:
    """Muon on the matrices inside the transformer's blocks, scaled to AdamW's step size; AdamW on all else."""
    inside = [p for p in model["transformer"].blocks.parameters() if p.ndim == 2]
    chosen = {id(p) for p in inside}
    others = [p for p in model.parameters() if id(p) not in chosen]
    return [
        torch.optim.Muon(inside, lr=muon_lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.98), weight_decay=0.01),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vae", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cache", type=Path, help="file that keeps the encoded clips between runs")
    parser.add_argument("--clips", type=int, default=8000)
    parser.add_argument("--steps", type=int, default=7000)
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--lr", type=float, default=1.2e-3)
    parser.add_argument("--muon-lr", type=float, default=1.5e-3, help="in AdamW's units")
    parser.add_argument("--noise", type=float, default=0.15, help="share of captions with one wrong attribute")
    parser.add_argument("--places", type=float, default=0.1, help="weight of the text encoder's auxiliary task")
    parser.add_argument("--pairs", type=float, help="share of two-object scenes in a batch; default: as drawn")
    parser.add_argument("--save-every", type=int, default=1000)
    parser.add_argument("--compile", action="store_true", help="torch.compile, a third faster; needs a C++ compiler")
    parser.add_argument("--start", type=Path, help="pipeline folder whose weights to go on from")
    parser.add_argument("--record", type=Path, help="JSON file for what was run and how long it took")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    vae = AutoencoderKLWan.from_pretrained(args.vae)
    scenes = [training_scene(rng) for _ in range(args.clips)]
    recipe = {"seed": args.seed, "clips": args.clips}  # what the scenes, and so the captions, are drawn from
    if args.cache is not None and args.cache.exists():
        cached = torch.load(args.cache)
        if cached["recipe"] != recipe:
            raise SystemExit(f"{args.cache} holds clips of {cached['recipe']}, expected {recipe}; name another --cache")
        latents = cached["latents"]
    else:
        latents = encode_world(vae, scenes, rng)
        if args.cache is not None:
            torch.save({"recipe": recipe, "latents": latents}, args.cache)

    tokenizer = build_tokenizer()
    encoder, transformer = build_text_encoder(len(tokenizer)), build_transformer()
    if args.start is not None:
        started = load_folder(args.start)
        encoder, transformer = started.text_encoder.train(), started.transformer.train()
    install(transformer, TEXT_TOKENS)  # the text below is cut to TRAIN_TOKENS
    model = nn.ModuleDict({"text_encoder": encoder, "transformer": transformer})
    average = copy.deepcopy(model).requires_grad_(False)
    print(f"{sum(p.numel() for p in model.parameters())} parameters", flush=True)
    forward = torch.compile(transformer) if args.compile else transformer
    head = PlaceHead(encoder.config.d_model)
    optimizers = [
        *build_optimizers(model, args.lr, args.muon_lr),
        torch.optim.AdamW(head.parameters(), lr=args.lr, weight_decay=0.0),
    ]
    peaks = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]

    rng = np.random.default_rng(args.seed + 1)
    weights = row_weights(scenes, args.pairs)
    began, losses, place_losses = time.time(), [], []
    for step in range(args.steps):
        share = step / args.steps
        rate = min(1.0, (step + 1) / 200) * (0.02 + 0.98 * 0.5 * (1.0 + math.cos(math.pi * share)))
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        for group, peak in zip(groups, peaks, strict=True):
            group["lr"] = rate * peak
        rows = rng.choice(len(scenes), size=args.batch, p=weights)
        texts = [draw_caption(scenes[i], args.noise, rng) for i in rows]
        x0 = latents[rows]
        noise = torch.randn_like(x0)
        # Stratified over the batch: one uniform draw a cell, then the flow shift.
        uniform = (torch.randperm(args.batch) + torch.rand(args.batch)) / args.batch
        sigma = FLOW_SHIFT * uniform / (1.0 + (FLOW_SHIFT - 1.0) * uniform)
        s = sigma.view(-1, 1, 1, 1, 1)
        x_s, target = (1.0 - s) * x0 + s * noise, noise - x0
        text, place_loss = embed(tokenizer, encoder, texts, head)
        out = forward(x_s, 1000.0 * sigma, text, return_dict=False)[0]
        loss = (out - target).square().mean()
        model.zero_grad(set_to_none=True)
        head.zero_grad(set_to_none=True)
        (loss + args.places * place_loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        decay = min(0.998, (1.0 + step) / (10.0 + step))
        with torch.no_grad():
            for ours, theirs in zip(average.parameters(), model.parameters(), strict=True):
                ours.lerp_(theirs, 1.0 - decay)
        losses.append(float(loss.detach()))
        place_losses.append(float(place_loss.detach()))
        if step % 100 == 99:
            mean = sum(losses[-100:]) / 100
            places = sum(place_losses[-100:]) / 100
            seconds = time.time() - began
            print(f"base {step + 1}/{args.steps} loss {mean:.4f}, places {places:.4f}, {seconds:.0f} s", flush=True)
        if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
            final = copy.deepcopy(average)
            for block in final["transformer"].blocks:
                block.attn2.set_processor(WanAttnProcessor())
            save_folder(
                args.out,
                vae=copy.deepcopy(vae),
                tokenizer=tokenizer,
                text_encoder=final["text_encoder"],
                transformer=final["transformer"],
            )
            rates = evaluate_pipeline(load_folder(args.out), guidance=1.0, steps=20)
            print(f"base {step + 1} guidance 1:", {k: round(v, 3) for k, v in rates.items()}, flush=True)
    if args.record is not None:
        names = ("clips", "steps", "batch", "lr", "muon_lr", "noise", "pairs", "places", "seed")
        facts = {name: getattr(args, name) for name in names}
        facts |= {"seconds": time.time() - began, "loss": sum(losses[-100:]) / len(losses[-100:])}
        args.record.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
