"""UniRL on several ranks: two that see half of the groups each give one's gradients; a sharded language model trains,
and is gathered, as a whole one does."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from cards.unified.card import card_from_folder
from fastvideo_train.data.prompts import Prompt
from fastvideo_train.parallel.plan import FSDP2
from methods.method import Context
from methods.rewards.reward import Reward, RewardBatch, Scores
from methods.roles import STUDENT
from methods.unirl import UniRL
from methods.world import World
from tests.support.tiny_unified import save_tiny_unified

LLM = "llm"
SAMPLES = 3
PROMPTS = [Prompt("a red circle"), Prompt("the blue square moves left")]


class ByPlace(Reward):
    """Of a sample's prompt and its place in its group. Nothing of its pixels: a clip that shares other forwards may
    differ by a grey level somewhere, and an advantage divides by the small spread of a group."""

    name = "by place"
    version = "1"

    def score(self, batch: RewardBatch) -> Scores:
        values = [len(prompt) * (1 + i % SAMPLES) % 7 for i, prompt in enumerate(batch.prompts)]
        return Scores(values=np.array(values, dtype=np.float64))


def unirl() -> UniRL:
    settings: dict[str, Any] = {"samples": SAMPLES, "num_skip_refinement": 1, "max_tokens": 5, "rollout_steps": 2}
    rates: dict[str, Any] = {"lr": 1e-3, "lm_lr": 1e-2, "clip": None, "lm_clip": None, "weight_decay": 0.0}
    return UniRL(steps=2, batch_size=2, format="ended", num_sde=1, kl=0.01, **settings, **rates)


@pytest.fixture(scope="module")
def unified(training: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Training parts of a unified card; the refiner's embeddings are tied, as those of small Qwen3 are."""
    made, folder = copy.copy(training), tmp_path_factory.mktemp("unified") / "card"
    made.folder = save_tiny_unified(training.folder, folder, initializer_range=0.1, tie_word_embeddings=True)
    card = card_from_folder(made.folder)
    made.card = card.model_copy(update={"sampling": card.sampling.model_copy(update={"max_sequence_length": 12})})
    return made


@dataclass(frozen=True)
class Together(World):
    """A rank that is a thread."""

    barrier: Any = None
    shelf: Any = None

    def gather(self, values: np.ndarray) -> np.ndarray:
        self.shelf[self.rank] = values
        self.barrier.wait(120)
        whole = np.concatenate([self.shelf[rank] for rank in range(self.size)])
        self.barrier.wait(120)
        return whole


def gradients(ctx: Context, optimizers: list[str] | None = None) -> dict[str, list[Tensor]]:
    """Of one iteration, by optimizer."""
    for update in unirl().updates(PROMPTS, 0, ctx):
        if update.loss is not None:
            update.loss.backward()
            if optimizers is not None:
                optimizers.append(update.optimizer)
    return {name: [p.grad for p in ctx.roles.trained(name)] for name in (STUDENT, LLM)}  # type: ignore[misc]


def test_the_mean_gradient_of_two_ranks_is_that_of_one(unified: Any) -> None:
    alone = gradients(unified.context(unirl(), ByPlace()))
    barrier, shelf = threading.Barrier(2), [None, None]
    contexts = [
        replace(unified.context(unirl(), ByPlace()), world=Together(rank, 2, barrier, shelf)) for rank in range(2)
    ]
    orders: list[list[str]] = [[], []]
    with ThreadPoolExecutor(2) as pool:
        ranks = list(pool.map(gradients, contexts, orders))
    assert orders[0] == orders[1] and set(orders[0]) == {STUDENT, LLM}  # or collectives would not match
    for name, whole in alone.items():
        for i, expected in enumerate(whole):
            torch.testing.assert_close(
                (ranks[0][name][i] + ranks[1][name][i]) / 2,
                expected,
                rtol=1e-3,
                atol=1e-5 * max(1.0, expected.abs().max().item()),
            )
        assert any(gradient.any() for gradient in whole)


@pytest.fixture
def mesh() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,), mesh_dim_names=("data_parallel",))
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
def test_a_sharded_card_trains_and_is_gathered_as_a_whole_one(unified: Any, mesh: Any) -> None:
    """By FSDP2 on a mesh of one: the sharded parameters are DTensors, the tied embedding is one of them."""
    found = []
    for sharded in (False, True):
        ctx = unified.context(unirl(), ByPlace())
        if sharded:
            for part in ctx.roles.sharded_modules():
                FSDP2().shard(part, mesh["data_parallel"])
        made = {name: torch.optim.AdamW(ctx.roles.trained(name), lr=1e-3) for name in (STUDENT, LLM)}
        assert all(hasattr(p, "to_local") == sharded for p in ctx.roles.trained(LLM))
        for step in range(2):
            for update in unirl().updates(PROMPTS, step, ctx):
                if update.loss is not None:
                    update.loss.backward()
                    if update.step:
                        made[update.optimizer].step()
                        made[update.optimizer].zero_grad()
                        ctx.roles.changed(update.optimizer)
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        found.append({name: get_model_state_dict(ctx.roles[name], options=options) for name in (STUDENT, LLM)})
    start = unified.base().module(LLM).state_dict()
    for name in (STUDENT, LLM):
        assert found[0][name].keys() == found[1][name].keys()
        for key, value in found[0][name].items():
            torch.testing.assert_close(found[1][name][key], value, rtol=0, atol=1e-4)
    assert any((found[1][LLM][key] - start[key]).abs().max() > 1e-3 for key in start)
