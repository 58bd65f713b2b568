"""Log-probs of a rollout's steps, evaluated anew: the engine's own, and with a gradient that is the right one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from inference.engine import Engine
from inference.instance import ModelInstance
from inference.request import Request
from loops.loop import SDE
from loops.sde import SDE_KINDS
from methods.method import Update
from methods.ppo import policy_loss
from methods.sde_policy import PathLoss, Paths, evaluate_steps, log_prob_gate, log_probs, path_updates, roll_out_paths
from methods.world import World
from tests.support.tiny_i2v import picture, write_i2v_folder

PROMPTS = ("a red circle", "the blue square moves left", "a green triangle")
REQUEST = Request(prompt="", steps=5, guidance=1.0, solver="euler", output="latents", sde=SDE())
N, K = 6, 5


def requests(**changes: Any) -> list[Request]:
    return [replace(REQUEST, prompt=PROMPTS[n // 2], seed=n, **changes) for n in range(N)]


def trainable(folder: Path) -> ModelInstance:
    loaded = Engine().load(folder)
    loaded.module("transformer").requires_grad_(True)
    return loaded


@pytest.fixture(scope="module")
def instance(wan_folder: Path) -> ModelInstance:
    return trainable(wan_folder)


@pytest.fixture
def student(wan_folder: Path) -> ModelInstance:
    """One of our own, to be moved."""
    return trainable(wan_folder)


def paths_of(instance: ModelInstance, *, batching: Any = "shape", max_rows: int = 32, **changes: Any) -> Paths:
    return roll_out_paths(Engine(batching=batching, max_rows=max_rows), instance, requests(**changes))[1]


def all_pairs(samples: int = N, steps: int = K) -> list[tuple[int, int]]:
    return [(n, k) for k in range(steps) for n in range(samples)]


# -- C2


GUIDED = {"guidance": 3.0, "negative_prompt": "green"}
CASES: list[dict[str, Any]] = [
    *({"sde": SDE(kind, 0.7)} for kind in SDE_KINDS),
    {"sde": SDE(window=(1, 4))},
    GUIDED,
    {**GUIDED, "guidance_policy": "batched"},
]


@pytest.mark.parametrize("changes", CASES)
def test_with_the_engines_batch_the_ratio_is_one_to_the_bit(instance: ModelInstance, changes: dict[str, Any]) -> None:
    """All samples' forwards of a step are one forward of the engine, and the same one here, with and without grad."""
    paths = paths_of(instance, **changes)
    for k in range(paths.steps):
        pairs = [(n, k) for n in range(N)]
        rolled_out = paths.rolled_out(pairs)
        for gradient in (False, True):
            again = log_probs(instance, paths, pairs, gradient=gradient)
            assert again.requires_grad is gradient and again.dtype == torch.float32
            assert torch.equal(torch.exp(again.detach() - rolled_out), torch.ones(N))
            assert torch.equal(again.detach(), rolled_out)


@pytest.mark.parametrize("changes", CASES)
@pytest.mark.parametrize("rows", [1, 4, 7, 64])
def test_with_other_batches_it_is_within_1e_6(instance: ModelInstance, changes: dict[str, Any], rows: int) -> None:
    paths = paths_of(instance, max_rows=3, **changes)
    pairs = all_pairs(steps=paths.steps)
    again = torch.cat(
        [log_probs(instance, paths, pairs[i : i + rows], gradient=False) for i in range(0, len(pairs), rows)]
    )
    difference = (again - paths.rolled_out(pairs)).abs().max().item()
    print(f"{changes}, {rows} rows: {difference:.1e}")
    assert difference <= 1e-6


def test_the_gate_passes_and_sees_a_forward_that_differs(instance: ModelInstance) -> None:
    for changes, steps in zip(CASES, (5, 5, 5, 3, 5, 5), strict=True):
        report = log_prob_gate(instance, requests(**changes)[0])
        assert report.passed and report.difference == 0.0 and report.what.startswith(f"{steps} log-probs")

    class Off:
        """Gives another velocity under gradient than without."""

        def __init__(self, inner: ModelInstance):
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def call(self, call: Any, profile: Any) -> Tensor:
            return self.inner.call(call, profile) * (1.001 if profile == "train" else 1.0)

    off = Off(instance)
    assert not log_prob_gate(off, requests()[0]).passed  # type: ignore[arg-type]


def test_a_card_with_a_first_frame_is_evaluated_with_it(tmp_path: Path) -> None:
    instance = trainable(write_i2v_folder(tmp_path / "i2v"))
    asked = [
        replace(
            REQUEST,
            task=next(iter(instance.card.programs)),
            prompt="a red circle",
            seed=n,
            inputs={"image": picture(16, 16, n)},
            frames=5,
            height=16,
            width=16,
        )
        for n in range(3)
    ]
    for guidance in (1.0, 2.0):
        _, paths = roll_out_paths(Engine(batching="shape"), instance, [replace(r, guidance=guidance) for r in asked])
        pairs = all_pairs(3)
        again = log_probs(instance, paths, pairs, gradient=True)
        assert again.requires_grad
        assert (again.detach() - paths.rolled_out(pairs)).abs().max() <= 1e-6
        assert log_prob_gate(instance, replace(asked[0], guidance=guidance)).difference == 0.0
        # It matters: another's first frame gives other log-probs.
        swapped = replace(paths, conditions=paths.conditions[::-1])
        assert (log_probs(instance, swapped, pairs, gradient=False) - paths.rolled_out(pairs)).abs().max() > 1e-4


# -- gradients


def test_the_gradient_is_that_of_the_log_prob(student: ModelInstance) -> None:
    """Central differences in one direction of the weights."""
    paths = paths_of(student)
    pairs = [(0, 0), (3, 2), (5, 4)]
    parameters = list(student.module("transformer").parameters())
    gradients = torch.autograd.grad(
        log_probs(student, paths, pairs, gradient=True).sum(), parameters, allow_unused=True, materialize_grads=True
    )
    norm = torch.sqrt(sum((g**2).sum() for g in gradients))  # type: ignore[arg-type]
    direction = [g / norm for g in gradients]

    def at(distance: float) -> float:
        with torch.no_grad():
            for p, d in zip(parameters, direction, strict=True):
                p.add_(distance * d)
            value = log_probs(student, paths, pairs, gradient=False).double().sum().item()
            for p, d in zip(parameters, direction, strict=True):
                p.sub_(distance * d)
        return value

    h = 2e-2
    assert (at(h) - at(-h)) / (2 * h) == pytest.approx(norm.item(), rel=2e-2)


# -- updates


def move(instance: ModelInstance, scale: float = 0.02, seed: int = 7) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in instance.module("transformer").parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))


ADVANTAGES = np.array([1.0, -1.0, 0.5, -0.5, 9.0, -9.0])


def updates(
    student: ModelInstance,
    paths: Paths,
    *,
    keep: Sequence[bool] = (True,) * N,
    world: World | None = None,
    reference: ModelInstance | None = None,
    off_policy: bool = False,
    **settings: Any,
) -> Iterator[Update]:
    return path_updates(
        paths,
        ADVANTAGES,
        keep,
        PathLoss(**{"clip_range": 1e-3, "micro_batch": 4, **settings}),
        student=student,
        reference=reference,
        world=World() if world is None else world,
        address=(0, 0),
        off_policy=off_policy,
    )


def gradients(student: ModelInstance, made: Iterator[Update]) -> tuple[list[Tensor], list[Update]]:
    """Gradients of all losses together, without any step."""
    module = student.module("transformer")
    module.zero_grad()
    kept = []
    for update in made:
        if update.loss is not None:
            update.loss.backward()
        kept.append(update)
    found = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    return found, kept


def close(a: list[Tensor], b: list[Tensor]) -> None:
    scale = max(t.abs().max().item() for t in b)
    assert scale > 0
    for ours, theirs in zip(a, b, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-6 * max(1.0, scale))


def policy_gradient(student: ModelInstance, paths: Paths, samples: Sequence[int]) -> list[Tensor]:
    """Of -mean A log-prob over the pairs of some samples, one forward a step."""
    module = student.module("transformer")
    module.zero_grad()
    a = torch.from_numpy(ADVANTAGES).float().clamp(-5, 5)
    for k in range(paths.steps):
        pairs = [(n, k) for n in samples]
        value = -(a[list(samples)] * log_probs(student, paths, pairs, gradient=True)).sum()
        (value / (len(samples) * paths.steps)).backward()
    found = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    return found


@pytest.mark.parametrize("micro_batch", [1, 4, 64])
def test_at_the_rollout_weights_the_gradient_is_minus_a_grad_log_prob(student: ModelInstance, micro_batch: int) -> None:
    """Advantages beyond 5 are clamped; ratios are 1 to the bit, so that the loss is -mean A."""
    paths = paths_of(student)
    found, made = gradients(student, updates(student, paths, micro_batch=micro_batch))
    close(found, policy_gradient(student, paths, range(N)))
    assert [update.step for update in made[:-1]] == [False] * (len(made) - 2) + [True]
    metrics = totals(made)
    assert metrics["train/loss"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["train/ratio_deviation_max"] == metrics["train/clip_fraction"] == metrics["train/approx_kl"] == 0.0
    assert metrics["parity/log_prob"] <= 1e-6


def totals(made: Sequence[Update]) -> dict[str, float]:
    found: dict[str, float] = {}
    for update in made:
        for name, value in update.metrics.items():
            found[name] = found.get(name, 0.0) + value
    return found


def test_the_log_probs_of_later_updates_are_those_of_the_rollout_weights_to_the_bit(student: ModelInstance) -> None:
    """Nothing moves between the updates here: every ratio is 1, from a forward without gradient and one with."""
    paths = paths_of(student)
    _, made = gradients(student, updates(student, paths, updates=5))
    assert totals(made)["train/ratio_deviation_max"] == 0.0
    assert sum(update.step for update in made) == 5


def test_later_updates_are_clipped_against_the_weights_that_rolled_out(student: ModelInstance) -> None:
    paths = paths_of(student)
    made = updates(student, paths, updates=5, micro_batch=N, clip_range=1e-5)
    first = next(made)
    assert first.step and first.loss is not None
    move(student)
    second = next(made)
    settings = PathLoss(clip_range=1e-5, updates=5)
    ((k,),) = [settings.steps(K, 0, 0)[1]]
    pairs = [(n, k) for n in range(N)]
    now = log_probs(student, paths, pairs, gradient=False)
    a = torch.from_numpy(ADVANTAGES).float().clamp(-5, 5)
    expected = policy_loss(now, paths.rolled_out(pairs), a, clip_range=1e-5).mean()
    assert second.loss is not None
    assert second.loss.item() == pytest.approx(expected.item(), abs=1e-5)
    assert second.metrics["train/clip_fraction"] == pytest.approx(1 / 5)  # all rows of one update in five


def test_rollouts_of_other_weights_are_corrected_for_by_their_own_log_probs(student: ModelInstance) -> None:
    paths = paths_of(student)
    move(student, 1e-3)
    _, made = gradients(student, updates(student, paths, off_policy=True, micro_batch=64))
    pairs = [(n, k) for k in range(K) for n in range(N)]
    log_rho = log_probs(student, paths, pairs, gradient=False) - paths.rolled_out(pairs)
    assert log_rho.abs().max() > 1e-5
    assert totals(made)["train/ratio_deviation_max"] == pytest.approx(log_rho.exp().sub(1).abs().max().item(), rel=1e-2)


def test_samples_that_are_left_out_have_no_part_in_it(student: ModelInstance) -> None:
    paths = paths_of(student)
    keep = (False, True, True, False, True, False)
    found, made = gradients(student, updates(student, paths, keep=keep))
    close(found, policy_gradient(student, paths, [1, 2, 4]))
    assert totals(made)["train/loss"] == pytest.approx(-(-1.0 + 0.5 + 5.0) / 3, rel=1e-5)
    assert list(updates(student, paths, keep=(False,) * N)) == []


def test_the_kl_term_is_exact_and_has_a_gradient(student: ModelInstance, instance: ModelInstance) -> None:
    """beta |mu - mu_ref|^2 / (2 var), averaged over dims and pairs; nothing else is left at zero advantage."""
    paths = paths_of(student)
    move(student, 0.01)
    with_kl, made = gradients(student, updates(student, paths, kl=0.3, reference=instance))
    without, _ = gradients(student, updates(student, paths))
    module = student.module("transformer")
    values = []
    for k in range(K):
        pairs = [(n, k) for n in range(N)]
        ours, _ = evaluate_steps(student, paths, pairs, gradient=True)
        theirs, _ = evaluate_steps(instance, paths, pairs, gradient=False)
        square = (ours.mean - theirs.mean).double().square().flatten(1).mean(1)
        value = (square / (2 * ours.std_B.double() ** 2)).sum()
        values.append(value.item())
        (0.3 * value / (N * K)).backward()
    expected = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in module.parameters()]
    close([a - b for a, b in zip(with_kl, without, strict=True)], expected)
    assert totals(made)["train/kl"] == pytest.approx(sum(values) / (N * K), rel=1e-4)


# -- several processes


class Rank(World):
    """One of two ranks, with what the other has to tell."""

    def __new__(cls, *_: Any) -> Rank:
        return super().__new__(cls)

    def __init__(self, other_kept: int):
        super().__init__(0, 2)
        object.__setattr__(self, "other_kept", other_kept)

    def gather(self, values: np.ndarray) -> np.ndarray:
        other = np.array([self.other_kept]) if values.ndim == 1 else values  # type: ignore[attr-defined]
        return np.concatenate([values, other])


def test_ranks_with_unequal_samples_make_equally_many_forwards_and_the_mean_over_all(student: ModelInstance) -> None:
    """The mean over ranks of the gradients is that of one process with the samples of both."""
    paths = paths_of(student)
    few, many = (True, False, False, False, False, False), (False, True, True, True, True, True)
    ours, a = gradients(student, updates(student, paths, keep=few, world=Rank(5)))
    theirs, b = gradients(student, updates(student, paths, keep=many, world=Rank(1)))
    assert len(a) == len(b)
    assert [update.step for update in a] == [update.step for update in b]
    close([(x + y) / 2 for x, y in zip(ours, theirs, strict=True)], policy_gradient(student, paths, range(N)))
    _, c = gradients(student, updates(student, paths, keep=(False,) * N, world=Rank(5)))
    assert len(c) == len(b)


# -- which steps


def test_each_update_has_its_own_steps_of_those_that_are_trained_on() -> None:
    settings = PathLoss(clip_range=1e-3, updates=2, timesteps=6)
    drawn = [settings.steps(10, 0, step) for step in range(20)]
    for first, second in drawn:
        assert len(first) == len(second) == 3 and not set(first) & set(second)
        assert first == sorted(first) and set(first + second) <= set(range(10))
    assert {k for updates in drawn for steps in updates for k in steps} == set(range(10))
    assert drawn[0] == settings.steps(10, 0, 0)
    assert PathLoss(clip_range=1e-3).steps(4, 0, 0) == [[0, 1, 2, 3]]
