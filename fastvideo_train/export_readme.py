"""The README of an export: where it comes from, how to sample it here and by plain diffusers, its metrics and clips."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from cards.card import ModelCard
from inference.media import write_video
from inference.plain_request import plain_task
from inference.resolve import CHUNK_LOOP
from methods.ladder import denoising_loop

Samples = Sequence[tuple[str, np.ndarray]]
"""(prompt, frames FHWC)."""


def write_readme(folder: Path, card: ModelCard, samples: Samples) -> None:
    """Model card for people, with sample clips as GIFs."""
    name = folder.name.removeprefix(".").removesuffix(".tmp")
    lines = [
        f"# {card.name}",
        "",
        f"Made by `{card.recipe.method}` from the card `{card.recipe.parents[0][:12]}`. Digest `{card.digest}`.",
        "",
        *_commands(name, card),
        "",
        *(_session_lines(name, card) if is_causal(card) else _pipeline_lines(name, folder, card)),
        "",
        _sampler(card),
        *_refiner_lines(name, card),
        "",
        *_metric_table(card.recipe.metrics),
    ]
    if samples:
        (folder / "samples").mkdir()
        lines += ["| prompt | sample |", "|---|---|"]
        for i, (prompt, frames) in enumerate(samples):
            name = f"samples/{i:02d}.gif"
            write_video(folder / name, np.repeat(np.repeat(frames, 4, axis=1), 4, axis=2), card.sampling.fps)
            lines.append(f"| {prompt} | ![]({name}) |")
    (folder / "README.md").write_text("\n".join(lines) + "\n")


def is_causal(card: ModelCard) -> bool:
    """Whether it rolls out chunk by chunk, which plain diffusers cannot."""
    return card.loops[denoising_loop(card)].kind == CHUNK_LOOP


def _commands(name: str, card: ModelCard) -> list[str]:
    image = "image=first.png " if card.programs[plain_task(card)].inputs else ""
    return [
        f'    python -m fastvideo_train.generate ckpt={name} prompt="a red circle moves left" {image}seed=1 out=x.mp4',
        f"    python -m fastvideo_train.serve ckpt={name} port=8000",
    ]


def _sampler(card: ModelCard) -> str:
    """By which sampler, in words."""
    spec = card.loops[denoising_loop(card)]
    convention = f"guidance {spec.guidance.scale} ({spec.guidance.convention} convention)"
    ladder = spec.schedule.ladder
    if ladder is None:
        return f"Sampler: {spec.solver}, shift {spec.schedule.shift}, {card.sampling.steps} steps, {convention}."
    return (
        f"Sampler: {spec.solver} on the ladder of sigmas {[round(sigma, 4) for sigma in ladder]}, which is final (no "
        f"shift), {convention}. Serving the card refuses another number of steps and another solver."
    )


def _metric_table(metrics: Mapping[str, float]) -> list[str]:
    """A row a metric, before and after side by side, what has another name below."""
    names = dict.fromkeys(key.partition("_")[2] for key in sorted(metrics) if key.startswith(("before_", "after_")))
    sides = [f"| {n} | {_number(metrics, f'before_{n}')} | {_number(metrics, f'after_{n}')} |" for n in names]
    others = [key for key in sorted(metrics) if not key.startswith(("before_", "after_"))]
    lines = ["| metric | before | after |", "|---|---|---|", *sides, ""] if sides else []
    if others:
        lines += ["| metric | value |", "|---|---|", *(f"| {n} | {_number(metrics, n)} |" for n in others), ""]
    return lines


def _number(metrics: Mapping[str, float], name: str) -> str:
    return f"{metrics[name]:.4g}" if name in metrics else ""


def _session_lines(name: str, card: ModelCard) -> list[str]:
    """A world of a causal card that goes on, and why plain diffusers is no way to sample it."""
    actions = card.loops[denoising_loop(card)].options.get("actions")
    act = "act()" if not isinstance(actions, list) else f"act({str(actions[-1])!r})"
    lines = [
        "Plain diffusers has no pipeline for it: `WanPipeline` loads the weights, but lets every frame see all the",
        "others, which they were not trained for. The frames of a request stream chunk by chunk.",
    ]
    if card.loops[denoising_loop(card)].options.get("window") is None:
        return lines
    return [
        *lines,
        "A world that goes on:",
        "",
        "```python",
        "from inference.engine import Engine",
        "from inference.session import WorldModelSession",
        "",
        "engine = Engine()",
        f'world = WorldModelSession(engine, engine.load("{name}"), "a red circle", seed=1)',
        f"handle = world.{act}",
        "while engine.tick():",
        "    pass",
        "video = handle.result().frames_FHWC()",
        "```",
    ]


def _refiner_lines(name: str, card: ModelCard) -> list[str]:
    """What plain diffusers leaves out of a card that rewrites prompts."""
    nodes = [n for n in card.programs[plain_task(card)].nodes if n.writes == "prompt" and n.loop is not None]
    folders = [card.components[card.loops[n.loop].components["lm"]].subfolder for n in nodes if n.loop is not None]
    if not folders:
        return []
    said = ", ".join(f"`{folder}/`" for folder in folders)
    return [
        "",
        f"That samples from a prompt as it is. The card has it rewritten first, by the language model in {said}:",
        f'`python -m fastvideo_train.generate ckpt={name} prompt="a crimson ball drifting west"`.',
    ]


def _pipeline_lines(name: str, folder: Path, card: ModelCard) -> list[str]:
    """How plain diffusers samples the folder."""
    s, spec = card.sampling, card.loops[denoising_loop(card)]
    ladder = spec.schedule.ladder
    call = [
        f'video = pipe("a red circle moves left", height={s.height}, width={s.width}, num_frames={s.frames},',
        f"             num_inference_steps={s.steps}, guidance_scale={spec.guidance.scale},",
    ]
    pipeline = json.loads((folder / "model_index.json").read_text())["_class_name"]
    if card.programs[plain_task(card)].inputs:
        call.insert(1, '             image=load_image("first.png"),')
    load = f'pipe = {pipeline}.from_pretrained("{name}", dtype=torch.float32)'
    if ladder is None:
        return [
            "```python",
            "import torch",
            f"from diffusers import {pipeline}",
            *(["from diffusers.utils import load_image"] if len(call) > 2 else []),
            "",
            load,
            *call,
            '             generator=torch.Generator("cpu").manual_seed(1)).frames[0]',
            "```",
        ]
    return [
        "```python",
        "from functools import partial",
        "",
        "import torch",
        "from diffusers import WanPipeline",
        "",
        load,
        "# The pipeline gives its scheduler neither sigmas nor a generator: without the ladder it samples a grid that",
        "# the weights were not made for, without the generator no seed repeats.",
        'generator = torch.Generator("cpu").manual_seed(1)',
        f"pipe.scheduler.set_timesteps = partial(pipe.scheduler.set_timesteps, sigmas={list(ladder)})",
        "pipe.scheduler.step = partial(pipe.scheduler.step, generator=generator)",
        *call,
        "             generator=generator).frames[0]",
        "```",
    ]
