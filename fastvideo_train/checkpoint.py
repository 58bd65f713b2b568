"""Checkpoints: everything that a resumed run needs to equal the uninterrupted one, bit for bit.

One folder a checkpoint, ``checkpoints/step-000040``, written aside and renamed, then ``checkpoints/last`` is pointed at
it: a kill at any moment leaves the previous one whole. Weights are stored whole whatever the plan, so a run may resume
under another one. Randomness is addressed by step, so no generator state is stored.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from cards.card import ModelCard
from cards.errors import UserError
from cards.source import load_component, resolve_folder
from fastvideo_train.module import PostTrainingModule
from fastvideo_train.trained_weights import trained_module
from methods.method import OptimizerSpec
from methods.roles import LoRA, trainable_component

STATE_FILE = "state.pt"
META_FILE = "meta.json"
LAST = "last"
_OPTIONS = StateDictOptions(full_state_dict=True, cpu_offload=True)


class CheckpointError(UserError):
    """A checkpoint that is missing, broken or of another run."""


@dataclass(frozen=True)
class Meta:
    """What a checkpoint says of itself without loading it."""

    step: int
    """Training steps behind it."""
    optimizer_steps: int
    card_digest: str
    card_name: str
    method: str
    seed: int


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def gather_roles(module: PostTrainingModule) -> dict[str, dict[str, Any]]:
    """Whole state dict of each role's module and head, on CPU on rank 0. Call on every rank."""
    return {name: get_model_state_dict(part, options=_OPTIONS) for name, part in module.roles.stored().items()}


def weight_change(
    card: ModelCard,
    state: dict[str, Any] | None,
    role: str,
    lora: LoRA | None,
    joined: Mapping[str, dict[str, Any]] | None = None,
) -> dict[str, float]:
    """Trained component -> largest absolute change of a weight since the source; LoRA counts as merged. ``state`` None:
    the main one stayed. ``joined``: component -> state dict, of those that were trained beside it."""
    folder = resolve_folder(card.source, card.root)
    after = {}
    if state is not None:
        after[trainable_component(card)] = trained_module(card, folder, state, role, lora).state_dict()
    changes = {}
    for component, weights in {**after, **({} if joined is None else joined)}.items():
        before = load_component(card.components[component], folder).state_dict()
        changes[component] = max((weights[key].float() - before[key].float()).abs().max().item() for key in before)
    return changes


def state_of(module: PostTrainingModule, data: Mapping[str, Any]) -> dict[str, Any]:
    """The whole state, gathered on rank 0 (other ranks get what they need for the collectives)."""
    return {
        "roles": gather_roles(module),
        "optimizers": {
            role: get_optimizer_state_dict(module.roles, optimizer, options=_OPTIONS)
            for role, optimizer in module.role_optimizers().items()
        },
        "schedules": {role: schedule.state_dict() for role, schedule in module.role_schedules().items()},
        "method": module.method.state(),
        "data": dict(data),
    }


def save(folder: Path, module: PostTrainingModule, data: Mapping[str, Any], keep: int = 2) -> Path:
    """Writes ``folder/step-N`` and points ``folder/last`` at it. Call on every rank."""
    state = state_of(module, data)
    target = folder / f"step-{module.step_index:06d}"
    if rank() == 0:
        meta = Meta(
            step=module.step_index,
            optimizer_steps=module.optimizer_steps,
            card_digest=module.card.digest,
            card_name=module.card.name,
            method=module.method.name,
            seed=module.seed,
        )
        aside = folder / f".{target.name}.tmp"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        with (aside / STATE_FILE).open("wb") as stream:
            torch.save(state, stream)
            stream.flush()
            os.fsync(stream.fileno())
        (aside / META_FILE).write_text(json.dumps(asdict(meta), indent=2) + "\n")
        shutil.rmtree(target, ignore_errors=True)
        os.replace(aside, target)
        _point(folder / LAST, target.name)
        _prune(folder, module.step_index, keep)
    barrier()
    return target


def _point(link: Path, name: str) -> None:
    """Moves a relative symlink in one rename."""
    aside = link.with_name(f".{link.name}.tmp")
    aside.unlink(missing_ok=True)
    aside.symlink_to(name)
    os.replace(aside, link)


def _whole(folder: Path) -> dict[int, Path]:
    """Step -> whole checkpoint, oldest first."""
    found = {
        int(path.name.removeprefix("step-")): path
        for path in folder.glob("step-*")
        if (path / META_FILE).is_file() and (path / STATE_FILE).is_file()
    }
    return dict(sorted(found.items()))


def _prune(folder: Path, step: int, keep: int) -> None:
    """Leaves ``keep`` checkpoints up to ``step``; later ones are of a run that this one went back behind, not ours."""
    ours = [path for done, path in _whole(folder).items() if done <= step]
    for old in ours[: -max(1, keep)]:
        shutil.rmtree(old, ignore_errors=True)


def find_last(run_dir: Path) -> Path | None:
    """The whole checkpoint that was written last (where ``last`` points to none, the one of most steps), or None."""
    folder = run_dir / "checkpoints"
    whole = list(_whole(folder).values())
    pointed = (folder / LAST).resolve()
    return next((path for path in whole if path.resolve() == pointed), whole[-1] if whole else None)


def read_meta(checkpoint: Path) -> Meta:
    """Raises :class:`CheckpointError` for a folder that is not a whole checkpoint."""
    try:
        return Meta(**json.loads((checkpoint / META_FILE).read_text()))
    except (OSError, TypeError, json.JSONDecodeError) as error:
        raise CheckpointError(
            f"{checkpoint} is not a checkpoint ({error}); expected a folder such as outputs/<run>/checkpoints/last"
        ) from None


def check_meta(meta: Meta, *, card_digest: str, card_name: str, method: str, seed: int, where: Path) -> None:
    """Raises :class:`CheckpointError` when the checkpoint is of another card, method or seed."""
    wrong = [
        f"{what}: the checkpoint has {old}, this run has {new}"
        for what, old, new in (
            ("card", f"{meta.card_name} ({meta.card_digest[:12]})", f"{card_name} ({card_digest[:12]})"),
            ("method", meta.method, method),
            ("seed", str(meta.seed), str(seed)),
        )
        if old != new
    ]
    if wrong:
        raise CheckpointError(
            f"cannot resume from {where}: " + "; ".join(wrong) + ". Start a new run (run=<name>) or pass what it had"
        )


def load_state(checkpoint: Path) -> dict[str, Any]:
    """The stored state, on CPU."""
    try:
        return torch.load(checkpoint / STATE_FILE, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(f"{checkpoint / STATE_FILE} cannot be read: {error}") from None


def restore(state: dict[str, Any], meta: Meta, module: PostTrainingModule) -> None:
    """Puts a state back into a configured module, under whatever plan. Call on every rank.

    Rates, betas and weight decay are the run's own, not the checkpoint's: `resume=auto lr=1e-5` goes on at 1e-5.

    Raises :class:`CheckpointError` when its roles or their weights are others: other LoRA, EMA or reference settings.
    """
    _check_roles(state["roles"], module)
    options = StateDictOptions(full_state_dict=True, strict=True)
    for name, part in module.roles.stored().items():
        set_model_state_dict(part, state["roles"][name], options=options)
    for role, optimizer in module.role_optimizers().items():
        if state["optimizers"][role]["state"]:
            set_optimizer_state_dict(module.roles, optimizer, state["optimizers"][role], options=options)
    for role, schedule in module.role_schedules().items():
        schedule.load_state_dict(state["schedules"][role])
        _take_settings(schedule, module.optimizer_specs[role])
    module.method.restore(state["method"])
    module.step_index = meta.step
    module.optimizer_steps = meta.optimizer_steps
    for name in (*module.roles.names, *module.roles.apart):
        module.roles.changed(name)


def _take_settings(schedule: Any, spec: OptimizerSpec) -> None:
    """What the run asks of an optimizer, where it stands in its schedule."""
    groups = schedule.optimizer.param_groups
    schedule.base_lrs = [spec.lr] * len(groups)
    for group, factor in zip(groups, schedule.lr_lambdas, strict=True):
        group.update(
            initial_lr=spec.lr,
            lr=spec.lr * factor(schedule.last_epoch),
            betas=spec.betas,
            weight_decay=spec.weight_decay,
        )
    schedule._last_lr = [group["lr"] for group in groups]


def _check_roles(stored: Mapping[str, Mapping[str, Any]], module: PostTrainingModule) -> None:
    problems = []
    parts = module.roles.stored()
    if set(stored) != set(parts):
        ours = ", ".join(sorted(parts))
        problems.append(f"roles: the checkpoint has {', '.join(sorted(stored))}, this run has {ours}")
    for name in sorted(set(stored) & set(parts)):
        old = {key: tuple(value.shape) for key, value in stored[name].items()}
        new = {key: tuple(value.shape) for key, value in parts[name].state_dict().items()}
        other = sorted(key for key in {**old, **new} if old.get(key) != new.get(key))
        if other:
            problems.append(f"weights of {name}: {len(other)} differ in name or shape, e.g. {other[0]}")
    if problems:
        raise CheckpointError(
            "the checkpoint does not fit this run: " + "; ".join(problems) + ". Give the same rollout (async or not), "
            "method.lora, method.ema, method.kl and method.gan as the run that wrote it"
        )
