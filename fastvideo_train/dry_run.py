"""``dry_run=true``: checks a run's parts, prints what each rank will hold in memory, and stops.

Reads configs only: no weight loads, nothing is written, and a hub id is not fetched.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from cards.card import ModelCard
from cards.errors import UserError
from cards.source import check_source
from fastvideo_train.build import build_card, build_method, build_plan, build_rollouts, build_target
from fastvideo_train.memory_plan import Clip, MemoryPlan, plan_memory
from fastvideo_train.rollout_record import RecordPlan
from methods.method import Method
from methods.rewards.build import build_reward

if TYPE_CHECKING:
    from rich.table import Table


def dry_run(cfg: DictConfig) -> MemoryPlan:
    """The plan of a composed config; raises one ``UserError`` with all problems."""
    problems: list[str] = []

    def attempt(build: Callable[[], Any]) -> Any:
        try:
            return build()
        except UserError as error:
            problems.append(str(error))
            return None

    card = attempt(lambda: build_card(cfg.card))
    method = attempt(lambda: build_method(cfg.method))
    plan = attempt(lambda: build_plan(cfg.parallel))
    rollouts = attempt(lambda: build_rollouts(cfg.rollout))
    clip, encode_rows, judges = None, 0, None
    if card is not None and method is not None:
        problems += method.problems(card, cfg.devices)
        data = attempt(lambda: build_target(cfg.data, "data")) if method.needs_clips else None
        clip = attempt(lambda: _clip(card, data))
        encode_rows = 0 if data is None else data.encode_batch_size
        if card.source.kind != "hub":
            attempt(lambda: check_source(card))
    if method is not None and method.needs_reward:
        reward = attempt(lambda: build_reward(cfg.reward))
        judges = None if reward is None else attempt(reward.cards)
    if method is not None and rollouts is not None:
        problems += rollouts.problems(method)
    if card is not None and plan is not None:
        problems += plan.problems(card, cfg.devices)
    if problems or clip is None:
        raise UserError(problems[0] if len(problems) == 1 else "\n".join(f"- {problem}" for problem in problems))
    return plan_memory(
        card,
        method,
        plan,
        devices=cfg.devices,
        clip=clip,
        max_rows=cfg.max_rows,
        generates=_generates(cfg, card, method),
        encode_rows=encode_rows,
        rollouts=rollouts,
        rewards=judges,
    )


def _clip(card: ModelCard, data: Any) -> Clip:
    """What the run trains on: the data set's clips, or those that the card samples where there is none."""
    s = card.sampling
    clip = Clip(s.frames, s.height, s.width)
    if data is not None:
        clip = Clip(data.geometry.num_frames, data.geometry.height, data.geometry.width)
    card.geometry.check(clip.frames, clip.height, clip.width)
    return clip


def _generates(cfg: DictConfig, card: ModelCard, method: Method) -> bool:
    """Whether the run rolls out or is evaluated by generated clips."""
    kind = cfg.eval.prompts
    shapeworld = kind == "shapeworld" or (kind == "auto" and card.recipe.data == "ShapeWorld")
    return not method.needs_clips or shapeworld


def print_plan(plan: MemoryPlan) -> None:
    """A table for people, then one line of JSON."""
    from rich.console import Console

    console = Console(highlight=False)
    for table in _tables(plan):
        console.print(table)
    print(json.dumps(plan.to_json()))


def _tables(plan: MemoryPlan) -> list[Table]:
    held = _table(f"Each of {plan.devices} rank(s) holds: {plan.method} of {plan.card}, {plan.plan}", "part")
    for column in ("weights", "gradients", "optimizer"):
        held.add_column(column, justify="right")
    for row in plan.rows:
        held.add_row(row.name, *map(said, (row.weights, row.gradients, row.optimizer)))
    clip = plan.clip
    size = f"{clip.frames} frames of {clip.width}x{clip.height}"
    checkpointed = "with" if plan.activation_checkpointing else "without"
    comes = _table(f"and by turns, for clips of {size}", "while it")
    comes.add_column("bytes", justify="right")
    comes.add_row(
        f"trains on {plan.micro_batch} row(s), {checkpointed} activation checkpointing", said(plan.activations)
    )
    comes.add_row(f"generates {plan.max_rows} row(s) in one forward", said(plan.generation))
    if plan.encoding:
        comes.add_row("encodes the data set", said(plan.encoding))
    comes.add_row("steps an optimizer", said(plan.optimizer_step))
    if plan.gathered:
        comes.add_row("has blocks gathered, in training and generating", said(plan.gathered))
    comes.add_section()
    comes.add_row("holds throughout", said(plan.held))
    comes.add_row("peak", said(plan.peak))
    if plan.engine_process:
        comes.add_row(f"and the engine process of rollout={plan.rollouts}", said(plan.engine_process))
    return [held, comes, *([] if plan.record is None else [_record_table(plan.record)])]


def _record_table(record: RecordPlan) -> Table:
    table = _table(f"A sample of a rollout leaves ({record.samples} a step)", "field")
    table.add_column("bytes", justify="right")
    for name, size in record.fields.items():
        table.add_row(name, said(size))
    table.add_section()
    table.add_row("a sample", said(record.bytes_per_sample))
    for name, size in record.per_prompt.items():
        table.add_row(f"{name}, once for the samples of a prompt", said(size))
    table.add_row("a step", said(record.total))
    return table


def _table(title: str, first: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column(first)
    return table


def said(count: int) -> str:
    """``1.25 GiB``, ``3.1 MiB``, ``512 B``; nothing for 0."""
    if count == 0:
        return ""
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.3g} {units[0]}" if value < 100 else f"{value:.0f} {units[0]}"
