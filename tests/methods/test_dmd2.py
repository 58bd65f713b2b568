"""DMD2 (arXiv 2405.14867): who gets which gradient, how often, on which samples; and what a teacher may be."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cards.card import CARD_FILE, CardError, ModelCard
from cards.errors import UserError
from fastvideo_train.build import load_others
from fastvideo_train.data.prompts import Prompt
from fastvideo_train.evaluation import EvalItem, EvalSettings, evaluate
from inference.load import card_of
from methods.dmd2 import DMD2, HEAD
from methods.forward import velocity
from methods.ladder import exit_rung
from methods.method import Update
from methods.roles import CRITIC, EMA, STUDENT, TEACHER

WORDS = ("a red circle", "the blue square moves left", "a green triangle")
SIGMAS = (1.0, 0.9375, 5 * 0.5 / 3, 0.625)
"""The rungs 1000, 750, 500 and 250 shifted by 5."""


def dmd2(**options: Any) -> DMD2:
    settings: dict[str, Any] = {
        "lr": 1e-2,
        "critic_lr": 1e-2,
        "steps": 6,
        "batch_size": 4,
        "micro_batch": 3,
        "ttur": 2,
        "weight_decay": 0.0,
    }
    return DMD2(**(settings | options))


def prompts(count: int = 4) -> list[Prompt]:
    return [Prompt(WORDS[i % 3]) for i in range(count)]


def clips() -> dict[str, Any]:
    latents = torch.randn(4, 4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    return {"latents": latents, "prompt": [WORDS[i % 3] for i in range(4)]}


def gradients(ctx: Any, role: str) -> list[Tensor | None]:
    return [p.grad for p in ctx.roles.trained(role)]


def move(ctx: Any, role: str, seed: int = 7, scale: float = 0.05) -> None:
    """Makes a role's weights others."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in ctx.roles.parameters_of(role).values():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    ctx.roles.changed(role)


def updates_of(method: DMD2, step: int, ctx: Any, batch: Any = None) -> tuple[list[Update], list[Update]]:
    """(student's, critic's) updates of a step, without any backward."""
    found = [u for u in method.updates(prompts() if batch is None else batch, step, ctx) if u.loss is not None]
    return [u for u in found if u.optimizer == STUDENT], [u for u in found if u.optimizer == CRITIC]


# -- the gradient


def test_without_guidance_a_critic_that_equals_the_teacher_moves_nothing(training: Any) -> None:
    """Exactly zero, to the last bit: Adam would blow a rounding error up to a full step."""
    method = dmd2(teacher_guidance=1.0)
    ctx = training.context(method)
    students, _ = updates_of(method, 0, ctx)
    for update in students:
        update.loss.backward()  # type: ignore[union-attr]
        assert update.metrics["train/dmd_gradient"] == 0.0
    assert all(g is not None and not g.any() for g in gradients(ctx, STUDENT))
    move(ctx, CRITIC)
    for update in updates_of(method, 0, ctx)[0]:
        update.loss.backward()  # type: ignore[union-attr]
    assert any(g.any() for g in gradients(ctx, STUDENT))  # type: ignore[union-attr]


def test_the_samples_get_the_papers_gradient(training: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """dL/dx told again from the three models' own forwards: (f_fake - f_real) / mean|x - f_real| / numel."""
    import methods.dmd2 as module

    method = dmd2(teacher_guidance=3.5, batch_size=3)
    ctx = training.context(method)
    for seed, role in enumerate((STUDENT, CRITIC)):
        move(ctx, role, seed)
    kept: list[Tensor] = []
    real = module.simulate

    def simulate(*args: Any, **options: Any) -> Tensor:
        x = real(*args, **options)
        if options["gradient"]:
            x.retain_grad()
            kept.append(x)
        return x

    monkeypatch.setattr(module, "simulate", simulate)
    seen: list[tuple[Tensor, Tensor]] = []
    real_noised = DMD2._noised

    def noised(self: DMD2, what: str, *args: Any) -> tuple[Tensor, ...]:
        out = real_noised(self, what, *args)
        if what == "score":
            seen.append((out[1], out[2]))
        return out

    monkeypatch.setattr(DMD2, "_noised", noised)
    students, _ = updates_of(method, 0, ctx, prompts(3))
    students[0].loss.backward()  # type: ignore[union-attr]
    ((sigma_B, x_s),) = seen
    (x,) = kept
    encode = ctx.engine.encode
    text = torch.cat(encode([p.text for p in prompts(3)], ctx.roles.instance(STUDENT)))
    empty = torch.cat(encode([""], ctx.roles.instance(TEACHER))).expand(3, -1, -1)
    s = sigma_B.reshape(3, 1, 1, 1, 1)
    teacher = ctx.roles.instance(TEACHER)
    with torch.no_grad():
        c, u = (velocity(teacher, x_s, sigma_B, t, gradient=False) for t in (text, empty))
        f_real = x_s - s * (u + 3.5 * (c - u))
        f_fake = x_s - s * velocity(ctx.roles.instance(CRITIC), x_s, sigma_B, text, gradient=False)
        size = (x - f_real).abs().mean(dim=(1, 2, 3, 4), keepdim=True)
        expected = (f_fake - f_real) / size / x.numel()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, expected, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("lora", [None, {"rank": 4, "alpha": 8}], ids=["full", "lora"])
@pytest.mark.parametrize("gan", [None, {"weight_g": 0.1, "weight_d": 0.1}], ids=["plain", "gan"])
def test_each_update_reaches_its_own_role_alone(training: Any, lora: Any, gan: Any) -> None:
    method = dmd2(lora=lora, gan=gan)
    ctx = training.context(method)
    for seed, role in enumerate((STUDENT, CRITIC)):
        move(ctx, role, seed)
    students, critics = updates_of(method, 0, ctx, None if gan is None else clips())
    for own, other, found in ((STUDENT, CRITIC, students), (CRITIC, STUDENT, critics)):
        ctx.roles.zero_grad()
        for update in found:
            update.loss.backward()  # type: ignore[union-attr]
        assert all(g is not None for g in gradients(ctx, own)) and any(g.any() for g in gradients(ctx, own))  # type: ignore[union-attr]
        assert all(g is None for g in gradients(ctx, other))
        owned = {id(p) for p in ctx.roles.trained(own)}
        assert all(p.grad is None for p in ctx.roles.parameters() if id(p) not in owned)
    assert (HEAD in ctx.roles) == (gan is not None)


def test_micro_batches_do_not_change_the_gradients(training: Any) -> None:
    found = []
    for micro_batch in (1, 4):
        method = dmd2(micro_batch=micro_batch)
        ctx = training.context(method)
        move(ctx, CRITIC)
        students, critics = updates_of(method, 0, ctx)
        assert [u.step for u in students] == [False] * (len(students) - 1) + [True]
        for update in (*students, *critics):
            update.loss.backward()  # type: ignore[union-attr]
        found.append([*gradients(ctx, STUDENT), *gradients(ctx, CRITIC)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-6)


def test_activation_checkpointing_recomputes_each_role_by_its_own_adapter(training: Any) -> None:
    found = []
    for recompute in (False, True):
        method = dmd2(lora={"rank": 4, "alpha": 8}, gan={"weight_g": 0.1, "weight_d": 0.1})
        ctx = training.context(method)
        for seed, role in enumerate((STUDENT, CRITIC)):
            move(ctx, role, seed)
        if recompute:
            ctx.roles[STUDENT].enable_gradient_checkpointing()
        students, critics = updates_of(method, 0, ctx, clips())
        for update in (*students, *critics):
            with ctx.roles.backward_of(update.optimizer):
                update.loss.backward()  # type: ignore[union-attr]
        found.append([*gradients(ctx, STUDENT), *gradients(ctx, CRITIC)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-7)


# -- the two time scales


@pytest.mark.parametrize(("steps", "ttur", "expected"), [(7, 3, 3), (4, 1, 4), (5, 5, 1), (6, 5, 2)])
def test_the_student_is_trained_exactly_every_kth_iteration(
    training: Any, steps: int, ttur: int, expected: int
) -> None:
    method = dmd2(steps=steps, ttur=ttur, batch_size=2, lr_schedule="cosine", rungs=[1000])
    assert method.optimizer_steps() == expected
    assert {role: spec.steps for role, spec in method.optimizers().items()} == {STUDENT: expected, CRITIC: steps}
    module = training.module(method)
    rows = training.fit(module, [prompts(2)] * steps)
    assert module.optimizer_steps == expected
    assert [i for i, row in enumerate(rows) if "train/lr" in row] == list(range(0, steps, ttur))
    assert all("train/critic_lr" in row for row in rows)
    counts = {role: optimizer.state_dict()["state"][0]["step"].item() for role, optimizer in _optimizers(module)}
    assert counts == {STUDENT: expected, CRITIC: steps}


def _optimizers(module: Any) -> list[tuple[str, Any]]:
    return list(zip(module.optimizer_specs, module.trainer.optimizers, strict=True))


def test_each_role_has_its_own_rate_and_clip(training: Any) -> None:
    method = dmd2(lr=1e-3, critic_lr=4e-3, clip=1e-4, critic_clip=None, ttur=1, betas=(0.0, 0.9), ema=0.5)
    module = training.module(method)
    before = {role: [p.detach().clone() for p in module.roles.trained(role)] for role in (STUDENT, CRITIC)}
    teacher = [p.detach().clone() for p in module.roles[TEACHER].parameters()]
    norms: dict[str, float] = {}
    configure = module.configure_optimizers

    def configured() -> Any:
        made = configure()
        for (role, spec), entry in zip(module.optimizer_specs.items(), made, strict=True):
            group = entry["optimizer"].param_groups[0]
            assert (group["lr"], group["betas"]) == (spec.lr, (0.0, 0.9))
            entry["optimizer"].register_step_pre_hook(
                lambda o, a, k, role=role: norms.__setitem__(
                    role, torch.stack([p.grad.norm() for p in o.param_groups[0]["params"]]).norm().item()
                )
            )
        return made

    module.configure_optimizers = configured
    (row,) = training.fit(module, [prompts()])
    assert (row["train/lr"], row["train/critic_lr"]) == (1e-3, 4e-3)
    assert norms[STUDENT] == pytest.approx(1e-4, rel=1e-2) and row["train/grad_norm"] > 1e-3
    assert norms[CRITIC] == pytest.approx(row["train/critic_grad_norm"], rel=1e-4)
    # The first step of Adam is of length lr wherever the gradient is not tiny.
    for role, lr in ((STUDENT, 1e-3), (CRITIC, 4e-3)):
        moved = max((p - q).abs().max().item() for p, q in zip(module.roles.trained(role), before[role], strict=True))
        assert moved == pytest.approx(lr, rel=2e-2)
    assert all(torch.equal(p, q) for p, q in zip(module.roles[TEACHER].parameters(), teacher, strict=True))
    average = module.roles.parameters_of(EMA)
    for key, p in module.roles.parameters_of(STUDENT).items():  # of the student alone, and one step behind
        old = dict(zip(module.roles.parameters_of(STUDENT), before[STUDENT], strict=True))[key]
        torch.testing.assert_close(average[key], 0.5 * old + 0.5 * p, rtol=0, atol=1e-6)


def test_the_critic_learns_the_students_samples(training: Any) -> None:
    """With a student that stands still the flow loss of the critic falls."""
    method = dmd2(lr=0.0, critic_lr=3e-2, steps=40, batch_size=8, micro_batch=8, rungs=[1000], betas=(0.9, 0.99))
    module = training.module(method)
    rows = training.fit(module, [prompts(8)] * 40)
    losses = [row["train/critic_loss"] for row in rows]
    assert sum(losses[-10:]) < 0.9 * sum(losses[:10])


# -- samples


def test_ranks_leave_at_one_rung_and_their_shares_make_the_whole(training: Any, monkeypatch: Any) -> None:
    """Two ranks' samples, noise and exits are those of one process: everything is addressed by the global row."""
    import methods.dmd2 as module
    from methods.world import World

    calls: list[tuple[list[int], int]] = []
    real = module.simulate

    def simulate(instance: Any, text: Tensor, seeds: Any, exit_at: int, *, gradient: bool) -> Tensor:
        calls.append((list(seeds), exit_at))
        return real(instance, text, seeds, exit_at, gradient=gradient)

    monkeypatch.setattr(module, "simulate", simulate)
    method = dmd2(micro_batch=4)
    ctx = training.context(method)
    updates_of(method, 2, ctx)
    whole, calls[:] = list(calls), []
    assert [len(seeds) for seeds, _ in whole] == [4, 4] and not set(whole[0][0]) & set(whole[1][0])
    monkeypatch.setattr(World, "mean", lambda self, metrics: metrics)
    for rank in (0, 1):
        object.__setattr__(ctx, "world", World(rank, 2))
        updates_of(method, 2, ctx)
    assert {exit_at for _, exit_at in (*calls, *whole)} == {exit_rung(4, 0, 2)}
    assert [a + b for (a, _), (b, _) in zip(calls[:2], calls[2:], strict=True)] == [seeds for seeds, _ in whole]


def test_the_ladder_is_the_shifted_rungs_and_stands_on_the_card(training: Any) -> None:
    method = dmd2()
    assert method.ladder == pytest.approx(SIGMAS)
    card = method.derive_card(training.card)
    assert card.loops["denoise"].schedule.ladder == method.ladder
    ctx = training.context(method)
    assert ctx.roles.instance(STUDENT).card.loops["denoise"].schedule.ladder == method.ladder
    assert ctx.roles.instance(TEACHER).card.loops["denoise"].schedule.ladder is None
    assert ctx.roles.instance(TEACHER).card == training.card


def test_evaluation_samples_the_ladder_and_before_it_the_teacher_on_its_own_grid(training: Any) -> None:
    """Whatever grid the settings ask for: it is for cards that have none."""
    method = dmd2(teacher_guidance=2.0)
    module = training.module(method)
    asked: list[tuple[Any, Any]] = []

    def at_start() -> None:
        run = module.engine.run_interleaved

        def run_interleaved(requests: Any, instance: Any, listener: Any) -> Any:
            artifacts = run(requests, instance, listener)
            asked.append((instance.card, artifacts[0].provenance.params))
            return artifacts

        module.engine.run_interleaved = run_interleaved
        settings = EvalSettings((EvalItem("a red circle", 1),), None, steps=7, guidance=1.0, solver="euler")
        for baseline in (method.baseline(), None):
            evaluate(module, settings, [], lambda *_: None, baseline=baseline)

    module.on_start = at_start
    training.fit(module, [prompts()])
    (base, before), (card, after) = asked
    assert (before.steps, before.solver, before.guidance) == (7, "euler", 2.0) and base == training.card
    assert (after.steps, after.solver, after.guidance) == (4, "lcm", 1.0)
    assert card.loops["denoise"].schedule.ladder == method.ladder


def test_the_gate_runs_on_the_ladder_and_catches_a_model_that_trains_as_another(training: Any) -> None:
    from fastvideo_train.module import ParityError

    module = training.module(dmd2(), parity_every=1)
    (row,) = training.fit(module, [prompts()])
    assert row["parity/c2"] == 0.0
    module = training.module(dmd2(), parity_every=1)
    module.roles[STUDENT].blocks[1].register_forward_hook(
        lambda layer, args, output: output * 1.001 if torch.is_grad_enabled() else None
    )
    with pytest.raises(ParityError, match="at step 0"):
        training.fit(module, [prompts()])


def test_collapse_figures_are_logged_every_iteration(training: Any) -> None:
    rows = training.fit(training.module(dmd2(steps=3)), [prompts()] * 3)
    assert all(row["collapse/contrast"] > 0 and row["collapse/motion"] > 0 for row in rows)
    assert [row["train/exit_rung"] for row in rows] == [float(exit_rung(4, 0, step)) for step in range(3)]
    assert all("train/loss" in row for row in rows)


# -- the discriminator


def test_the_discriminators_losses_are_the_papers(training: Any) -> None:
    """softplus(D(fake)) + softplus(-D(real)) for the critic; with weight 0 the gradients are those without a head."""
    plain, gan = dmd2(), dmd2(gan={"weight_g": 0.0, "weight_d": 0.0})
    found = []
    for method, batch in ((plain, prompts()), (gan, clips())):
        ctx = training.context(method)
        move(ctx, CRITIC)
        students, critics = updates_of(method, 0, ctx, batch)
        for update in (*students, *critics):
            update.loss.backward()  # type: ignore[union-attr]
        found.append([p.grad for role in (STUDENT, CRITIC) for p in ctx.roles.parameters_of(role).values()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-9)
    loss = sum(u.metrics["train/gan_d_loss"] for u in critics)
    assert loss == pytest.approx(2 * 0.6931, abs=0.3)  # a head that knows nothing: 2 ln 2


def test_the_student_is_drawn_to_what_the_head_calls_real(training: Any, monkeypatch: Any) -> None:
    """The student's term is the derivative of softplus(-D(fake)) by the samples: by central differences."""
    method = dmd2(gan={"weight_g": 1.0, "weight_d": 1.0}, batch_size=2, micro_batch=2)
    ctx = training.context(method)
    batch = {name: values[:2] for name, values in clips().items()}
    rows = method._rows(batch, ctx)
    x0 = torch.randn(2, 4, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    value, direction = method._adversarial(x0, rows, slice(0, 2), 0, ctx)
    way = torch.randn(x0.shape, generator=torch.Generator().manual_seed(2))
    h = 1e-2
    ahead, behind = (
        method._adversarial(x0 + k * h * way, rows, slice(0, 2), 0, ctx)[0].double().sum() for k in (1, -1)
    )
    assert ((ahead - behind) / (2 * h)).item() == pytest.approx((direction * way).sum().item(), rel=2e-2)
    assert value.shape == (2,) and all(p.grad is None for p in ctx.roles.parameters())


def test_the_head_learns_to_tell_clips_from_samples(training: Any) -> None:
    method = dmd2(
        gan={"weight_g": 0.0, "weight_d": 1.0}, lr=0.0, critic_lr=3e-3, steps=40, rungs=[1000], betas=(0.9, 0.99)
    )
    assert method.needs_clips and not dmd2().needs_clips
    rows = training.fit(training.module(method), [clips()] * 40)
    losses = [row["train/gan_d_loss"] for row in rows]
    assert sum(losses[-8:]) < 0.9 * sum(losses[:8])


# -- teachers


@pytest.fixture(scope="module")
def same_vae(make_wan_folder: Callable[..., Path]) -> Callable[..., Path]:
    """Folders whose VAE normalises as the session's card does: the same seed makes the same moments."""
    return make_wan_folder


def swap_vae(folder: Path, target: Path, source: Path) -> Path:
    shutil.copytree(folder, target)
    shutil.rmtree(target / "vae")
    shutil.copytree(source / "vae", target / "vae")
    return target


def spec(folder: Path) -> dict[str, Any]:
    return {"name": "wan21", "size": "tiny", "source": str(folder)}


def short(card: ModelCard) -> ModelCard:
    return card.model_copy(update={"sampling": card.sampling.model_copy(update={"max_sequence_length": 12})})


def others_of(method: DMD2, training: Any) -> dict[str, Any]:
    cards = {role: short(card) for role, card in method.role_cards(training.card).items()}
    return load_others(training.base(), cards)


@pytest.mark.parametrize("lora", [None, {"rank": 4, "alpha": 8}], ids=["full", "lora"])
def test_a_teacher_of_another_shape_scores_by_its_own_text(
    training: Any, same_vae: Callable[..., Path], tmp_path: Path, lora: Any
) -> None:
    wide = swap_vae(same_vae(heads=3, layers=3, seed=5), tmp_path / "wide", training.folder)
    method = dmd2(teacher=spec(wide), lora=lora)
    ctx = training.context(method, others=others_of(method, training))
    teacher, student = ctx.roles.instance(TEACHER), ctx.roles.instance(STUDENT)
    assert teacher.residents["text_encoder"] is not student.residents["text_encoder"]
    shapes = {role: ctx.roles.module(role).config.num_layers for role in (TEACHER, CRITIC, STUDENT)}
    assert shapes == {TEACHER: 3, CRITIC: 2, STUDENT: 2}
    ours = ctx.roles.parameters_of(STUDENT)
    assert all(torch.equal(p, ours[key]) for key, p in ctx.roles.parameters_of(CRITIC).items())
    students, critics = updates_of(method, 0, ctx)
    for update in (*students, *critics):
        update.loss.backward()  # type: ignore[union-attr]
    assert all(p.grad is None and not p.requires_grad for p in ctx.roles[TEACHER].parameters())
    rows = method._rows(prompts(), ctx)
    assert not torch.equal(rows.text_NLD, rows.teacher_text_NLD)


def test_a_teacher_of_the_same_shape_is_where_the_critic_starts(
    training: Any, same_vae: Callable[..., Path], tmp_path: Path
) -> None:
    other = swap_vae(same_vae(seed=5), tmp_path / "other", training.folder)
    method = dmd2(teacher=spec(other))
    ctx = training.context(method, others=others_of(method, training))
    critic, teacher, student = (ctx.roles.parameters_of(role) for role in (CRITIC, TEACHER, STUDENT))
    assert all(torch.equal(critic[key], teacher[key]) for key in teacher)
    assert not torch.equal(critic["proj_out.weight"], student["proj_out.weight"])
    assert all(p.requires_grad for p in critic.values())
    assert not {p.data_ptr() for p in critic.values()} & {p.data_ptr() for p in teacher.values()}


def test_a_teacher_from_the_students_folder_shares_its_text_encoder(training: Any) -> None:
    method = dmd2(teacher=spec(training.folder))
    ctx = training.context(method, others=load_others(training.base(), method.role_cards(training.card)))
    base = training.base()
    others = load_others(base, method.role_cards(training.card))
    assert others[TEACHER].residents["text_encoder"] is base.residents["text_encoder"]
    assert others[TEACHER].module("transformer") is not base.module("transformer")
    own = training.context(dmd2())
    for name in (STUDENT, CRITIC):
        a, b = own.roles.parameters_of(name), ctx.roles.parameters_of(name)
        assert all(torch.equal(a[key], b[key]) for key in a)


def test_a_critic_that_shares_its_weights_with_the_student_is_refused(training: Any) -> None:
    from methods.roles import Roles

    base = training.base()
    with pytest.raises(UserError, match="roles student and critic share weights"):
        Roles(base, (TEACHER, CRITIC), trained=(STUDENT, CRITIC), others={CRITIC: base})
    with pytest.raises(UserError, match="roles student and teacher share weights"):
        Roles(base, (TEACHER, CRITIC), trained=(STUDENT, CRITIC), others={TEACHER: base})


def test_a_teacher_of_another_latent_space_is_refused_before_weights_load(
    training: Any, make_wan_folder: Callable[..., Path], tmp_path: Path
) -> None:
    channels = make_wan_folder(z_dim=8)
    with pytest.raises(UserError, match=r"does not denoise the latents .*channels is 8, expected 4"):
        dmd2(teacher=spec(channels)).role_cards(training.card)
    moments = tmp_path / "moments"
    shutil.copytree(training.folder, moments)
    config = json.loads((moments / "vae" / "config.json").read_text())
    config["latents_std"] = [2.0] * 4
    (moments / "vae" / "config.json").write_text(json.dumps(config))
    for file in moments.rglob("*.safetensors"):  # nothing of it may be read
        file.write_bytes(b"")
    with pytest.raises(UserError, match=r"latents_std is \[2\.0, 2\.0, 2\.0, 2\.0\], expected"):
        dmd2(teacher=spec(moments)).role_cards(training.card)


def test_a_teacher_of_another_guidance_convention_is_refused(training: Any, tmp_path: Path) -> None:
    folder = tmp_path / "other"
    shutil.copytree(training.folder, folder)
    data = json.loads(card_of(training.folder).to_json())
    data["loops"]["denoise"]["guidance"]["convention"] = "self_forcing"
    (folder / CARD_FILE).write_text(json.dumps(data))
    with pytest.raises(CardError, match=r"guidance\.convention: Input should be 'standard'"):
        dmd2(teacher=spec(folder)).role_cards(training.card)


# -- settings


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"ttur": 0}, "ttur: got 0, expected at least 1"),
        ({"critic_lr": -1.0}, "critic_lr: got -1.0"),
        ({"teacher_guidance": -1.0}, "teacher_guidance: got -1.0"),
        ({"score_shift": 0.0}, "score_shift: got 0.0"),
        ({"watch_floor": 1.0}, "watch_floor: got 1.0"),
        ({"watch_patience": 0}, "watch_patience: got 0"),
        ({"gan": {"weight_g": -1.0, "weight_d": 0.0}}, "expected weights >= 0"),
    ],
)
def test_bad_settings_are_named_before_weights_load(training: Any, options: dict[str, Any], complaint: str) -> None:
    assert any(complaint in problem for problem in dmd2(**options).problems(training.card, 1))


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"rungs": []}, r"method rungs: got \[\]"),
        ({"ladder_shift": 0.0}, "ladder_shift 0.0"),
        ({"gan": {"weight_g": 1.0}}, "method gan: no weight_d; expected weight_g, weight_d"),
        ({"gan": {"weight_g": 1, "weight_d": 1, "head": 2}}, "unknown key head"),
        ({"teacher": {"name": "wan21"}}, "method teacher: no size"),
        ({"teacher": {"name": "wan21", "size": "tiny", "where": "x"}}, "unknown key where"),
    ],
)
def test_options_that_make_no_method_are_named(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        dmd2(**options)


def test_rungs_out_of_order_are_a_fault_of_the_card(training: Any) -> None:
    with pytest.raises(CardError, match="is not descending within"):
        dmd2(rungs=[250, 1000]).derive_card(training.card).validate()


def test_a_card_with_a_ladder_is_not_distilled_again(training: Any) -> None:
    card = dmd2().derive_card(training.card)
    assert any("runs the ladder" in problem for problem in dmd2().problems(card, 1))
