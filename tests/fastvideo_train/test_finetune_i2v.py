"""Finetuning image to video: a clip's first frame is encoded as by the library, kept, and reaches the network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import WanImageToVideoPipeline
from PIL import Image
from torch import Tensor

from cards.registry import family
from fastvideo_train.data.datamodule import VideoDataModule
from fastvideo_train.data.encode_clips import clip_encoder, encoder_digest
from fastvideo_train.memory_plan import Clip, plan_memory
from fastvideo_train.parallel.plan import make_plan
from inference.engine import Engine
from inference.instance import ModelInstance
from inference.load import card_of
from inference.media import write_video
from methods.diffusion_nft import DiffusionNFT
from methods.finetune import Finetune, conditions_of
from methods.method import Context
from methods.roles import STUDENT, Roles
from methods.world import World
from tests.support.tiny_i2v import picture, write_i2v_folder

ROOT = Path(__file__).resolve().parents[2]
COMMON: dict[str, Any] = {"lr": 1e-3, "steps": 2, "batch_size": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_i2v_folder(tmp_path_factory.mktemp("i2v"))


@pytest.fixture(scope="module")
def instance(folder: Path) -> ModelInstance:
    card = card_of(folder)
    return ModelInstance.from_folder(card, folder)


def clip(seed: int) -> np.ndarray:
    """uint8 (F, H, W, 3): nine frames that differ."""
    return np.stack([picture(32, 32, 10 * seed + i).numpy() for i in range(9)])


def as_video(clips_FHWC: list[np.ndarray]) -> Tensor:
    """(B, 3, F, H, W) in [-1, 1], as the latent cache hands it over."""
    return torch.from_numpy(np.stack(clips_FHWC)).permute(0, 4, 1, 2, 3).float().div(127.5).sub(1)


@pytest.fixture(scope="module")
def library(folder: Path) -> Iterator[Any]:
    """(condition, image embeddings) of a frame by the library's own pipeline."""
    pipeline = WanImageToVideoPipeline.from_pretrained(folder, dtype=torch.float32)

    def encode(frame_HWC: np.ndarray) -> tuple[Tensor, Tensor]:
        image = Image.fromarray(frame_HWC)
        with torch.no_grad():
            embeds = pipeline.encode_image(image, "cpu")
            frame = pipeline.video_processor.preprocess(image, height=32, width=32)
            generator = torch.Generator("cpu").manual_seed(0)
            _, condition = pipeline.prepare_latents(frame, 1, 4, 32, 32, 9, torch.float32, "cpu", generator)
        return condition, embeds

    yield encode


def test_a_clips_first_frame_is_encoded_as_the_library_does(instance: ModelInstance, library: Any) -> None:
    """Alone to the bit, in a batch to a last bit; the mask tells the first latent frame."""
    clips = [clip(1), clip(2)]
    alone = clip_encoder(instance)(as_video(clips[:1]))
    both = clip_encoder(instance)(as_video(clips))
    assert isinstance(alone, dict) and isinstance(both, dict)
    for i, frames in enumerate(clips):
        condition, embeds = library(frames[0])
        if i == 0:
            assert torch.equal(alone["condition"], condition) and torch.equal(alone["image_embeds"], embeds)
        torch.testing.assert_close(both["condition"][i : i + 1], condition, rtol=0, atol=1e-5)
        torch.testing.assert_close(both["image_embeds"][i : i + 1], embeds, rtol=0, atol=1e-5)
    mask = both["condition"][:, :4]
    assert (mask[:, :, 0] == 1).all() and (mask[:, :, 1:] == 0).all()


def test_a_card_without_a_first_frame_keeps_latents_alone(training: Any) -> None:
    base = training.base()
    assert isinstance(clip_encoder(base)(as_video([clip(1)])), Tensor)


def module_of(root: Path, instance: ModelInstance) -> VideoDataModule:
    videos = root / "videos"
    videos.mkdir()
    rows = []
    for i in range(5):
        write_video(videos / f"{i}.mp4", clip(i), 8)
        rows.append(json.dumps({"file_name": f"{i}.mp4", "caption": "a red circle"}))
    (videos / "metadata.jsonl").write_text("\n".join(rows) + "\n")
    data = VideoDataModule(
        folder=videos,
        cache_dir=root / "cache",
        num_frames=9,
        height=32,
        width=32,
        batch_size=2,
        seed=0,
        val_fraction=0,
        encode_batch_size=2,
    )
    data.use_encoder(clip_encoder(instance), vae_digest=encoder_digest(instance))
    data.prepare_data()
    data.setup("fit")
    return data


def context(card: Any, folder: Path, method: Any) -> Context:
    base = ModelInstance.from_folder(card, folder)
    roles = Roles(base, method.roles(), method.lora)
    return Context(card, Engine("cpu", batching="shape"), roles, World(), 0, torch.device("cpu"))


def test_what_was_encoded_is_kept_and_reaches_the_network(
    instance: ModelInstance, folder: Path, tmp_path: Path
) -> None:
    data = module_of(tmp_path, instance)
    batch = next(iter(data.train_dataloader()))
    encoded = {row.index: data._dataset(data.train_rows)[k][3] for k, row in enumerate(data.train_rows)}
    for name in ("condition", "image_embeds"):
        kept = torch.stack([encoded[i][name] for i in batch["index"].tolist()])
        assert torch.equal(batch["conditions"][name], kept)
    assert not torch.equal(*batch["conditions"]["condition"])

    method = Finetune(**COMMON, caption_dropout=0.0, micro_batch=1)
    ctx = context(instance.card, folder, method)
    seen: list[dict[str, Tensor]] = []
    ctx.roles[STUDENT].register_forward_hook(lambda m, args, kwargs, out: seen.append(kwargs), with_kwargs=True)
    updates = list(method.updates(batch, 0, ctx))
    for i, call in enumerate(seen):
        assert torch.equal(call["hidden_states"][:, 4:], batch["conditions"]["condition"][i : i + 1])
        assert torch.equal(call["encoder_hidden_states_image"], batch["conditions"]["image_embeds"][i : i + 1])
    assert len(seen) == len(updates) == 2
    assert updates[0].loss is not None
    updates[0].loss.backward()
    assert all(p.grad is not None for p in ctx.roles.trained())


def test_rows_of_a_batch_without_conditions_have_none() -> None:
    assert conditions_of({"latents": torch.zeros(2)}, slice(0, 1)) == {}


def test_methods_that_bring_no_first_frame_refuse_the_card(instance: ModelInstance) -> None:
    method = DiffusionNFT(**COMMON, samples=4)
    (problem,) = [p for p in method.problems(instance.card, 1) if "takes image" in p]
    assert "method=finetune" in problem
    assert Finetune(**COMMON).problems(instance.card, 1) == []
    assert DiffusionNFT(**COMMON, samples=4).problems(family("wan21").card("tiny"), 1) == []


def test_the_memory_plan_counts_its_conditions(instance: ModelInstance) -> None:
    plan = plan_memory(
        instance.card,
        Finetune(**COMMON),
        make_plan("single"),
        devices=1,
        clip=Clip(9, 32, 32),
        max_rows=1,
        generates=False,
    )
    encoder = instance.module("image_encoder")
    held = sum(t.nbytes for t in (*encoder.parameters(), *encoder.buffers()))
    assert next(row.weights for row in plan.rows if row.name == "image_encoder") == held
    assert plan.activations > 0


@pytest.mark.slow
def test_a_run_trains_exports_and_generates(folder: Path, tmp_path: Path) -> None:
    """The export's reload equals the trainer's own latents, and the library reads it."""
    env = {**os.environ, "FASTVIDEO_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}

    def python(*line: str) -> str:
        done = subprocess.run(
            [sys.executable, *line], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=500
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    python(
        str(ROOT / "train.py"),
        "card=wan21_i2v",
        f"card.source={folder}",
        "method=finetune",
        "data.clips=16",
        "steps=2",
        "batch_size=4",
        "method.warmup=0",
        "run=i2v",
        "logger=none",
        "device=cpu",
    )
    run = tmp_path / "outputs" / "i2v"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["export_latents_difference"] == 0.0 and summary["c2"] == 0.0
    assert summary["weight_change"]["transformer"] > 0
    WanImageToVideoPipeline.from_pretrained(run / "export", dtype=torch.float32)
    Image.fromarray(picture(40, 56).numpy()).save(tmp_path / "first.png")
    python(
        "-m",
        "fastvideo_train.generate",
        f"ckpt={run}",
        "prompt=a red circle",
        "image=first.png",
        "steps=2",
        "out=x.gif",
    )
    assert (tmp_path / "x.gif").stat().st_size > 0
