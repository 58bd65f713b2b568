"""ShapeEval of a card on prompts that no training sees: ``python -m fastvideo_train.evaluate ckpt=... repeats=4``.

The engine that serves makes the clips, rules judge them: what a run's own evaluation does, on any export, with as many
seeds as wanted, on long clips piece by piece, or in sessions that are steered. Knows no training method.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import Field

from cards.errors import UserError
from fastvideo_train.cli import EXIT_OK, Int64, Options, check_place, parse_options, pick_device, run_program, usage

if TYPE_CHECKING:
    from cards.card import ModelCard
    from inference.engine import Engine
    from inference.instance import ModelInstance
    from inference.request import Request

REPEAT_SEED = 1000
"""Between the seeds of a prompt's repeats; the first has the seed of the evaluation set."""
MAX_ROWS = 32
PORTION = 64
"""Requests under way together: bounds the memory of decoded clips."""
Columns = dict[str, np.ndarray]
"""Marks by name, each (repeats, prompts), NaN where a prompt does not ask for it."""


class EvaluateOptions(Options):
    """Options left out take the card's defaults."""

    ckpt: str = Field("wan21", description="export, run folder, plain diffusers folder or card name")
    prompts: Literal["captions", "phrasings", "still", "actions"] = Field(
        "captions",
        description="the evaluation set, the same in words for a card that rewrites, captions of what stands still, "
        "or sessions under random actions (ActionEval)",
    )
    count: int = Field(128, ge=1, le=128, description="prompts, or with actions sessions of 8 acts, at most")
    repeats: int = Field(1, ge=1, le=100, description="seeds of each prompt")
    steps: Int64 | None = Field(None, description="solver steps")
    guidance: float | None = Field(None, description="classifier-free guidance, 1 = conditional only")
    solver: str | None = Field(None, description="unipc, euler or dpm2")
    frames: Int64 | None = Field(
        None, description="length in frames; of more than the card's every full piece is judged like a clip of its own"
    )
    out: str | None = Field(None, description="json file to write as well")
    device: str = Field("auto", description="auto, cpu, cuda, cuda:<index>")


@dataclass(frozen=True)
class Piece:
    """What was judged together."""

    name: str
    columns: Columns

    def summary(self) -> dict[str, dict[str, Any]]:
        """By name ``mean``, ``se`` (its standard error over prompts) and ``repeats`` (the mean of each)."""
        found = {}
        for name, marks_RP in self.columns.items():
            asked_RP = marks_RP[:, ~np.isnan(marks_RP).all(0)]
            if not asked_RP.size:
                continue
            prompts_P = np.nanmean(asked_RP, 0)
            count = len(prompts_P)
            found[name] = {
                "mean": float(prompts_P.mean()),
                "se": float(prompts_P.std(ddof=1) / count**0.5) if count > 1 else None,
                "repeats": [float(np.nanmean(row)) for row in asked_RP],
            }
        return found


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 2 after one message for a mistake in the command."""
    return run_program(_evaluate, _usage, argv)


def _usage() -> str:
    return usage(
        EvaluateOptions,
        "python -m fastvideo_train.evaluate",
        "Judge a card's clips of held-out ShapeWorld prompts.",
        "python -m fastvideo_train.evaluate ckpt=outputs/demo/export repeats=4",
    )


def _evaluate(argv: Sequence[str]) -> int:
    options = parse_options(EvaluateOptions, argv)
    out = None if options.out is None else check_place(options.out)

    from inference.engine import Engine  # loads torch: after the checks that need none
    from inference.load import card_of
    from inference.resolve import resolve

    card = card_of(options.ckpt)
    if options.prompts == "actions":
        _check_sessions(options, card)
    else:
        resolve(_request(options, "a red circle", 0), card)
    engine = Engine(pick_device(options.device), batching="shape", max_rows=MAX_ROWS)
    instance = engine.load(card)
    started = time.monotonic()
    judged = _sessions if options.prompts == "actions" else _clips
    pieces = judged(options, engine, instance)
    seconds = time.monotonic() - started
    report = {
        "ckpt": options.ckpt,
        "card": card.name,
        "digest": card.digest,
        **options.model_dump(exclude={"ckpt", "out", "device"}),
        "seconds": round(seconds, 1),
        "pieces": {piece.name: piece.summary() for piece in pieces},
    }
    if out is not None:
        from inference.media import write_bytes_atomic

        write_bytes_atomic(out, (json.dumps(report, indent=2) + "\n").encode())
    print(table(report))
    return EXIT_OK


def _request(options: EvaluateOptions, prompt: str, seed: int) -> Request:
    from inference.request import Request

    return Request(
        prompt=prompt,
        seed=seed,
        steps=options.steps,
        guidance=options.guidance,
        solver=options.solver,
        frames=options.frames,
    )


def _check_sessions(options: EvaluateOptions, card: ModelCard) -> None:
    """Raises ``UserError`` for what sessions cannot take, before weights load."""
    given = [name for name in ("steps", "guidance", "solver", "frames") if getattr(options, name) is not None]
    if given:
        raise UserError(f"{', '.join(given)}: a session has its card's own; leave out with prompts=actions")
    if not any(loop.options.get("actions") for loop in card.loops.values()):
        raise UserError(f"prompts: got actions, but {card.name} takes none; train one with experiment=steer")


def questions(kind: str, count: int) -> list[tuple[str, int, str]]:
    """(prompt, seed, the caption that it means) of the first ``count`` held-out prompts of a kind."""
    from methods.shapeworld.heldout import EVAL_SET
    from methods.shapeworld.phrasing import held_out_instructions

    if kind == "phrasings":
        said = held_out_instructions()
        return [(one.text, item.seed, one.meaning) for one, item in zip(said, EVAL_SET, strict=True)][:count]
    items = [item for item in EVAL_SET if kind == "captions" or "still" in item.prompt]
    return [(item.prompt, item.seed, item.prompt) for item in items[:count]]


def _clips(options: EvaluateOptions, engine: Engine, instance: ModelInstance) -> list[Piece]:
    """Of every repeat and prompt a clip, judged whole or in pieces of the card's length."""
    from fastvideo_train.callbacks.progress import Progress
    from methods.rewards.reward import RewardBatch
    from methods.rewards.shape_eval import CATEGORIES, ShapeEvalReward

    asked = questions(options.prompts, options.count)
    requests = [
        _request(options, prompt, seed + REPEAT_SEED * k) for k in range(options.repeats) for prompt, seed, _ in asked
    ]
    meanings = [meaning for _ in range(options.repeats) for _, _, meaning in asked]
    reward, length = ShapeEvalReward(), instance.card.sampling.frames
    rows: dict[str, dict[str, list[float]]] = {}
    with Progress().phase("evaluate", len(requests), unit="clip") as bar:

        def on_step(label: str, done: int, total: int) -> None:
            if done == total:
                bar.advance(1)

        for start in range(0, len(requests), PORTION):
            clips = [
                one.frames_FHWC()
                for one in engine.run_interleaved(requests[start : start + PORTION], instance, on_step)
            ]
            whole, captions = clips[0].shape[0], meanings[start : start + PORTION]
            for first in range(0, max(whole - length, 0) + 1, length):
                name = "whole" if whole <= length else f"frames {first} to {first + length - 1}"
                batch = RewardBatch([clip[first : first + length] for clip in clips], captions, [{} for _ in clips])
                marks = rows.setdefault(name, {part: [] for part in ("all_correct", "score", *CATEGORIES)})
                parts = reward.score(batch).parts
                for part, row in marks.items():
                    row += parts[part].tolist()
    shape = (options.repeats, len(asked))
    return [
        Piece(name, {part: np.array(row).reshape(shape) for part, row in marks.items()}) for name, marks in rows.items()
    ]


def _sessions(options: EvaluateOptions, engine: Engine, instance: ModelInstance) -> list[Piece]:
    """ActionEval; a repeat has other worlds and other actions."""
    from fastvideo_train.callbacks.progress import Progress
    from methods.shapeworld.steer import action_eval

    found: list[Mapping[str, float]] = []
    with Progress().phase("sessions", options.repeats, unit="repeat") as bar:
        for seed in range(options.repeats):
            found.append(action_eval(instance, worlds=options.count, seed=REPEAT_SEED * seed))
            bar.advance(1)
    columns = {name: np.array([[one[name]] for one in found]) for name in found[0]}
    return [Piece("sessions", columns)]


def table(report: Mapping[str, Any]) -> str:
    """The report as text: a row a piece, means with their standard errors."""
    names = list(dict.fromkeys(name for piece in report["pieces"].values() for name in piece))
    rows = [[name, *(_cell(piece.get(column)) for column in names)] for name, piece in report["pieces"].items()]
    lines = [["", *names], *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    text = "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
    repeats = [f"seeds {k}: " + " ".join(f"{n} {v:.3f}" for n, v in row) for k, row in enumerate(_repeats(report))]
    return "\n".join([f"{report['card']} ({report['ckpt']}), {report['seconds']} s", text, *repeats])


def _cell(one: Mapping[str, Any] | None) -> str:
    if one is None:
        return "-"
    return f"{one['mean']:.3f}" + ("" if one["se"] is None else f" ± {one['se']:.3f}")


def _repeats(report: Mapping[str, Any]) -> list[list[tuple[str, float]]]:
    """Of each repeat the first piece's headline, where there are several."""
    piece = next(iter(report["pieces"].values()))
    heads = [name for name in ("all_correct", "action_eval") if name in piece]
    if report["repeats"] == 1:
        return []
    return [[(name, piece[name]["repeats"][k]) for name in heads] for k in range(report["repeats"])]


if __name__ == "__main__":
    sys.exit(main())
