"""Self forcing (arXiv 2506.08009) and the init before it: whose samples, which gradient, how many forwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cards.errors import UserError
from cards.prediction import add_noise, velocity_to_x0
from cards.wan21.card import card_from_folder as wan_card
from cards.wan_causal.card import causal_card
from fastvideo_train.data.prompts import Prompt
from inference.engine import Engine
from inference.instance import ModelInstance
from inference.request import Request
from loops.loop import ModelCall
from methods.causal import rollout_spec
from methods.causal_init import CausalInit, over_frames, teacher_forced_velocity
from methods.distribution_matching import sid_loss
from methods.ladder import exit_rung
from methods.random import address_seed
from methods.roles import CRITIC, STUDENT, TEACHER
from methods.self_forcing import SelfForcing, clip_shape

WORDS = ("a red circle", "the blue square moves left", "a green triangle")


@pytest.fixture(scope="module")
def causal(wan_folder: Path, training: Any) -> Any:
    """Parts of a run on the causal card of the tiny random Wan; its frozen teacher is the bidirectional one."""
    parts = type(training)(wan_folder)
    base = wan_card(wan_folder)
    short = base.sampling.model_copy(update={"max_sequence_length": 12, "frames": 9, "height": 16, "width": 16})
    parts.card = causal_card(base.model_copy(update={"sampling": short}))
    return parts


def context(causal: Any, method: Any) -> Any:
    teacher = wan_card(causal.folder)
    teacher = teacher.model_copy(update={"sampling": causal.card.sampling.model_copy(update={"steps": 4})})
    others = {TEACHER: ModelInstance.from_folder(teacher, causal.folder)} if TEACHER in method.roles() else None
    return causal.context(method, others=others)


def self_forcing(causal: Any, **options: Any) -> SelfForcing:
    settings: dict[str, Any] = {
        "teacher": {"name": "wan21", "size": "tiny", "source": str(causal.folder)},
        "lr": 1e-2,
        "critic_lr": 1e-2,
        "steps": 5,
        "batch_size": 3,
        "micro_batch": 2,
        "ttur": 2,
        "weight_decay": 0.0,
    }
    return SelfForcing(**(settings | options))


def prompts(count: int = 3) -> list[Prompt]:
    return [Prompt(WORDS[i % 3]) for i in range(count)]


def gradients(ctx: Any, role: str) -> list[Tensor | None]:
    return [p.grad for p in ctx.roles.trained(role)]


def move(ctx: Any, role: str, seed: int = 7) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in ctx.roles.parameters_of(role).values():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    ctx.roles.changed(role)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, bool]]:
    """(operation, chunk, with gradient) of every forward of a causal network from here on."""
    calls: list[tuple[str, int, bool]] = []
    real = ModelInstance.call

    def call(self: ModelInstance, call: ModelCall, *args: Any) -> Tensor:
        out = real(self, call, *args)
        if call.method == "velocity_chunk":
            calls.append((call.method, call.static["index"], out.requires_grad))
        return out

    monkeypatch.setattr(ModelInstance, "call", call)
    return calls


# -- rollouts


def test_an_iteration_makes_the_forwards_of_its_exit_and_one_with_gradient_a_chunk(
    causal: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = self_forcing(causal, batch_size=2)
    ctx = context(causal, method)
    calls = counted(monkeypatch)
    seen = set()
    for step in (0, 2, 4, 6):
        calls.clear()
        list(method.updates(prompts(2), step, ctx))
        exit_at = exit_rung(4, 0, step)
        seen.add(exit_at)
        chunks = clip_shape(causal.card)[1]
        with_gradient = [chunk for _, chunk, gradient in calls if gradient]
        assert with_gradient == list(range(chunks)), "one a chunk, in the student's rollout alone"
        assert len(calls) == 2 * chunks * (exit_at + 2)  # the student's rollout and the critic's
    assert len(seen) > 1


def test_a_rollout_that_exits_last_is_what_the_card_serves(causal: Any) -> None:
    method = self_forcing(causal, batch_size=1)
    ctx = context(causal, method)
    rows = method._rows(prompts(1), ctx)
    x0 = method._samples("student", rows, slice(0, 1), 0, 3, ctx, gradient=True)
    seed = address_seed(0, "self_forcing", "student", 0, 0)
    served = Engine().run(Request(prompt=WORDS[0], seed=seed, output="latents"), ctx.roles.instance(STUDENT))
    assert torch.equal(x0[0].detach(), served.latents)


def test_a_long_rollout_carries_gradient_and_is_judged_in_its_last_clip_alone(
    causal: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = self_forcing(causal, rollout_frames=5, batch_size=1)
    assert method.problems(causal.card, 1) == []
    ctx = context(causal, method)
    calls = counted(monkeypatch)
    rows = method._rows(prompts(1), ctx)
    x0 = method._samples("student", rows, slice(0, 1), 0, 1, ctx, gradient=True)
    assert x0.shape[2] == 3
    assert [chunk for _, chunk, gradient in calls if gradient] == [2, 3, 4]
    assert {chunk for _, chunk, _ in calls} == {0, 1, 2, 3, 4}


# -- gradients


@pytest.mark.parametrize("loss", ["dmd", "sid"])
def test_each_update_reaches_its_own_role_alone(causal: Any, loss: str) -> None:
    method = self_forcing(causal, loss=loss)
    ctx = context(causal, method)
    move(ctx, CRITIC)
    for update in method.updates(prompts(), 0, ctx):
        if update.loss is None:
            continue
        for role in (STUDENT, CRITIC):
            for parameter in ctx.roles.trained(role):
                parameter.grad = None
        update.loss.backward()
        own, other = (STUDENT, CRITIC) if update.optimizer == STUDENT else (CRITIC, STUDENT)
        assert any(g is not None and g.any() for g in gradients(ctx, own))
        assert not any(g is not None and g.any() for g in gradients(ctx, other))
        assert all(p.grad is None for p in ctx.roles[TEACHER].parameters())


def test_the_student_is_trained_in_every_kth_iteration(causal: Any) -> None:
    method = self_forcing(causal, steps=5, ttur=2, batch_size=1)
    ctx = context(causal, method)
    whose = [u.optimizer for step in range(5) for u in method.updates(prompts(1), step, ctx) if u.loss is not None]
    assert whose.count(STUDENT) == 3 == method.optimizer_steps()
    assert whose.count(CRITIC) == 5


def test_sid_is_told_by_hand_and_vanishes_where_the_scores_agree() -> None:
    generator = torch.Generator().manual_seed(0)
    x, fake, real = (torch.randn(2, 3, 1, 2, 2, generator=generator, dtype=torch.float64) for _ in range(3))
    for row in range(2):
        f, r, own = (t[row] for t in (fake, real, x))
        expected = ((r - f) * ((r - own) - 0.7 * (r - f))).mean() / (own - r).abs().mean()
        assert sid_loss(x, fake, real, alpha=0.7)[row] == pytest.approx(expected.item(), rel=1e-12)
    assert not sid_loss(x, real, real).any()
    leaf = fake.clone().requires_grad_(True)
    sid_loss(x, leaf, real).sum().backward()
    size = (x - real).abs().mean(dim=(1, 2, 3, 4), keepdim=True)
    by_hand = (-(real - x) + 2 * (real - fake)) / size / x[0].numel()
    torch.testing.assert_close(leaf.grad, by_hand)


# -- causal_init


def causal_init(causal: Any, **options: Any) -> CausalInit:
    settings: dict[str, Any] = {
        "lr": 1e-2,
        "steps": 2,
        "batch_size": 3,
        "micro_batch": 2,
        "teacher": {"name": "wan21", "size": "tiny", "source": str(causal.folder)},
        "caption_dropout": 0.0,
        "text_padding": "folded",
        "teacher_steps": 8,
    }
    return CausalInit(**(settings | options))


def test_a_noisy_chunk_depends_on_itself_and_on_the_clean_chunks_before_it(causal: Any) -> None:
    ctx = context(causal, causal_init(causal, way="teacher_forcing"))
    shape = (1, *clip_shape(causal.card))
    generator = torch.Generator().manual_seed(1)
    noisy, clean = (torch.randn(shape, generator=generator).requires_grad_(True) for _ in range(2))
    text = torch.cat(ctx.engine.encode(WORDS[:1], ctx.roles.instance(STUDENT)))
    sigma_BJ = torch.tensor([[0.9, 0.5, 0.2]])
    velocity = teacher_forced_velocity(ctx.roles.instance(STUDENT), noisy, clean, sigma_BJ, text, gradient=True)
    for j in range(3):
        by_noisy, by_clean = torch.autograd.grad(velocity[:, :, j].square().sum(), (noisy, clean), retain_graph=True)
        assert [bool(by_noisy[:, :, i].any()) for i in range(3)] == [i == j for i in range(3)]
        assert [bool(by_clean[:, :, i].any()) for i in range(3)] == [i < j for i in range(3)]


def test_teacher_forcing_is_the_flow_loss_chunk_by_chunk(causal: Any) -> None:
    """Told again: the same draws, the velocity of each chunk against e - x0."""
    from cards.prediction import velocity_target
    from loops.flow import sample_sigmas
    from methods.random import generator_at, noise_like

    method = causal_init(causal, way="teacher_forcing", shift=2.0)
    ctx = context(causal, method)
    x0 = torch.randn(2, *clip_shape(causal.card), generator=torch.Generator().manual_seed(2))
    addresses = [(0, "train", 3, row) for row in range(2)]
    losses_B = method.losses(x0, WORDS[:2], addresses, ctx)
    student = ctx.roles.instance(STUDENT)
    for row in range(2):
        sigma_BJ = sample_sigmas("uniform", 3, 2.0, generator_at(*addresses[row], "sigma"))[None]
        noise = noise_like(x0[row], *addresses[row], "noise")[None]
        own = x0[row : row + 1]
        x_s = add_noise(own, noise, over_frames(sigma_BJ, own))
        text = torch.cat(ctx.engine.encode([WORDS[row]], student))
        velocity = teacher_forced_velocity(student, x_s, own, sigma_BJ, text, gradient=False)
        expected = (velocity - velocity_target(own, noise)).square().mean()
        assert losses_B[row].item() == pytest.approx(expected.item(), rel=1e-5)


def test_ode_points_lie_on_the_teachers_trajectory_at_the_rungs(causal: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all chunks are at one rung, the input is the teacher's own latents there, and the target its sample."""
    import methods.causal_init as module

    method = causal_init(causal, way="ode", batch_size=2, micro_batch=2, reuse=1)
    ctx = context(causal, method)
    seen: list[tuple[Tensor, Tensor, Tensor]] = []
    real = module.teacher_forced_velocity

    def watched(instance: Any, noisy: Tensor, clean: Tensor, sigma: Tensor, text: Tensor, **options: Any) -> Tensor:
        seen.append((noisy.detach(), clean, sigma))
        return real(instance, noisy, clean, sigma, text, **options)

    monkeypatch.setattr(module, "teacher_forced_velocity", watched)
    (update,) = [u for u in method.updates(prompts(2), 0, ctx) if u.loss is not None]
    assert update.loss is not None and update.loss.requires_grad
    ((noisy, clean, sigma_BJ),) = seen
    ladder = rollout_spec(causal.card).schedule.ladder
    assert ladder is not None
    points, sigmas, samples = method._trajectories(WORDS[:2], range(2), 0, ctx)
    assert torch.equal(clean, samples)
    assert (sigmas[:1] - 1).abs().max() < 1e-6
    for row in range(2):
        for j in range(3):
            step = int((sigmas - sigma_BJ[row, j]).abs().argmin())
            assert torch.equal(noisy[row, :, j], points[row, step, :, j])
            assert min(abs(sigma_BJ[row, j].item() - rung) for rung in ladder) < 0.1
    # The last visited point and one Euler step give the sample: the trajectory is the sampler's own.
    assert torch.allclose(velocity_to_x0(points[:, -1], (points[:, -1] - samples) / sigmas[-1], sigmas[-1]), samples)


def test_the_initialisation_may_bring_the_ladder_that_self_forcing_walks(causal: Any) -> None:
    ladder = {"rungs": [1000, 600, 300], "ladder_shift": 1.0}
    derived = causal_init(causal, way="ode", **ladder).derive_card(causal.card)
    assert rollout_spec(derived).schedule.ladder == pytest.approx((1.0, 0.6, 0.3))
    assert derived.sampling.steps == 3
    assert derived == self_forcing(causal, **ladder).derive_card(causal.card)
    sigmas_S = torch.tensor([1.0, 0.9, 0.62, 0.5, 0.31, 0.1])
    assert causal_init(causal)._visited(sigmas_S, derived).tolist() == [0, 2, 4]
    assert causal_init(causal, way="ode").derive_card(causal.card) == causal.card
    with pytest.raises(UserError, match="rungs"):
        causal_init(causal, rungs=[])


# -- what it may start from


def test_bad_input_is_refused_before_weights_load(causal: Any, wan_folder: Path) -> None:
    assert self_forcing(causal).problems(causal.card, 1) == []
    (problem,) = self_forcing(causal).problems(wan_card(wan_folder), 1)
    assert "expected a causal card" in problem
    (problem,) = self_forcing(causal, rollout_frames=2).problems(causal.card, 1)
    assert "rollout_frames: got 2" in problem and "from 3" in problem
    with pytest.raises(UserError, match="loss"):
        self_forcing(causal, loss="wgan")
    with pytest.raises(UserError, match="teacher"):
        causal_init(causal, way="ode", teacher=None)
    with pytest.raises(UserError, match="way"):
        causal_init(causal, way="diffusion")
    with pytest.raises(UserError, match="unknown key"):
        self_forcing(causal, teacher={"name": "wan21", "size": "tiny", "folder": "x"})
    assert self_forcing(causal).derive_card(causal.card).loops["denoise"].schedule.ladder == pytest.approx(
        (1.0, 0.9375, 5 * 0.5 / 3, 0.625)
    )
