"""Measures the bundled tiny CLIP and writes FIGURES.json and README.md beside its weights.

Knows what is measured. Everything is measured on the reloaded folder, so fp16-rounded weights are what the figures are
about. Clips of the last part are drawn by the bundled tiny Wan2.1, as a policy in training draws them.

    PYTHONPATH=. python scripts/pretrain/clip_figures.py
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import pearsonr, rankdata, spearmanr
from torch import Tensor
from transformers import CLIPModel, CLIPProcessor

from cards.reward.components import image_features, text_features, tokenize
from inference.engine import Engine
from inference.request import Request
from methods.rewards.card_reward import CardReward
from methods.rewards.reward import RewardBatch
from methods.shapeworld.heldout import EVAL_SET, is_held_out, training_scene
from methods.shapeworld.judge import judge
from methods.shapeworld.render import render
from methods.shapeworld.scene import Scene, caption, sample_scene
from scripts.pretrain.clip import FOLDER, TEXT_LENGTH, attributes, edits, normalised, picture, saying

ATTRIBUTES = ("colour", "shape", "motion", "position", "count")
POOL = 64


class Scorer:
    """Cosines of pictures and captions by the folder's model."""

    def __init__(self, folder: Path):
        self.clip = CLIPModel.from_pretrained(folder).eval()
        self.processor = CLIPProcessor.from_pretrained(folder)

    @torch.no_grad()
    def pictures(self, clips: Sequence[np.ndarray]) -> Tensor:
        return image_features(self.clip, normalised(torch.stack([picture(clip) for clip in clips])))

    @torch.no_grad()
    def captions(self, said: Sequence[str]) -> Tensor:
        tokens = tokenize(self.processor, list(said), TEXT_LENGTH)
        return text_features(self.clip, tokens["ids"], tokens["mask"])


def scenes_of(rng: np.random.Generator, count: int, *, held_out: bool) -> list[Scene]:
    """Fresh scenes of which no caption of one is true of another within a pool."""
    found: list[Scene] = []
    while len(found) < count:
        scene = sample_scene(rng) if held_out else training_scene(rng)
        pool = found[len(found) - len(found) % POOL :]
        fresh = not any(saying(scene, other) or saying(other, scene) for other in pool)
        if fresh and is_held_out(scene) == held_out:
            found.append(scene)
    return found


def retrieval(scorer: Scorer, rng: np.random.Generator, *, pools: int, held_out: bool) -> dict[str, float]:
    """Share of right first choices among a pool of captions, and of pictures."""
    scenes = scenes_of(rng, pools * POOL, held_out=held_out)
    images_ND = scorer.pictures([render(scene, rng) for scene in scenes])
    texts_ND = scorer.captions([caption(scene, rng) for scene in scenes])
    right = torch.arange(POOL)
    hits: dict[str, list[float]] = {"caption_of_picture": [], "picture_of_caption": []}
    for images, texts in zip(images_ND.split(POOL), texts_ND.split(POOL), strict=True):
        similar = images @ texts.T
        hits["caption_of_picture"].append((similar.argmax(1) == right).float().mean().item())
        hits["picture_of_caption"].append((similar.argmax(0) == right).float().mean().item())
    return {name: float(np.mean(values)) for name, values in hits.items()}


def edited(scorer: Scorer, rng: np.random.Generator, *, count: int, held_out: bool) -> dict[str, float]:
    """Share of (picture, wrong caption) whose right caption scores higher, by what the wrong one gets wrong; and of
    pictures whose right caption is above ALL of its edits."""
    wins: dict[str, list[bool]] = {name: [] for name in ATTRIBUTES}
    above_all = []
    for scene in scenes_of(rng, count, held_out=held_out):
        wrong = [other for other in edits(scene) if not saying(other, scene)]
        said = caption(scene, rng)
        texts_ND = scorer.captions([said, *(caption(other, rng) for other in wrong)])
        similar = (texts_ND @ scorer.pictures([render(scene, rng)])[0]).tolist()
        for other, value in zip(wrong, similar[1:], strict=True):
            wins[next(iter(attributes(scene, other)))].append(similar[0] > value)
        above_all.append(similar[0] > max(similar[1:]))
    return {
        **{name: float(np.mean(marks)) for name, marks in wins.items()},
        "above_all_edits": float(np.mean(above_all)),
    }


def agreement(folder: Path) -> dict[str, Any]:
    """With ShapeEval on clips of the bundled Wan, no guidance, 10 Euler steps: correlations of the reward with the
    graded score, and how often an all-correct clip scores above one that is not (AUC); over all prompts."""
    engine = Engine(batching="shape")
    wan = engine.load("wan21")
    clips = []
    for start in range(0, len(EVAL_SET), 32):
        part = EVAL_SET[start : start + 32]
        requests = [Request(item.prompt, seed=item.seed, steps=10, solver="euler", guidance=1.0) for item in part]
        clips += [artifact.frames_FHWC() for artifact in engine.run_interleaved(requests, wan)]
    prompts = [item.prompt for item in EVAL_SET]
    reward = CardReward(card={"name": "reward", "size": "tiny", "source": str(folder)})
    reward.use_engine(engine)
    scores = reward.score(RewardBatch(clips, prompts, [{} for _ in prompts])).values
    verdicts = [judge(clip, prompt) for clip, prompt in zip(clips, prompts, strict=True)]
    graded = np.array([verdict.score for verdict in verdicts])
    correct = np.array([verdict.all_correct for verdict in verdicts])
    ranks, positives = rankdata(scores), int(correct.sum())
    negatives = len(scores) - positives
    auc = (ranks[correct].sum() - positives * (positives + 1) / 2) / (positives * negatives)
    return {
        "clips": len(scores),
        "all_correct": float(correct.mean()),
        "pearson_score": float(pearsonr(scores, graded).statistic),
        "spearman_score": float(spearmanr(scores, graded).statistic),
        "auc_all_correct": float(auc),
        "mean_all_correct": float(scores[correct].mean()),
        "mean_others": float(scores[~correct].mean()),
    }


def write_readme(folder: Path, figures: dict[str, Any], parameters: int) -> None:
    """What the figures say, for people."""
    rows = [("retrieval: caption of a picture", "retrieval", "caption_of_picture")]
    rows += [("retrieval: picture of a caption", "retrieval", "picture_of_caption")]
    rows += [(f"right above wrong {name}", "edited", name) for name in ATTRIBUTES]
    rows += [("right above all its edits", "edited", "above_all_edits")]
    table = "\n".join(
        f"| {label} | {figures[part]['seen'][name]:.3f} | {figures[part]['held_out'][name]:.3f} |"
        for label, part, name in rows
    )
    size = sum(path.stat().st_size for path in folder.iterdir()) / 1e6
    with_wan = figures["shape_eval"]
    training = figures["training"]
    folder.joinpath("README.md").write_text(
        f"""# Tiny CLIP of ShapeWorld

transformers' `CLIPModel` with its processor at toy size, {parameters:,} parameters, {size:.1f} MB, trained from
nothing on ShapeWorld pictures and captions by scripts/pretrain/clip.py: a learned reward that a policy can also fool.

A picture is four frames of a clip in a 2 x 2 grid in reading order, frames 1, 3, 5 and 7 of nine: motion is seen as a
shift from cell to cell, and only as far as four frames show it. The card (`card=reward`, size tiny) makes such pictures
itself; with plain `transformers` tile the frames first.

Fresh clips, scenes of combinations that training saw and of those it did not; pools of {POOL} for retrieval (chance
{1 / POOL:.3f}), pairs for the rest (chance .5):

| | seen | held out |
|---|---|---|
{table}

As a reward, on the {with_wan["clips"]} evaluation prompts drawn by the bundled Wan2.1 (10 Euler steps, no guidance,
all-correct {with_wan["all_correct"]:.3f}): correlation with ShapeEval's graded score {with_wan["pearson_score"]:.3f}
(Spearman {with_wan["spearman_score"]:.3f}); an all-correct clip is above one that is not with probability
{with_wan["auc_all_correct"]:.3f}.

{training["steps"]} steps of {training["families"] * training["size"]} pictures; seeds fixed. The weights were measured
as stored, in fp16. All figures: FIGURES.json.
"""
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--pools", type=int, default=4)
    parser.add_argument("--scenes", type=int, default=200)
    args = parser.parse_args()

    path = args.folder / "FIGURES.json"
    figures = json.loads(path.read_text())
    scorer, began = Scorer(args.folder), time.time()
    for part in ("retrieval", "edited"):
        figures[part] = {}
    for name, held_out in (("seen", False), ("held_out", True)):
        rng = np.random.default_rng(10 + held_out)
        figures["retrieval"][name] = retrieval(scorer, rng, pools=args.pools, held_out=held_out)
        figures["edited"][name] = edited(scorer, rng, count=args.scenes, held_out=held_out)
    figures["shape_eval"] = agreement(args.folder)
    figures["machine"] = f"{os.cpu_count()} cores {platform.machine()}, torch {torch.__version__}"
    figures["measuring_seconds"] = round(time.time() - began, 1)
    path.write_text(json.dumps(figures, indent=2) + "\n")
    write_readme(args.folder, figures, sum(p.numel() for p in scorer.clip.parameters()))
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
