"""Fixtures shared by all rooms: tiny random Wan folders in the diffusers layout, written by the libraries' own save,
and real training parts on one of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture(scope="session")
def make_wan_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes a random WanPipeline folder: heads, head width, layers, z channels and flow shift are free."""

    def make(
        *,
        heads: int = 2,
        head_dim: int = 16,
        layers: int = 2,
        z_dim: int = 4,
        flow_shift: float = 3.0,
        scheduler: str = "UniPCMultistepScheduler",
        seed: int = 0,
    ) -> Path:
        import diffusers
        from diffusers import AutoencoderKLWan, WanPipeline, WanTransformer3DModel
        from transformers import T5TokenizerFast, UMT5Config, UMT5EncoderModel

        torch.manual_seed(seed)
        nouns = ["a", "the", "red", "green", "blue", "circle", "square", "triangle", "moves", "left", "right"]
        words = ["<pad>", "</s>", "<unk>", *nouns]
        tokenizer = T5TokenizerFast(
            vocab=[(word if i < 3 else "▁" + word, -float(i)) for i, word in enumerate(words)], extra_ids=0
        )
        text = UMT5Config(
            vocab_size=len(words),
            d_model=24,
            d_kv=8,
            d_ff=32,
            num_layers=1,
            num_heads=2,
            pad_token_id=0,
            eos_token_id=1,
        )
        transformer = WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=heads,
            attention_head_dim=head_dim,
            in_channels=z_dim,
            out_channels=z_dim,
            text_dim=24,
            freq_dim=32,
            ffn_dim=48,
            num_layers=layers,
            cross_attn_norm=True,
            rope_max_seq_len=64,
        )
        vae = AutoencoderKLWan(
            base_dim=8,
            z_dim=z_dim,
            dim_mult=[1, 1, 1],
            num_res_blocks=1,
            temperal_downsample=[True, True],
            latents_mean=torch.randn(z_dim).tolist(),
            latents_std=(torch.rand(z_dim) + 0.5).tolist(),
            scale_factor_spatial=4,
            scale_factor_temporal=4,
        )
        if scheduler == "FlowMatchEulerDiscreteScheduler":
            sampler = diffusers.FlowMatchEulerDiscreteScheduler(shift=flow_shift)
        else:
            sampler = getattr(diffusers, scheduler)(
                prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=flow_shift
            )
        folder = tmp_path_factory.mktemp("wan")
        WanPipeline(
            tokenizer=tokenizer,
            text_encoder=UMT5EncoderModel(text).eval(),
            transformer=transformer.eval(),
            vae=vae.eval(),
            scheduler=sampler,
        ).save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def wan_folder(make_wan_folder: Callable[..., Path]) -> Path:
    """One tiny random Wan folder."""
    return make_wan_folder()


@dataclass(frozen=True)
class TrainStep:
    """One step of a training loop: a batch, and where the data stands after it."""

    batch: Any
    position: dict[str, Any]


class TrainSteps:
    """An iterable, not a list: Lightning takes a list for several loaders."""

    def __init__(self, batches: Sequence[Any], start: int):
        self.batches = batches
        self.start = start

    def __iter__(self) -> Iterator[TrainStep]:
        for i, batch in enumerate(self.batches, start=self.start):
            yield TrainStep(batch, {"next": i + 1})


class Training:
    """Real parts of a run on one tiny random Wan: contexts for methods, and modules under Lightning's Trainer."""

    def __init__(self, folder: Path):
        from inference.load import card_of

        card = card_of(folder)
        self.folder = folder
        self.card = card.model_copy(update={"sampling": card.sampling.model_copy(update={"max_sequence_length": 12})})

    def base(self) -> Any:
        """The loaded card. LoRA adapters draw their first weights from the global generator: it is seeded here."""
        from inference.instance import ModelInstance

        torch.manual_seed(0)
        return ModelInstance.from_folder(self.card, self.folder)

    def context(self, method: Any, reward: Any = None, *, seed: int = 0, others: Any = None) -> Any:
        """What a method works with, without a trainer."""
        from inference.engine import Engine
        from methods.method import Context
        from methods.roles import EMA, Roles
        from methods.world import World

        base, card = self.base(), method.derive_card(self.card)
        names = (*method.roles(), *((EMA,) if method.ema is not None else ()))
        roles = Roles(base, names, method.lora, card=card, trained=method.optimizers(), others=others)
        method.attach_heads(roles)
        engine = Engine("cpu", batching="shape")
        return Context(card, engine, roles, World(), seed, torch.device("cpu"), reward)

    def module(self, method: Any, *, plan: Any = None, **options: Any) -> Any:
        from fastvideo_train.module import PostTrainingModule
        from fastvideo_train.parallel.plan import Single

        settings = {"reward": None, "seed": 0} | options
        card = method.derive_card(self.card)
        return PostTrainingModule(card, self.base(), method, Single() if plan is None else plan, **settings)

    def fit(self, module: Any, batches: Sequence[Any]) -> list[dict[str, float]]:
        """Trains on the batches; metrics of each step but for its seconds."""
        from lightning.pytorch import Trainer

        rows: list[dict[str, float]] = []
        before = module.on_step

        def on_step(step: int, metrics: dict[str, float]) -> None:
            rows.append({name: value for name, value in metrics.items() if not name.startswith("time/")})
            if before is not None:
                before(step, metrics)

        module.on_step = on_step
        trainer = Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=1,
            limit_train_batches=len(batches),
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", r"Found \d+ module\(s\) in eval mode")  # as they serve, on purpose
                trainer.fit(module, train_dataloaders=TrainSteps(batches, module.step_index))
        finally:
            module.on_step = before
        return rows


@pytest.fixture(scope="session")
def training(wan_folder: Path) -> Training:
    """A factory of training parts; every module and context that it makes is new."""
    return Training(wan_folder)
