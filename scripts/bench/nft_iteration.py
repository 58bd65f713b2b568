"""One DiffusionNFT iteration (rollouts, reward, updates) against a naive one on the same weights, in turns.

    python scripts/bench/nft_iteration.py [rounds=5] [folder=<diffusers Wan folder>] [text_padding=full]

Ours is a training step of our module under Lightning's Trainer with the defaults of conf/method/diffusion_nft.yaml,
which fold the padding tokens of prompts (text_padding=full measures without).
Theirs calls ``diffusers.WanPipeline`` once a prompt (``num_videos_per_prompt`` samples, each call with its own text
encoding) and then makes the same updates, written plainly. Before each round theirs takes our weights, so both draw the
same samples; their latents are compared once and their frames in every round. Rounds alternate who goes first; the
figure is the median over rounds of theirs / ours in wall time. Memory is the growth of the peak resident size over an
iteration. Without the bundled weights and without ``folder=`` the bench says what it needs.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline
from lightning.pytorch import Trainer
from omegaconf import DictConfig, OmegaConf

from cards.card import ModelCard
from cards.errors import UserError
from cards.registry import family
from cards.source import check_source, resolve_folder
from fastvideo_train.build import build_method, card_for
from fastvideo_train.data.shapeworld_prompts import ShapeWorldPrompts
from fastvideo_train.module import PostTrainingModule
from fastvideo_train.parallel.plan import Single
from inference.instance import ModelInstance
from inference.load import card_of
from methods.diffusion_nft import DiffusionNFT
from methods.rewards.reward import RewardBatch
from methods.rewards.shape_eval import ShapeEvalReward
from methods.roles import OLD, STUDENT
from methods.rollout import roll_out, rollout_seeds

GOAL = 1.5
LATENTS_TOLERANCE = 1e-3  # ours folds the padding of prompts: the same function in other roundings
FRAMES_TOLERANCE = 1  # of 255: rounding to uint8 may fall on either side
SEED = 0


@dataclass(frozen=True)
class Cost:
    """One iteration."""

    seconds: float
    cpu: float
    """CPU seconds over all threads: on a busy machine their ratio says more than that of wall times."""
    bytes: int
    """Growth of the peak resident size."""


class Meter:
    """Wall time and peak memory of what runs inside ``with``."""

    cost: Cost

    def __enter__(self) -> Meter:
        Path("/proc/self/clear_refs").write_text("5")  # the kernel forgets the old peak
        self._resident = self._status("VmRSS")
        self._began, self._cpu = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *failure: object) -> None:
        seconds, cpu = time.perf_counter() - self._began, time.process_time() - self._cpu
        self.cost = Cost(seconds, cpu, max(0, self._status("VmHWM") - self._resident))

    @staticmethod
    def _status(field: str) -> int:
        """Bytes."""
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])


class Naive:
    """DiffusionNFT as one writes it around the library's pipeline."""

    def __init__(self, folder: Path, card: ModelCard, method: DiffusionNFT):
        self.card, self.method = card, method
        self.pipe = WanPipeline.from_pretrained(folder, dtype=torch.float32)
        self.pipe.set_progress_bar_config(disable=True)
        shift = card.loops["denoise"].schedule.shift
        self.pipe.scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
        self.old = self.pipe.transformer.eval().requires_grad_(False)
        self.student = type(self.old).from_pretrained(folder, subfolder="transformer").eval().requires_grad_(True)
        self.optimizer = torch.optim.AdamW(
            self.student.parameters(), lr=method.lr, betas=tuple(method.betas), weight_decay=method.weight_decay
        )
        self.reward = ShapeEvalReward()
        self.steps = 0

    def take(self, module: PostTrainingModule) -> None:
        """Our weights."""
        self.student.load_state_dict(module.roles[STUDENT].state_dict())
        self.old.load_state_dict(module.roles[OLD].state_dict())
        self.steps = module.optimizer_steps

    def roll_out(self, prompts: Sequence[Any], seeds: Sequence[int]) -> tuple[Tensor, np.ndarray]:
        """Latents (N, C, T, H, W) and frames (N, F, H, W, 3) uint8: one call of the pipeline a prompt."""
        k, s = self.method.samples, self.card.sampling
        latents: list[Tensor] = []
        frames: list[np.ndarray] = []
        for g, prompt in enumerate(prompts):
            last: list[Tensor] = []

            def keep(pipe: Any, step: int, timestep: Any, tensors: Any, last: list[Tensor] = last) -> Any:
                last[:] = [tensors["latents"]]
                return tensors

            video = self.pipe(
                prompt.text,
                num_videos_per_prompt=k,
                height=s.height,
                width=s.width,
                num_frames=s.frames,
                num_inference_steps=self.method.rollout_steps,
                guidance_scale=self.method.guidance,
                max_sequence_length=s.max_sequence_length,
                generator=[torch.Generator("cpu").manual_seed(seed) for seed in seeds[g * k : (g + 1) * k]],
                callback_on_step_end=keep,
                output_type="np",
            ).frames
            latents += last
            frames.append((video * 255).round().astype(np.uint8))
        return torch.cat(latents), np.concatenate(frames)

    def iterate(self, prompts: Sequence[Any], seeds: Sequence[int]) -> np.ndarray:
        """One iteration; the frames of its samples."""
        m = self.method
        x0, frames = self.roll_out(prompts, seeds)
        texts = [prompt.text for prompt in prompts for _ in range(m.samples)]
        rewards = self.reward.score(RewardBatch(frames, texts, [{}] * len(texts))).values.reshape(-1, m.samples)
        advantages = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std() + 1e-4)
        r = torch.from_numpy(np.clip(0.5 + 0.5 * advantages / m.a_max, 0, 1)).float().flatten()
        with torch.no_grad():
            text = torch.cat([self._encode(prompt.text).repeat(m.samples, 1, 1) for prompt in prompts])
        self.pipe.scheduler.set_timesteps(m.rollout_steps)
        times = self.pipe.scheduler.timesteps
        chosen = torch.stack([times[torch.randperm(len(times))[: m.timesteps]] for _ in range(len(x0))])
        for columns in torch.arange(m.timesteps).chunk(m.inner_updates):
            pairs = [(n, int(c)) for c in columns for n in range(len(x0))]
            for start in range(0, len(pairs), m.micro_batch):
                part = pairs[start : start + m.micro_batch]
                rows = [n for n, _ in part]
                when = torch.stack([chosen[n, c] for n, c in part])
                loss = self._losses(x0[rows], text[rows], when, r[rows]).sum() / len(pairs)
                loss.backward()
            torch.nn.utils.clip_grad_norm_(self.student.parameters(), m.clip)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.steps += 1
        eta = min(0.001 * self.steps, 0.5) if m.eta is None else m.eta
        with torch.no_grad():
            for old, new in zip(self.old.parameters(), self.student.parameters(), strict=True):
                old.copy_(eta * old + (1 - eta) * new)
        return frames

    def _encode(self, prompt: str) -> Tensor:
        return self.pipe.encode_prompt(
            prompt, do_classifier_free_guidance=False, max_sequence_length=self.card.sampling.max_sequence_length
        )[0]

    def _losses(self, x0: Tensor, text: Tensor, timestep: Tensor, r: Tensor) -> Tensor:
        m = self.method
        t = (timestep / 1000).reshape(-1, 1, 1, 1, 1)
        x_t = (1 - t) * x0 + t * torch.randn_like(x0)
        with torch.no_grad():
            v_old = self.old(x_t, timestep, text, return_dict=False)[0]
        v = self.student(x_t, timestep, text, return_dict=False)[0]
        sides = []
        for v_side in (v_old + m.mix * (v - v_old), v_old - m.mix * (v - v_old)):
            error = (x_t - t * v_side - x0).flatten(1)
            sides.append((error**2).mean(1) / error.detach().abs().mean(1).clamp_min(1e-5))
        return m.a_max * (r * sides[0] + (1 - r) * sides[1]) / m.mix


@dataclass(frozen=True)
class Step:
    """What the module's training step takes."""

    batch: list[Any] | None
    position: dict[str, Any]


class Rounds:
    """The training steps of ours, with theirs before or after each; round 0 warms up.

    Its length is known, so that the trainer does not ask for a step ahead, and one empty step ends the last round.
    """

    def __init__(self, module: PostTrainingModule, naive: Naive, seen: list[np.ndarray], rounds: int):
        self.module, self.naive, self.seen, self.rounds = module, naive, seen, rounds
        self.prompts = ShapeWorldPrompts(seed=SEED)
        self.ours: list[Cost] = []
        self.theirs: list[Cost] = []
        self.latents_difference = 0.0
        self.frames_difference = 0

    def __len__(self) -> int:
        return self.rounds + 2

    def __iter__(self) -> Iterator[Step]:
        method = self.naive.method
        for index in range(self.rounds + 1):
            batch = [self.prompts.at(index * method.batch_size + i) for i in range(method.batch_size)]
            seeds = rollout_seeds(SEED, index, range(method.batch_size), method.samples)
            self.naive.take(self.module)
            if index == 0:
                self.latents_difference = self._compare(batch, seeds)
            if index % 2:
                frames = self._naive(batch, seeds)
            meter = Meter()
            with meter:
                yield Step(batch, {})
            self.ours.append(meter.cost)
            if not index % 2:
                frames = self._naive(batch, seeds)
            apart = np.abs(frames.astype(int) - self.seen[-1].astype(int)).max()
            self.frames_difference = max(self.frames_difference, int(apart))
            what = f"round {index}" if index else "warm-up"
            a, b = self.ours[-1], self.theirs[-1]
            print(
                f"{what}: ours {a.seconds:.2f} s, +{a.bytes / 2**20:.0f} MiB; theirs {b.seconds:.2f} s, "
                f"+{b.bytes / 2**20:.0f} MiB; ratio {b.seconds / a.seconds:.2f}, in CPU time {b.cpu / a.cpu:.2f}",
                flush=True,
            )
        yield Step(None, {})

    def _naive(self, batch: Sequence[Any], seeds: Sequence[int]) -> np.ndarray:
        meter = Meter()
        with meter, torch.enable_grad():
            frames = self.naive.iterate(batch, seeds)
        self.theirs.append(meter.cost)
        return frames

    def _compare(self, batch: Sequence[Any], seeds: Sequence[int]) -> float:
        """Largest difference of the latents of both sides' rollouts."""
        method = self.naive.method
        ours = roll_out(
            self.module.engine,
            self.module.roles.instance(OLD),
            [prompt.text for prompt in batch for _ in range(method.samples)],
            seeds,
            steps=method.rollout_steps,
            solver=method.solver,
            guidance=method.guidance,
        ).x0_NCTHW
        self.module.engine.features.clear()
        theirs, _ = self.naive.roll_out(batch, seeds)
        return (ours - theirs).abs().max().item()


class SeenReward(ShapeEvalReward):
    """ShapeEval that keeps the last frames it was shown."""

    def __init__(self, seen: list[np.ndarray]):
        super().__init__()
        self.seen = seen

    def score(self, batch: RewardBatch) -> Any:
        self.seen[:] = [np.asarray(batch.videos_BFHWC)]
        return super().score(batch)


def pick_card(folder: str | None) -> ModelCard:
    """The bundled card; ``folder=`` where a checkout has no bundled weights, or where it is asked for."""
    if folder is not None:
        return card_of(folder)
    try:
        card = family("wan21").card("tiny")
        check_source(card)
    except UserError as error:
        raise UserError(f"no bundled weights ({error}); pass folder=<diffusers Wan folder>") from None
    return card


def machine() -> str:
    load = os.getloadavg()[0]
    return f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, load {load:.1f}"


def measure(card: ModelCard, rounds: int, padding: str | None) -> Rounds:
    config = OmegaConf.load(Path(__file__).resolve().parents[2] / "conf" / "method" / "diffusion_nft.yaml")
    assert isinstance(config, DictConfig)
    if padding is not None:
        config.text_padding = padding
    method = build_method(config)
    assert isinstance(method, DiffusionNFT) and method.decay == 1 and method.kl == 0 and method.advantage_std == "batch"
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    folder = resolve_folder(card.source, card.root)
    card = card_for(card, method)
    seen: list[np.ndarray] = []
    base = ModelInstance.from_folder(card, folder)
    module = PostTrainingModule(card, base, method, Single(), reward=SeenReward(seen), seed=SEED)
    turns = Rounds(module, Naive(folder, card, method), seen, rounds)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        limit_train_batches=len(turns),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Found \d+ module\(s\) in eval mode")
        trainer.fit(module, train_dataloaders=turns)
    return turns


def main(arguments: list[str]) -> int:
    rounds, folder, padding = 5, None, None
    for argument in arguments:
        name, _, value = argument.partition("=")
        if name == "rounds" and value.isdecimal() and int(value) >= 1:
            rounds = int(value)
        elif name == "folder" and value:
            folder = value
        elif name == "text_padding" and value in ("full", "folded"):
            padding = value
        else:
            expected = "rounds=<number>, folder=<diffusers Wan folder> or text_padding=full|folded"
            print(f"got {argument!r}; expected {expected}", file=sys.stderr)
            return 2
    try:
        turns = measure(pick_card(folder), rounds, padding)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    ours, theirs = turns.ours[1:], turns.theirs[1:]
    ratio = statistics.median(b.seconds / a.seconds for a, b in zip(ours, theirs, strict=True))
    same = turns.latents_difference <= LATENTS_TOLERANCE and turns.frames_difference <= FRAMES_TOLERANCE
    print(f"samples: latents differ by {turns.latents_difference:.1e}, frames by {turns.frames_difference} of 255")
    print(
        f"median ratio in CPU time: {statistics.median(b.cpu / a.cpu for a, b in zip(ours, theirs, strict=True)):.3f}"
    )
    peak = [max(cost.bytes for cost in side) / 2**20 for side in (ours, theirs)]
    print(f"peak resident growth: ours {peak[0]:.0f} MiB, theirs {peak[1]:.0f} MiB")
    print(
        json.dumps(
            {
                "name": "nft_iteration",
                "value": round(ratio, 3),
                "unit": "theirs / ours",
                "text_padding": turns.naive.method.text_padding,
                "goal": GOAL,
                "pass": bool(same and ratio >= GOAL),
                "ours": round(statistics.median(cost.seconds for cost in ours), 3),
                "theirs": round(statistics.median(cost.seconds for cost in theirs), 3),
                "machine": machine(),
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
