"""Measures the bundled folder and writes FIGURES.json and README.md beside its weights.

Knows what is measured. Everything is measured on the reloaded folder by plain ``WanPipeline`` calls, so fp16-rounded
weights are what the figures are about.

    python scripts/pretrain/figures.py --folder cards/wan21/weights/tiny
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import WanPipeline

from methods.shapeworld.heldout import EVAL_SET, EvalItem
from methods.shapeworld.judge import CATEGORIES, Verdict, judge, summarise
from methods.shapeworld.render import render
from methods.shapeworld.scene import sample_scene
from scripts.pretrain.tiny_wan import load_folder

GUIDANCES = (1.0, 3.0, 5.0)
STEPS = 20


def sample(
    pipeline: WanPipeline, items: tuple[EvalItem, ...], *, guidance: float, steps: int, batch: int = 32
) -> list[np.ndarray]:
    """One uint8 clip (9, 32, 32, 3) for each item."""
    clips: list[np.ndarray] = []
    for i in range(0, len(items), batch):
        part = items[i : i + batch]
        out = pipeline(
            prompt=[item.prompt for item in part],
            generator=[torch.Generator().manual_seed(item.seed) for item in part],
            height=32,
            width=32,
            num_frames=9,
            guidance_scale=guidance,
            num_inference_steps=steps,
            output_type="np",
        ).frames
        clips += list(np.rint(np.asarray(out) * 255.0).astype(np.uint8))
    return clips


def verdicts_of(pipeline: WanPipeline, *, guidance: float, steps: int) -> list[Verdict]:
    """The judge's verdict on each item of the evaluation set."""
    clips = sample(pipeline, EVAL_SET, guidance=guidance, steps=steps)
    return [judge(clip, item.prompt) for clip, item in zip(clips, EVAL_SET, strict=True)]


def evaluate_pipeline(pipeline: WanPipeline, *, guidance: float, steps: int) -> dict[str, float]:
    """Rates on the evaluation set: all_correct over all, by kind, and on held-out and seen combinations."""
    verdicts = verdicts_of(pipeline, guidance=guidance, steps=steps)
    rates = summarise(verdicts)
    groups: dict[str, list[bool]] = {"single": [], "pair": [], "count_scenes": [], "held_out": [], "seen": []}
    for item, verdict in zip(EVAL_SET, verdicts, strict=True):
        groups["count_scenes" if item.kind == "count" else item.kind].append(verdict.all_correct)
        groups["held_out" if item.held_out else "seen"].append(verdict.all_correct)
    return rates | {f"all_correct_{name}": sum(marks) / len(marks) for name, marks in groups.items()}


@torch.no_grad()
def round_trip(pipeline: WanPipeline, count: int, seed: int) -> dict[str, float]:
    """PSNR (dB) of encode and decode on fresh clips and single frames, and the judge's rates on real and on decoded."""
    rng = np.random.default_rng(seed)
    scenes = [sample_scene(rng) for _ in range(count)]
    clips = np.stack([render(scene, rng) for scene in scenes])
    decoded = reconstruct(pipeline, clips)
    stills = reconstruct(pipeline, clips[:, :1])
    real = summarise([judge(clip, scene) for clip, scene in zip(clips, scenes, strict=True)])
    back = summarise([judge(clip, scene) for clip, scene in zip(decoded, scenes, strict=True)])
    return {
        "psnr_clips_db": _psnr(decoded, clips),
        "psnr_frames_db": _psnr(stills, clips[:, :1]),
        "real_all_correct": real["all_correct"],
        "round_trip_all_correct": back["all_correct"],
    } | {f"round_trip_{name}": rate for name, rate in back.items() if name != "all_correct"}


@torch.no_grad()
def reconstruct(pipeline: WanPipeline, clips_BTHWC: np.ndarray) -> np.ndarray:
    """uint8 clips encoded (mode) and decoded by the pipeline's VAE."""
    x = torch.from_numpy(clips_BTHWC).permute(0, 4, 1, 2, 3).float() / 127.5 - 1.0
    parts = [pipeline.vae.decode(pipeline.vae.encode(p).latent_dist.mode()).sample for p in x.split(50)]
    pixels = ((torch.cat(parts) + 1.0) * 127.5).round().clamp(0, 255).to(torch.uint8)
    return pixels.permute(0, 2, 3, 4, 1).numpy()


def _psnr(a: np.ndarray, b: np.ndarray) -> float:
    mse = float(np.mean((a.astype(np.float64) - b.astype(np.float64)) ** 2))
    return 10.0 * math.log10(255.0**2 / mse)


def measure(folder: Path) -> dict[str, Any]:
    """All figures of a bundled folder."""
    pipeline = load_folder(folder)
    figures: dict[str, Any] = {
        "command": f"python scripts/pretrain/figures.py --folder {folder}",
        "machine": f"{os.cpu_count()} cores {platform.machine()}, torch {torch.__version__} on CPU",
        "bytes": sum(f.stat().st_size for f in folder.rglob("*") if f.suffix in (".safetensors", ".json")),
        "parameters": {
            name: sum(p.numel() for p in getattr(pipeline, name).parameters())
            for name in ("transformer", "text_encoder", "vae")
        },
        "vae": round_trip(pipeline, 300, seed=7),
        "eval": {},
    }
    for guidance in GUIDANCES:
        began = time.time()
        rates = evaluate_pipeline(pipeline, guidance=guidance, steps=STEPS)
        figures["eval"][f"guidance_{guidance:g}"] = rates | {"seconds": time.time() - began}
    return figures


def readme(figures: dict[str, Any]) -> str:
    """The page beside the weights."""
    names = list(figures["eval"])
    rows = ["all_correct", "valid", "score", *CATEGORIES]
    rows += ["all_correct_single", "all_correct_pair", "all_correct_count_scenes"]
    rows += ["all_correct_seen", "all_correct_held_out"]
    table = [f"| | {' | '.join(name.replace('_', ' ') for name in names)} |", "|---" * (len(names) + 1) + "|"]
    for row in rows:
        cells = [f"{figures['eval'][name][row]:.3f}" for name in names]
        table.append(f"| {row.replace('_', ' ')} | {' | '.join(cells)} |")
    vae, sizes = figures["vae"], figures["parameters"]
    return "\n".join(
        [
            "# Tiny Wan2.1",
            "",
            "Wan2.1's own library classes at toy size, trained from nothing on ShapeWorld (coloured shapes that move,",
            "9 frames of 32x32 pixels) by the scripts in scripts/pretrain, whose README tells in which stages. Loads",
            'in plain `diffusers.WanPipeline.from_pretrained("cards/wan21/weights/tiny")`; sample with',
            "`height=32, width=32, num_frames=9`.",
            "",
            f"Transformer {sizes['transformer']:,}, text encoder {sizes['text_encoder']:,} and VAE {sizes['vae']:,}",
            f"parameters; {figures['bytes'] / 1e6:.1f} MB.",
            "",
            f"VAE: {vae['psnr_clips_db']:.1f} dB on clips, {vae['psnr_frames_db']:.1f} dB on single frames; the judge",
            f"finds {vae['round_trip_all_correct']:.3f} of 300 fresh clips all-correct after encode and decode,",
            f"{vae['real_all_correct']:.3f} before.",
            "",
            f"ShapeEval on the 128 fixed prompt/seed pairs, {STEPS} UniPC steps, flow shift 3:",
            "",
            *table,
            "",
            "Captions were noisy in training (one attribute wrong in some of them), so without guidance the base is",
            "far from perfect, as real bases are. The weights were measured as stored: reloaded from this folder.",
            f"Machine: {figures['machine']}. All figures: FIGURES.json.",
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--training", type=Path, nargs="*", default=[], help="JSON files of training facts to record")
    args = parser.parse_args()
    figures = measure(args.folder)
    figures["training"] = {path.stem: json.loads(path.read_text()) for path in args.training}
    (args.folder / "FIGURES.json").write_text(json.dumps(figures, indent=2) + "\n")
    (args.folder / "README.md").write_text(readme(figures))
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
