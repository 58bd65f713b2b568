"""Evaluation of a run: fixed prompts and seeds through the serving loop, judged; and the validation loss of finetune.

The same numbers before and after, on the role that is exported; before a method that trains another sampler than the
base's, on what the method names as its baseline. Knows nothing of training steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from cards.card import ModelCard
from fastvideo_train.module import PostTrainingModule
from inference.artifact import Artifact
from inference.instance import ModelInstance
from inference.request import Request
from methods.finetune import Finetune
from methods.ladder import ladder_of
from methods.method import Baseline
from methods.rewards.reward import Reward, RewardBatch
from methods.rewards.watch import LEARNED
from methods.world import World

Listener = Callable[[str, int, int], None]


@dataclass(frozen=True)
class EvalItem:
    """One fixed request."""

    prompt: str
    seed: int
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class EvalSettings:
    """How a run is evaluated; None takes the card's value (guidance: the method's). A card with a ladder is always
    sampled on it: ``steps`` and ``solver`` are for the others."""

    items: tuple[EvalItem, ...]
    reward: Reward | None
    steps: int | None = None
    guidance: float | None = None
    solver: str | None = None
    samples: int = 16
    """Clips that are kept for the report."""
    learned: Reward | None = None
    """The learned reward that is trained on, scored beside the rule-based ``reward`` as ``learned_reward``."""


@dataclass(frozen=True)
class EvalResult:
    """Metrics over all ranks, and this rank's first clips with their verdicts."""

    metrics: dict[str, float]
    clips_FHWC: list[np.ndarray]
    items: list[EvalItem]
    verdicts: list[dict[str, Any]]
    fps: float


def eval_requests(items: Sequence[EvalItem], settings: EvalSettings, card: ModelCard) -> list[Request]:
    """Requests for a role that runs ``card``."""
    free = ladder_of(card) is None
    return [
        Request(
            prompt=item.prompt,
            seed=item.seed,
            steps=settings.steps if free else None,
            guidance=settings.guidance,
            solver=settings.solver if free else None,
        )
        for item in items
    ]


def evaluate(
    module: PostTrainingModule,
    settings: EvalSettings,
    val_batches: Sequence[Any],
    listener: Listener,
    *,
    baseline: Baseline | None = None,
) -> EvalResult:
    """Evaluates the module's best role, or a baseline instead. Call on every rank."""
    world, role = module.world(), module.best_role
    if baseline is not None:
        role = baseline.role
        settings = replace(settings, guidance=baseline.guidance)
    metrics: dict[str, float] = module.method.evaluation(module.context(), role)
    if isinstance(module.method, Finetune) and val_batches:
        metrics |= validation_metrics(module, module.method, val_batches, role)
    if not settings.items:
        return EvalResult(metrics, [], [], [], module.card.sampling.fps)
    padded, mine = _share(settings.items, world)
    instance = module.roles.instance(role)
    artifacts = _generate(module, eval_requests(padded, settings, instance.card), instance, listener)[: len(mine)]
    clips = [artifact.frames_FHWC() for artifact in artifacts]
    verdicts: list[dict[str, Any]] = [{} for _ in mine]
    columns = module.method.observed(artifacts, [item.metadata for item in mine])
    if settings.reward is not None:
        scores = settings.reward.score(
            RewardBatch(clips, [item.prompt for item in mine], [item.metadata for item in mine])
        )
        columns = {"reward": scores.values, **scores.parts, **columns}
    if settings.learned is not None:
        batch = RewardBatch(clips, [item.prompt for item in mine], [item.metadata for item in mine])
        columns["learned_reward"] = settings.learned.score(batch).parts[LEARNED]
    if columns:
        metrics |= _means(columns, len(padded), world)
        verdicts = [
            {name: None if np.isnan(values[i]) else float(values[i]) for name, values in columns.items()}
            for i in range(len(mine))
        ]
    keep = settings.samples
    return EvalResult(metrics, clips[:keep], list(mine[:keep]), verdicts[:keep], module.card.sampling.fps)


def _share(items: Sequence[EvalItem], world: World) -> tuple[list[EvalItem], list[EvalItem]]:
    """(what this rank generates, what of it counts): equal numbers on every rank, so that collectives match."""
    each = -(-len(items) // world.size)
    mine = list(items[world.rank * each : (world.rank + 1) * each])
    return mine + [items[0]] * (each - len(mine)), mine


def _generate(
    module: PostTrainingModule, requests: list[Request], instance: ModelInstance, listener: Listener
) -> list[Artifact]:
    """Through the run's own engine, in portions that bound the memory of decoded clips."""
    total = sum((r.steps if r.steps is not None else instance.card.sampling.steps) for r in requests)
    done = 0

    def on_step(label: str, step: int, steps: int) -> None:
        nonlocal done
        if label.startswith("denoise"):
            done += 1
            listener("evaluate", min(done, total), total)

    artifacts: list[Artifact] = []
    portion = 64
    for start in range(0, len(requests), portion):
        artifacts += module.engine.run_interleaved(requests[start : start + portion], instance, on_step)
    return artifacts


def _means(columns: dict[str, np.ndarray], rows: int, world: World) -> dict[str, float]:
    """Mean of each column over all ranks, NaN left out; rows that do not count are NaN."""
    table = np.full((rows, len(columns)), np.nan)
    for j, values in enumerate(columns.values()):
        table[: len(values), j] = values
    table = world.gather(table)
    known = np.isfinite(table)
    means = np.where(known, table, 0).sum(0) / np.maximum(known.sum(0), 1)
    return {name: float(means[j]) for j, name in enumerate(columns) if known[:, j].any()}


@torch.no_grad()
def validation_metrics(
    module: PostTrainingModule, method: Finetune, batches: Sequence[Any], role: str
) -> dict[str, float]:
    """Flow loss over all validation clips, each at noise and a sigma that are fixed by its row: ``val_loss``, and
    ``val_loss_q1`` (the quarter of the clips with the least noise) to ``val_loss_q4``."""
    context = module.context()
    losses: list[float] = []
    sigmas: list[float] = []
    for batch in batches:
        latents, prompts, index = batch["latents"], batch["prompt"], batch["index"].tolist()
        for start in range(0, len(prompts), method.micro_batch):
            part = slice(start, start + method.micro_batch)
            addresses: list[tuple[int | str, ...]] = [(0, "validation", row) for row in index[part]]
            losses_B = method.losses(
                latents[part].to(context.device),
                prompts[part],
                addresses,
                context,
                role=role,
                training=False,
                **method.given(batch, part),
            )
            losses += losses_B.tolist()
            sigmas += [method.sigma(address) for address in addresses]
    return {"val_loss": float(np.mean(losses)), **by_quantile("val_loss", losses, sigmas)}


def by_quantile(name: str, values: Sequence[float], sigmas: Sequence[float], parts: int = 4) -> dict[str, float]:
    """Mean of the values by rising sigma in ``parts`` groups that are equal or differ by one: ``<name>_q1`` ...; none
    where there are fewer values than groups."""
    if len(values) < parts:
        return {}
    groups = np.array_split(np.asarray(values)[np.argsort(sigmas, kind="stable")], parts)
    return {f"{name}_q{i}": float(group.mean()) for i, group in enumerate(groups, start=1)}
