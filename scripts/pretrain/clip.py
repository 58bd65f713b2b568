"""Trains the bundled tiny CLIP, a learned reward for ShapeWorld, into one transformers folder.

Knows its sizes, its tokenizer and how it learns; leaves measuring to ``clip_figures.py``. A picture is four frames of
a clip in a 2 x 2 grid, spread as the score loop spreads them, so that motion can be seen. The loss is CLIP's (arXiv
2103.00020) over batches of families: a scene and its edits, which differ in one word's meaning each, so every picture
and every caption has hard negatives in its own batch.

    PYTHONPATH=. python scripts/pretrain/clip.py      # into cards/reward/weights/tiny, ten minutes on one core

Legend: B pictures of a batch, S pixels of a picture's side, L tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import string
import time
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor, CLIPTokenizer

from loops.score import spread, tiled
from methods.shapeworld.heldout import is_held_out, training_caption, training_scene
from methods.shapeworld.render import render
from methods.shapeworld.scene import COLOURS, COUNTS, MOTIONS, RELATIONS, SHAPES, Scene, Thing, captions, sample_scene

FOLDER = Path("cards/reward/weights/tiny")
FRAMES, GRID, SIDE, TEXT_LENGTH = 4, 2, 64, 24
LARGEST_SCALE = math.log(100)
"""CLIP's bound of the logit scale."""
MEAN, STD = [0.5] * 3, [0.25] * 3
VISION = {"hidden_size": 96, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 6}
TEXT = {"hidden_size": 96, "intermediate_size": 384, "num_hidden_layers": 3, "num_attention_heads": 6}


# -- the parts


def build_tokenizer() -> CLIPTokenizer:
    """CLIP's byte pairs, learned until each of the world's words is one token; letters stand in for any other word."""
    rng = np.random.default_rng(0)
    sentences = [sentence for _ in range(2000) for sentence in captions(sample_scene(rng))]
    merges = byte_pairs({word for sentence in sentences for word in sentence.replace(",", " ").split()})
    letters = list(string.ascii_lowercase + string.digits + string.punctuation)
    pieces = ["<|startoftext|>", "<|endoftext|>", *letters, *(letter + "</w>" for letter in letters)]
    pieces += ["".join(pair) for pair in merges]
    return CLIPTokenizer(
        vocab={piece: i for i, piece in enumerate(dict.fromkeys(pieces))}, merges=merges, model_max_length=TEXT_LENGTH
    )


def byte_pairs(words: set[str]) -> list[tuple[str, str]]:
    """Merges (Sennrich et al. 2016, arXiv 1508.07909) until every word is whole, each word counted once, ties broken
    by the alphabet."""
    parts = {word: [*word[:-1], word[-1] + "</w>"] for word in sorted(words)}
    merges: list[tuple[str, str]] = []
    while counts := Counter(pair for pieces in parts.values() for pair in pairwise(pieces)):
        pair = min(counts, key=lambda pair: (-counts[pair], pair))
        merges.append(pair)
        for pieces in parts.values():
            for i in reversed(range(len(pieces) - 1)):
                if tuple(pieces[i : i + 2]) == pair:
                    pieces[i : i + 2] = ["".join(pair)]
    return merges


def build_image_processor() -> CLIPImageProcessor:
    """A picture as it is, scaled to the model's side where it has another."""
    side = {"height": SIDE, "width": SIDE}
    return CLIPImageProcessor(size=side, do_center_crop=False, image_mean=MEAN, image_std=STD)


def build_model(vocabulary: int) -> CLIPModel:
    """Two towers of width 96; a patch is a quarter of a frame's side."""
    config = CLIPConfig(
        text_config={
            **TEXT,
            "vocab_size": vocabulary,
            "max_position_embeddings": TEXT_LENGTH,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 1,
        },
        vision_config={**VISION, "image_size": SIDE, "patch_size": 8},
        projection_dim=64,
    )
    return CLIPModel(config)


# -- the data


def edits(scene: Scene) -> list[Scene]:
    """Every scene that differs in one attribute: a colour, a shape, the motion, the relation or the count."""
    found = []
    for i, thing in enumerate(scene.things):
        others = [Thing(colour, thing.shape) for colour in COLOURS] + [Thing(thing.colour, shape) for shape in SHAPES]
        for other in others:
            things = tuple(other if j == i else kept for j, kept in enumerate(scene.things))
            if other != thing and len({t.colour for t in things}) == len(things):
                found.append(replace(scene, things=things))
    if scene.motion is not None:
        found += [replace(scene, motion=motion) for motion in MOTIONS if motion != scene.motion]
    if scene.relation is not None:
        found += [replace(scene, relation=relation) for relation in RELATIONS if relation != scene.relation]
    if scene.count > 1:
        found += [replace(scene, count=count) for count in COUNTS if count != scene.count]
    return found


def attributes(scene: Scene, other: Scene) -> set[str]:
    """What two scenes of a family differ in."""
    pairs = list(zip(scene.things, other.things, strict=True))
    named = {
        "colour": any(a.colour != b.colour for a, b in pairs),
        "shape": any(a.shape != b.shape for a, b in pairs),
        "motion": scene.motion != other.motion,
        "position": scene.relation != other.relation,
        "count": scene.count != other.count,
    }
    return {name for name, differs in named.items() if differs}


def family(rng: np.random.Generator, size: int) -> list[Scene]:
    """A training scene and ``size - 1`` of its edits, one attribute after the other; none is held out."""
    while True:
        scene = training_scene(rng)
        kinds: dict[str, list[Scene]] = {}
        for other in edits(scene):
            if not is_held_out(other):
                kinds.setdefault(next(iter(attributes(scene, other))), []).append(other)
        chosen: list[Scene] = []
        names = list(rng.permutation(sorted(kinds)))
        while len(chosen) < size - 1 and any(kinds.values()):
            options = kinds[names[len(chosen) % len(names)]]
            chosen.append(options.pop(int(rng.integers(len(options)))))
        if len(chosen) == size - 1:
            return [scene, *chosen]


def picture(clip_FHWC: np.ndarray) -> Tensor:
    """(S, S, 3) uint8: what the score loop shows of a clip."""
    frames_FHWC = torch.from_numpy(clip_FHWC[spread(len(clip_FHWC), FRAMES)])
    return tiled(frames_FHWC, GRID)[0]


def normalised(pictures_BSSC: Tensor) -> Tensor:
    """(B, 3, S, S) float32, as the image processor makes it."""
    return ((pictures_BSSC.float() / 255 - MEAN[0]) / STD[0]).permute(0, 3, 1, 2)


def saying(asked: Scene, shown: Scene) -> bool:
    """Whether a caption of ``asked`` is, or may be, true of a picture of ``shown``."""
    if asked.kind != shown.kind or asked.count != shown.count:
        return False
    if None not in (asked.motion, shown.motion) and asked.motion != shown.motion:
        return False
    opposite = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
    turned = (shown.things[::-1], None if shown.relation is None else opposite[shown.relation])
    return (asked.things, asked.relation) in ((shown.things, shown.relation), turned)


# -- training


def contrastive_loss(logits_BB: Tensor, also_true_BB: Tensor) -> Tensor:
    """CLIP's symmetric cross-entropy; pairs that are true off the diagonal are no negatives."""
    logits_BB = logits_BB.masked_fill(also_true_BB, float("-inf"))
    labels_B = torch.arange(len(logits_BB))
    rows = nn.functional.cross_entropy(logits_BB, labels_B)
    return 0.5 * (rows + nn.functional.cross_entropy(logits_BB.T, labels_B))


def build_optimizers(model: CLIPModel, lr: float, muon_lr: float) -> list[torch.optim.Optimizer]:
    """Muon on the matrices of the blocks, in AdamW's units; AdamW on all else."""
    inside = [p for name, p in model.named_parameters() if ".layers." in name and p.ndim == 2]
    chosen = {id(p) for p in inside}
    others = [p for p in model.parameters() if id(p) not in chosen]
    return [
        torch.optim.Muon(inside, lr=muon_lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.98), weight_decay=0.01),
    ]


def save(folder: Path, model: CLIPModel, tokenizer: CLIPTokenizer) -> None:
    """fp16 on disk; the config says fp32, which is what transformers then loads it in."""
    model.half().save_pretrained(folder)
    CLIPProcessor(image_processor=build_image_processor(), tokenizer=tokenizer).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "float32"}, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=FOLDER)
    parser.add_argument("--steps", type=int, default=1100)
    parser.add_argument("--families", type=int, default=24, help="of a batch")
    parser.add_argument("--size", type=int, default=4, help="of a family")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--muon-lr", type=float, default=2e-3, help="in AdamW's units")
    parser.add_argument(
        "--noise", type=float, default=6.0, help="levels, standard deviation of what is added to pixels"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    tokenizer = build_tokenizer()
    model = build_model(len(tokenizer)).train()
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens", flush=True)
    optimizers = build_optimizers(model, args.lr, args.muon_lr)
    peaks = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    began, losses = time.time(), []
    for step in range(args.steps):
        share = step / args.steps
        rate = min(1.0, (step + 1) / 50) * (0.02 + 0.98 * 0.5 * (1.0 + math.cos(math.pi * share)))
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        for group, peak in zip(groups, peaks, strict=True):
            group["lr"] = peak * rate
        scenes = [scene for _ in range(args.families) for scene in family(rng, args.size)]
        said = [training_caption(rng, scene) for scene in scenes]
        shown_BSSC = torch.stack([picture(render(scene, rng)) for scene in scenes]).float()
        shown_BSSC += args.noise * torch.randn(shown_BSSC.shape)
        tokens = tokenizer(said, padding=True, return_tensors="pt")
        out = model(pixel_values=normalised(shown_BSSC), **tokens)
        also_true = [
            [i != j and saying(asked, shown) for j, asked in enumerate(scenes)] for i, shown in enumerate(scenes)
        ]
        loss = contrastive_loss(out.logits_per_image, torch.tensor(also_true))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            model.logit_scale.clamp_(max=LARGEST_SCALE)
        losses.append(loss.item())
        if (step + 1) % 50 == 0:
            hits = (out.logits_per_image.argmax(1) == torch.arange(len(scenes))).float().mean().item()
            print(
                f"{step + 1:5d} loss {np.mean(losses[-50:]):.3f} first {hits:.2f} scale "
                f"{model.logit_scale.exp().item():.1f} {time.time() - began:.0f} s",
                flush=True,
            )
    save(args.out, model.eval(), tokenizer)
    facts = {name: getattr(args, name) for name in ("steps", "families", "size", "lr", "muon_lr", "noise", "seed")}
    facts |= {"seconds": round(time.time() - began, 1), "loss": float(np.mean(losses[-50:]))}
    (args.out / "FIGURES.json").write_text(json.dumps({"training": facts}, indent=2) + "\n")


if __name__ == "__main__":
    main()
