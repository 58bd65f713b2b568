"""The one place where a run's parts are checked against each other, before any weight loads and before any output.

Everything that is wrong is reported at once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from cards.card import ModelCard
from cards.errors import UserError
from cards.source import check_source
from fastvideo_train.build import (
    build_card,
    build_method,
    build_method_reward,
    build_plan,
    build_rollouts,
    build_target,
    card_for,
    in_numerics_of,
)
from fastvideo_train.parallel.plan import Plan
from fastvideo_train.rollouts import InProcessRollouts, RolloutSettings
from fastvideo_train.rundir import check_free
from inference.plain_request import plain_task
from methods.method import Method, MethodWarning
from methods.rewards.reward import Reward

EVAL_PROMPTS = ("auto", "shapeworld", "source", "none")


@dataclass(frozen=True)
class Parts:
    """The checked parts of a run."""

    card: ModelCard
    """What is trained, evaluated and exported."""
    base: ModelCard
    """What the run starts from, as it was named: the parent of what is exported."""
    method: Method
    plan: Plan
    reward: Reward | None
    data: Any
    """Data module of encoded clips, for methods that need clips."""
    prompts: Any
    """Prompt source, for methods that need prompts."""
    others: dict[str, ModelCard] = field(default_factory=dict)
    """Roles that are cards of their own."""
    rollouts: RolloutSettings = field(default_factory=InProcessRollouts)
    """How rollouts are executed."""


def checkpoint_to_resume(run_dir: Path, resume: Any) -> Path | None:
    """The checkpoint that ``resume=`` means: ``auto`` the newest whole one of the run, else a path."""
    from fastvideo_train.checkpoint import find_last, read_meta

    if resume in (None, False, "false", ""):
        return None
    if resume == "auto":
        return find_last(run_dir)
    checkpoint = Path(str(resume)).expanduser()
    read_meta(checkpoint)
    return checkpoint


def check_run(cfg: DictConfig, run_dir: Path) -> Parts:
    """Builds the parts and raises one ``UserError`` with all problems. Loads no weights, writes no output."""
    problems: list[str] = []

    def attempt(build: Callable[[], Any]) -> Any:
        try:
            return build()
        except UserError as error:
            problems.append(str(error))
            return None

    attempt(lambda: check_free(run_dir, resume=cfg.resume not in (None, False), overwrite=cfg.overwrite))
    base = attempt(lambda: build_card(cfg.card))
    method = attempt(lambda: build_method(cfg.method))
    card, others = base, None
    if base is not None and method is not None:
        card = attempt(lambda: card_for(base, method))
        others = attempt(lambda: method.role_cards(in_numerics_of(base, method)))
    plan = attempt(lambda: build_plan(cfg.parallel))
    rollouts = attempt(lambda: build_rollouts(cfg.rollout))
    if card is not None and cfg.eval.prompts == "shapeworld" and card.programs[plain_task(card)].inputs:
        problems.append(f"eval.prompts: got shapeworld, but card {card.name!r} needs a first frame; use none")
    if cfg.eval.prompts not in EVAL_PROMPTS:
        problems.append(f"eval.prompts: got {cfg.eval.prompts!r}, expected one of {', '.join(EVAL_PROMPTS)}")
    reward = data = prompts = None
    if method is not None:
        reward = attempt(lambda: build_method_reward(method, cfg.reward))
        if method.needs_clips:
            data = attempt(lambda: build_target(cfg.data, "data"))
        else:
            prompts = attempt(lambda: build_target(cfg.prompts, "prompts"))
    if plan is not None and base is not None:
        problems += plan.problems(base, cfg.devices)
    if method is not None and base is not None:
        problems += method.problems(base, cfg.devices)
    if method is not None and reward is not None:
        problems += method.reward_problems(reward)
    if method is not None and rollouts is not None:
        problems += rollouts.problems(method)
    if method is not None and card is not None:
        attempt(lambda: _check_resume(cfg, run_dir, card, method))
    for loaded in (base, *({} if others is None else others).values()):
        if loaded is not None:
            attempt(partial(check_source, loaded))
    if base is not None and data is not None:
        geometry = base.geometry
        attempt(lambda: data.check(temporal_factor=geometry.temporal, spatial_factor=geometry.spatial))
    if problems:
        raise UserError(problems[0] if len(problems) == 1 else "\n".join(f"- {problem}" for problem in problems))
    for caution in () if base is None or method is None else method.cautions(base):
        warnings.warn(caution, MethodWarning, stacklevel=2)
    roles = others if others is not None else {}
    return Parts(card, base, method, plan, reward, data, prompts, roles, rollouts)


def _check_resume(cfg: DictConfig, run_dir: Path, card: ModelCard, method: Method) -> None:
    from fastvideo_train.checkpoint import check_meta, read_meta

    checkpoint = checkpoint_to_resume(run_dir, cfg.resume)
    if checkpoint is not None:
        check_meta(
            read_meta(checkpoint),
            card_digest=card.digest,
            card_name=card.name,
            method=method.name,
            seed=cfg.seed,
            where=checkpoint,
        )
