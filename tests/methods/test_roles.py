"""Roles: what they share, what is their own, how they blend; full weights and LoRA, on a tiny random Wan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cards.errors import UserError
from inference.request import Request
from methods.forward import velocity
from methods.roles import EMA, OLD, REFERENCE, STUDENT, LoRA, Roles, trainable_component

LORA = LoRA(rank=4, alpha=8)
NAMES = (OLD, REFERENCE, EMA)


def perturb(roles: Roles, role: str, seed: int = 0, scale: float = 0.1) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in roles.parameters_of(role).values():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 4, 3, 8, 8, generator=generator), torch.tensor([0.3, 0.9]), torch.randn(2, 12, 24)


def outputs(roles: Roles, role: str) -> Tensor:
    latents, sigma, _ = inputs()
    text = torch.randn(2, 12, 24, generator=torch.Generator().manual_seed(2))
    return velocity(roles.instance(role), latents, sigma, text, gradient=False)


@pytest.fixture(params=[None, LORA], ids=["full", "lora"])
def roles(request: pytest.FixtureRequest, training: Any) -> Roles:
    return Roles(training.base(), NAMES, request.param)


def test_all_roles_share_text_encoder_vae_and_tokenizer(roles: Roles) -> None:
    student = roles.instance(STUDENT)
    for name in NAMES:
        other = roles.instance(name)
        assert other.residents["text_encoder"] is student.residents["text_encoder"]
        assert other.residents["vae"] is student.residents["vae"]
        assert other.tokenizer is student.tokenizer


def test_the_student_is_the_loaded_module_itself(training: Any) -> None:
    base = training.base()
    assert Roles(base, (OLD,))[STUDENT] is base.module(trainable_component(training.card))


def test_a_fresh_role_computes_what_the_base_does_bit_for_bit(roles: Roles, training: Any) -> None:
    base = Roles(training.base(), ())
    for name in (STUDENT, *NAMES):
        assert torch.equal(outputs(roles, name), outputs(base, STUDENT))


def test_moving_one_role_moves_no_other(roles: Roles, training: Any) -> None:
    before = outputs(Roles(training.base(), ()), STUDENT)
    for seed, moved in enumerate((STUDENT, OLD, EMA)):
        perturb(roles, moved, seed=seed)
    seen = [outputs(roles, name) for name in (STUDENT, OLD, EMA)]
    assert torch.equal(outputs(roles, REFERENCE), before)
    for i, output in enumerate([*seen, before]):
        assert all(not torch.equal(output, other) for other in [*seen, before][:i])


def test_gradients_reach_the_student_alone(roles: Roles) -> None:
    perturb(roles, STUDENT)
    latents, sigma, text = inputs()
    total = sum(
        velocity(roles.instance(name), latents, sigma, text, gradient=True).sum() for name in (STUDENT, OLD, REFERENCE)
    )
    total.backward()
    trained = {id(p) for p in roles.trained()}
    assert trained == {id(p) for p in roles.parameters_of(STUDENT).values()}
    for parameter in roles.parameters():
        assert (parameter.grad is not None) == (id(parameter) in trained)
    everything = [p for resident in roles.instance(STUDENT).residents.values() for p in resident.module.parameters()]
    assert {id(p) for p in everything if p.requires_grad} == trained


def test_role_switching_leaves_requires_grad_and_modes_alone(roles: Roles) -> None:
    before = {key: p.requires_grad for key, p in roles.named_parameters()}
    for name in (OLD, REFERENCE, STUDENT, EMA):
        outputs(roles, name)
    assert {key: p.requires_grad for key, p in roles.named_parameters()} == before
    assert not any(module.training for role in roles.values() for module in role.modules())


def test_full_roles_are_copies_and_lora_roles_adapters_of_one_module(training: Any) -> None:
    full, lora = (Roles(training.base(), NAMES, options) for options in (None, LORA))
    assert len({id(full.module(name)) for name in (STUDENT, *NAMES)}) == 4
    assert {id(lora.module(name)) for name in (STUDENT, *NAMES)} == {id(lora[STUDENT])}
    assert [lora.adapter(name) for name in (STUDENT, *NAMES)] == ["student", "old", "", "ema"]
    # rank 4 on four square layers of two attentions in two blocks, width 32
    assert sum(p.numel() for p in lora.trained()) == 2 * 2 * 4 * (2 * 4 * 32)
    assert lora.parameters_of(REFERENCE) == {}
    keys = set(lora.parameters_of(STUDENT))
    assert set(lora.parameters_of(OLD)) == keys == set(lora.parameters_of(EMA))


def test_a_lora_layer_is_w_x_plus_alpha_over_r_b_a_x(training: Any) -> None:
    roles = Roles(training.base(), (OLD, REFERENCE), LORA)
    perturb(roles, OLD)
    base = training.base()
    layer = "blocks.0.attn1.to_q"
    own = {key: p for key, p in roles.parameters_of(OLD).items() if key.startswith("blocks.0.attn1.to_q.")}
    assert len(own) == 2
    with torch.no_grad():
        module = base.module("transformer")
        for key, a in roles.parameters_of(OLD).items():
            if ".lora_A." in key:
                b = roles.parameters_of(OLD)[key.replace(".lora_A.", ".lora_B.")]
                module.get_submodule(key.split(".lora_A.")[0]).weight += 8 / 4 * b @ a
    assert not torch.equal(
        module.get_submodule(layer).weight, training.base().module("transformer").get_submodule(layer).weight
    )
    torch.testing.assert_close(outputs(roles, OLD), outputs(Roles(base, ()), STUDENT), rtol=0, atol=1e-5)


def test_the_student_differs_from_its_reference_after_a_step(roles: Roles) -> None:
    optimizer = torch.optim.AdamW(roles.trained(), lr=1e-2)
    before = outputs(roles, REFERENCE)
    latents, sigma, text = inputs()
    velocity(roles.instance(STUDENT), latents, sigma, text, gradient=True).square().mean().backward()
    optimizer.step()
    assert not torch.equal(outputs(roles, STUDENT), before)
    assert torch.equal(outputs(roles, REFERENCE), before)


def test_blending_is_its_formula_and_zero_copies_exactly(roles: Roles) -> None:
    perturb(roles, STUDENT, seed=1)
    perturb(roles, OLD, seed=2)
    old = {key: p.detach().clone() for key, p in roles.parameters_of(OLD).items()}
    student = {key: p.detach().clone() for key, p in roles.parameters_of(STUDENT).items()}
    roles.blend(OLD, 0.3)
    for key, value in roles.parameters_of(OLD).items():
        expected = 0.3 * old[key].double() + 0.7 * student[key].double()
        torch.testing.assert_close(value.double(), expected, rtol=0, atol=1e-7 * max(1.0, expected.abs().max().item()))
    roles.copy(OLD)
    assert all(torch.equal(value, student[key]) for key, value in roles.parameters_of(OLD).items())
    assert torch.equal(outputs(roles, OLD), outputs(roles, STUDENT))
    assert all(torch.equal(value, student[key]) for key, value in roles.parameters_of(STUDENT).items())


def test_a_moved_role_has_a_new_version_and_no_other_does(roles: Roles) -> None:
    before = {name: roles.instance(name).versions() for name in (STUDENT, *NAMES)}
    roles.blend(OLD, 0.5)
    roles.changed(STUDENT)
    after = {name: roles.instance(name).versions() for name in (STUDENT, *NAMES)}
    for name in (STUDENT, *NAMES):
        grown = 1 if name in (STUDENT, OLD) else 0
        assert after[name] == before[name] | {"transformer": before[name]["transformer"] + grown}


def test_the_text_cache_survives_a_moved_student_and_results_do_not(roles: Roles) -> None:
    from inference.engine import Engine

    engine, request = Engine("cpu"), Request(prompt="a red circle", seed=3, steps=2, guidance=1.0, output="latents")
    first = engine.run(request, roles.instance(STUDENT)).latents
    misses = engine.features.misses
    perturb(roles, STUDENT)
    roles.changed(STUDENT)
    second = engine.run(request, roles.instance(STUDENT)).latents
    assert engine.features.misses == misses
    assert not torch.equal(first, second)
    assert torch.equal(engine.run(request, roles.instance(REFERENCE)).latents, first)


def test_recomputed_activations_are_the_students(training: Any) -> None:
    """Activation checkpointing runs blocks again in the backward, after every role's call has ended."""
    found = []
    for recompute in (False, True):
        torch.manual_seed(0)
        roles = Roles(training.base(), (OLD, REFERENCE), LORA)
        perturb(roles, STUDENT, seed=1)
        perturb(roles, OLD, seed=2)
        if recompute:
            roles[STUDENT].enable_gradient_checkpointing()
        latents, sigma, _ = inputs()
        text = torch.randn(2, 12, 24, generator=torch.Generator().manual_seed(2))
        predicted = velocity(roles.instance(STUDENT), latents, sigma, text, gradient=True)
        for name in (OLD, REFERENCE):
            outputs(roles, name)
        predicted.square().mean().backward()
        found.append({key: p.grad for key, p in roles.parameters_of(STUDENT).items()})
    for key, gradient in found[0].items():
        assert gradient is not None and gradient.any()
        torch.testing.assert_close(found[1][key], gradient, rtol=0, atol=0)


def test_lora_targets_that_do_not_exist_are_named(training: Any) -> None:
    with pytest.raises(UserError, match=r"has no linear layer to_x; its linear layers end in: .*to_out\.0.*to_q"):
        Roles(training.base(), (OLD,), LoRA(targets=("to_q", "to_x")))
