"""One process of a run, from the checked config to the export. Runs alike alone and as one of several ranks.

Order: build, load, evaluate before, train (metrics, checkpoints, evaluations), evaluate after, export, report.
"""

from __future__ import annotations

import platform
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from cards.errors import UserError
from cards.source import resolve_folder
from fastvideo_train import checkpoint as ckpt
from fastvideo_train.build import build_target, in_numerics_of, load_others
from fastvideo_train.callbacks.progress import Progress
from fastvideo_train.checks import Parts, check_run, checkpoint_to_resume
from fastvideo_train.data.encode_clips import clip_encoder, encoder_digest
from fastvideo_train.evaluation import EvalItem, EvalResult, EvalSettings, evaluate
from fastvideo_train.export import Exported, export_model, reference_request
from fastvideo_train.host_memory import keep_freed_memory
from fastvideo_train.logging.metrics_csv import MetricsCSV
from fastvideo_train.logging.samples import save_samples
from fastvideo_train.module import PostTrainingModule
from fastvideo_train.rundir import SUMMARY_FILE, write_json
from inference.instance import ModelInstance
from inference.request import Request
from methods.rewards.reward import Reward
from methods.rewards.watch import HackingWatch, WatchedReward

HEADLINES = ("all_correct", "action_eval", "val_loss", "reward")
"""Evaluation metrics that are shown, the first that a run has as its headline."""


@dataclass(frozen=True)
class Step:
    """A batch with the data position after it, so that a checkpoint never points past what was trained on."""

    batch: Any
    position: dict[str, Any]


def pick_device(name: str) -> torch.device:
    """``auto`` takes CUDA when there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise UserError(f"device: got {name!r}, expected auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("device: got cuda, but torch sees no CUDA device; use device=auto or device=cpu")
    return torch.device(name)


def run_worker(config: dict[str, Any], run_dir: str) -> None:
    """Entry of every process; ``config`` is the resolved config as plain containers."""
    Run(OmegaConf.create(config), Path(run_dir)).go()


class Run:
    """State of one process of a run."""

    def __init__(self, cfg: DictConfig, run_dir: Path):
        # The folder is ours now: what was checked against overwriting needs no second look.
        cfg = OmegaConf.merge(cfg, {"overwrite": False})  # type: ignore[assignment]
        self.cfg = cfg
        self.run_dir = run_dir
        self.started = time.time()
        resume = checkpoint_to_resume(run_dir, cfg.resume)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the checks of the launching process have warned already
            self.parts: Parts = check_run(OmegaConf.merge(cfg, {"resume": "auto"}), run_dir)  # type: ignore[arg-type]
        self.resume = resume
        self.meta = None if resume is None else ckpt.read_meta(resume)
        self.before: dict[str, float] = {}
        self.after: dict[str, float] = {}
        self.exported: Exported | None = None
        self.hacking = HackingWatch()

    # -- set-up

    def go(self) -> None:
        from lightning.pytorch import Trainer, seed_everything

        seed_everything(self.cfg.seed, verbose=False)
        parts, cfg = self.parts, self.cfg
        device = pick_device(cfg.device)
        if device.type == "cpu":
            keep_freed_memory()
        start = 0 if self.meta is None else self.meta.step
        trainer = Trainer(
            accelerator="gpu" if device.type == "cuda" else "cpu",
            devices=cfg.devices,
            strategy=parts.plan.strategy(cfg.devices, optimizers=len(parts.method.optimizers())),
            precision="32-true",
            max_epochs=1,
            limit_train_batches=max(1, parts.method.steps - start),
            limit_val_batches=0,
            num_sanity_val_steps=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            log_every_n_steps=1,
        )
        self.trainer = trainer
        if device.type == "cuda":
            device = torch.device("cuda", trainer.local_rank)
            torch.cuda.set_device(device)
        self.progress: Progress = build_target(cfg.callbacks.progress, "callbacks.progress")
        folder = resolve_folder(parts.base.source, parts.base.root)
        base = ModelInstance.from_folder(in_numerics_of(parts.base, parts.method), folder, device)
        self.module = PostTrainingModule(
            parts.card,
            base,
            parts.method,
            parts.plan,
            reward=parts.reward,
            seed=cfg.seed,
            others=load_others(base, parts.others),
            max_rows=cfg.max_rows,
            parity_every=cfg.parity_every,
            start_step=start,
            on_step=self._after_step,
            rollouts=parts.rollouts,
            batch_at=None if parts.prompts is None else self.prompts_of,
        )
        self.module.on_start = self._on_start
        self.module.on_end = self._on_end
        self.settings = self._eval_settings()
        self.metrics = MetricsCSV(self.run_dir / "metrics.csv") if trainer.global_rank == 0 else None
        self.tracker = self._tracker() if trainer.global_rank == 0 else None
        if parts.data is not None:
            self._prepare_clips(base)
        try:
            trainer.fit(self.module, train_dataloaders=Batches(self))
        finally:
            self.module.rollouts.close()

    def prompts_of(self, step: int) -> list[Any] | None:
        """The prompts of a training step; None beyond the end."""
        method, first = self.parts.method, step * self.parts.method.batch_size
        if step >= method.steps:
            return None
        return [self.parts.prompts.at(first + i) for i in range(method.batch_size)]

    def _tracker(self) -> Any:
        from fastvideo_train.logging.wandb_logger import make_tracker

        return make_tracker(self.cfg.logger, run_dir=self.run_dir, config=OmegaConf.to_container(self.cfg))

    def _prepare_clips(self, base: ModelInstance) -> None:
        """Encodes the data set once, through the card's own operations."""
        data = self.parts.data
        data.use_encoder(clip_encoder(base), vae_digest=encoder_digest(base))
        data.trainer = self.trainer
        data.prepare_data()  # under a file lock: the first process encodes, the others find it done
        data.setup("fit")

    def _eval_settings(self) -> EvalSettings:
        cfg, parts = self.cfg.eval, self.parts
        kind = cfg.prompts
        if kind == "auto":
            kind = "shapeworld" if parts.card.recipe.data == "ShapeWorld" else "source"
            kind = "none" if parts.method.judges_itself else kind
        reward = parts.reward
        learned: Reward | None = None
        items: tuple[EvalItem, ...] = ()
        if kind == "shapeworld":
            from methods.rewards.shape_eval import ShapeEvalReward
            from methods.shapeworld.heldout import EVAL_SET

            learned = reward if isinstance(reward, WatchedReward) else None
            reward = ShapeEvalReward()
            items = tuple(EvalItem(item.prompt, item.seed) for item in EVAL_SET[: cfg.count])
        elif kind == "source" and parts.prompts is not None:
            prompts = parts.prompts.held_out(cfg.count)
            items = tuple(EvalItem(p.text, 1000 + i, dict(p.metadata)) for i, p in enumerate(prompts))
        guidance = cfg.guidance if cfg.guidance is not None else parts.method.rollout_guidance()
        return EvalSettings(
            items,
            reward,
            steps=cfg.steps,
            guidance=guidance,
            solver=cfg.solver,
            samples=cfg.samples,
            learned=learned,
        )

    # -- hooks of the module

    def _on_start(self) -> None:
        """Once the module is placed: resume, or evaluate what we start from."""
        if self.resume is not None and self.meta is not None:
            state = ckpt.load_state(self.resume)
            ckpt.restore(state, self.meta, self.module)
            self.before = state["data"]["before"]
            self.module.position = state["data"]["position"]
            if "hacking" in state["data"]:  # not in checkpoints from before there was a watch
                self.hacking = HackingWatch.restored(state["data"]["hacking"])
        start = self.module.step_index
        if self.metrics is not None:
            self.metrics.truncate_after(start)
        if self.resume is None:
            self.before = self._evaluate("before", 0)
        self.bar = self.progress.phase("train", self.parts.method.steps, done=start)
        self.bar.__enter__()

    def _after_step(self, step: int, metrics: dict[str, float]) -> None:
        cfg = self.cfg
        metrics |= self.hacking.figures(step, metrics)
        if self.metrics is not None:
            self.metrics.log(step, metrics)
        if self.tracker is not None:
            self.tracker.log(step, metrics)
        shown = {key: metrics[f"train/{key}"] for key in ("loss", "reward") if f"train/{key}" in metrics}
        self.bar.advance(1, **shown)
        last = step == self.parts.method.steps
        if cfg.eval_every > 0 and step % cfg.eval_every == 0 and not last:
            self._evaluate(f"step-{step:06d}", step)
        if last or (cfg.save_every > 0 and step % cfg.save_every == 0):
            self._save()

    def _save(self) -> None:
        data = {"position": self.module.position, "before": self.before, "hacking": self.hacking.state()}
        ckpt.save(self.run_dir / "checkpoints", self.module, data, keep=self.cfg.keep_checkpoints)

    def _on_end(self) -> None:
        self.bar.__exit__(None, None, None)
        if self.module.step_index < self.parts.method.steps:
            return
        self.after = self._evaluate("after", self.module.step_index)
        self._export()
        if self.trainer.global_rank == 0:
            self._summarise()
        ckpt.barrier()

    def _evaluate(self, phase: str, step: int) -> dict[str, float]:
        batches = [] if self.parts.data is None else list(self.parts.data.val_dataloader())
        total = len(self.settings.items)
        with self.progress.phase(f"eval {phase}", max(1, total)) as bar:
            shown = 0

            def listen(label: str, done: int, steps: int) -> None:
                nonlocal shown
                clips = done * total // max(1, steps)
                if clips > shown:
                    bar.advance(clips - shown)
                    shown = clips

            baseline = self.parts.method.baseline() if phase == "before" else None
            result = evaluate(self.module, self.settings, batches, listen, baseline=baseline)
            headline = {name: result.metrics[name] for name in HEADLINES if name in result.metrics}
            bar.advance(max(0, total - shown), **headline)
        if self.trainer.global_rank == 0:
            self._keep(phase, step, result)
        return result.metrics

    def _keep(self, phase: str, step: int, result: EvalResult) -> None:
        """Eval rows and sample clips on disk and, when there is a tracker, there."""
        import json

        if result.clips_FHWC:
            save_samples(
                self.run_dir,
                phase,
                result.clips_FHWC,
                [item.prompt for item in result.items],
                [item.seed for item in result.items],
                result.verdicts,
                result.fps,
            )
        path = self.run_dir / "eval.jsonl"
        old = [line for line in path.read_text().splitlines() if line] if path.is_file() else []
        rows = [line for line in old if json.loads(line)["phase"] != phase and json.loads(line)["step"] <= step]
        rows.append(json.dumps({"phase": phase, "step": step, **result.metrics}))
        from fastvideo_train.rundir import write_text

        write_text(path, "\n".join(rows) + "\n")
        if self.tracker is not None:
            self.tracker.log(step, {f"eval/{name}": value for name, value in result.metrics.items()})
            clips = sorted((self.run_dir / "samples" / phase).glob("*.mp4"))
            self.tracker.log_videos(step, f"samples/{phase}", clips, [item.prompt for item in result.items])

    # -- the end

    def _reference(self) -> tuple[Request, torch.Tensor]:
        """A seeded request and the trainer's own latents for it."""
        request = reference_request(self.parts.card, self.cfg.seed, self.parts.method.rollout_guidance())
        role = self.module.roles.instance(self.module.best_role)
        return request, self.module.engine.run(request, role).latents

    def _trained_others(self) -> dict[str, tuple[Request, torch.Tensor]]:
        """Role that is a trained card of its own -> a seeded request and the trainer's own latents for it."""
        references = {}
        for name, card in self.parts.others.items():
            if name in self.module.optimizer_specs:
                request = reference_request(card, self.cfg.seed, None)
                latents = self.module.engine.run(request, self.module.roles.instance(name)).latents
                references[name] = (request, latents)
        return references

    def _export(self) -> None:
        module = self.module
        request, latents = self._reference()
        others = self._trained_others()
        roles = ckpt.gather_roles(module)
        if self.trainer.global_rank != 0:
            return
        role = module.best_role
        joined = {component: roles[name] for component, name in module.roles.parts(role).items()}
        state = joined.pop(module.roles.component, None)
        self.weight_change = ckpt.weight_change(self.parts.card, state, role, module.roles.lora, joined)
        with self.progress.phase("export", 1) as bar:
            metrics = {
                f"{when}_{name}": value
                for when, values in (("before", self.before), ("after", self.after))
                for name, value in values.items()
            }
            self.exported = export_model(
                card=self.parts.card,
                parent=self.parts.base,
                out=self.run_dir / "export",
                state=state,
                joined=joined,
                role=role,
                lora=module.roles.lora,
                method=self.parts.method.name,
                guidance=self.parts.method.rollout_guidance(),
                data=self.parts.card.recipe.data,
                metrics=metrics,
                reference_latents=latents,
                reference_request=request,
                samples=self._readme_samples(),
            )
            for name, (request, latents) in others.items():
                self._export_other(name, roles[name], metrics, request, latents)
            bar.advance(1)

    def _export_other(
        self, name: str, state: dict[str, Any], metrics: dict[str, float], request: Request, latents: torch.Tensor
    ) -> None:
        """Writes ``export-<role>`` beside the run's export: a trained card of its own."""
        card = self.parts.others[name]
        changed = ckpt.weight_change(card, state, name, None)
        self.weight_change |= {f"{name}/{component}": change for component, change in changed.items()}
        export_model(
            card=card,
            out=self.run_dir / f"export-{name}",
            state=state,
            role=name,
            lora=None,
            method=self.parts.method.name,
            guidance=None,
            data=card.recipe.data,
            metrics=metrics,
            reference_latents=latents,
            reference_request=request,
            samples=[],
        )

    def _readme_samples(self) -> list[tuple[str, Any]]:
        from fastvideo_train.logging.samples import load_samples

        return load_samples(self.run_dir, "after")[:4]

    def _baseline(self) -> str:
        """What ``eval.before`` is of, in words."""
        baseline = self.parts.method.baseline()
        if baseline is None:
            return "the same sampler before training"
        card = self.module.roles.instance(baseline.role).card
        steps = self.settings.steps if self.settings.steps is not None else card.sampling.steps
        return f"{baseline.role}, {steps} steps, guidance {baseline.guidance}"

    def _summarise(self) -> None:
        from fastvideo_train.report import write_report

        assert self.exported is not None
        parts = self.parts
        write_json(
            self.run_dir / SUMMARY_FILE,
            {
                "card": parts.card.name,
                "card_digest": self.exported.card.digest,
                "parents": list(self.exported.card.recipe.parents),
                "method": parts.method.name,
                "seed": self.cfg.seed,
                "steps": self.module.step_index,
                "optimizer_steps": self.module.optimizer_steps,
                "seconds": round(time.time() - self.started, 1),
                "plan": parts.plan.name,
                "devices": self.cfg.devices,
                "machine": f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}",
                "exported_role": self.module.best_role,
                "baseline": self._baseline(),
                "eval": {"before": self.before, "after": self.after},
                "weight_change": self.weight_change,
                "c2": None if self.module.c2 is None else self.module.c2.difference,
                "export": str(self.exported.folder),
                "export_latents_difference": self.exported.latents_difference,
            },
        )
        report = write_report(self.run_dir)
        if self.tracker is not None:
            self.tracker.finish()
        headline = next((name for name in HEADLINES if name in self.after), None)
        if headline is not None and headline in self.before:
            self.progress.say(f"{headline}: {self.before[headline]:.3f} before, {self.after[headline]:.3f} after")
        self.progress.say(f"report: {report}")
        self.progress.say(f"export: {self.exported.folder}")


class Batches:
    """What Lightning iterates: the remaining steps of the run, each with its data position.

    A run that is complete but for its end gets one empty step, so that evaluation and export still happen.
    """

    def __init__(self, run: Run):
        self.run = run

    def __iter__(self) -> Iterator[Step]:
        run, method = self.run, self.run.parts.method
        start = run.module.step_index
        if start >= method.steps:
            yield Step(None, run.module.position)
            return
        if run.parts.data is not None:
            yield from self._clips()
            return
        for step in range(start, method.steps):
            yield Step(run.prompts_of(step), {"prompts": (step + 1) * method.batch_size})

    def _clips(self) -> Iterator[Step]:
        data = self.run.parts.data
        if self.run.module.position:
            data.load_state_dict(self.run.module.position)
        loader = data.train_dataloader()
        for batch in loader:
            yield Step(batch, data.state_dict())
