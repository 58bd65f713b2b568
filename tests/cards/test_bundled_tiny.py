"""The bundled tiny Wan2.1: loads in the plain library pipeline, reconstructs its world, knows its prompts."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import WanPipeline

from methods.shapeworld.heldout import EVAL_SET
from methods.shapeworld.judge import judge, summarise
from methods.shapeworld.render import render
from methods.shapeworld.scene import sample_scene

FOLDER = Path(__file__).parents[2] / "cards" / "wan21" / "weights" / "tiny"
SIZE = {"height": 32, "width": 32, "num_frames": 9}


@pytest.fixture(scope="module")
def pipeline() -> WanPipeline:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = WanPipeline.from_pretrained(FOLDER)
    loaded.set_progress_bar_config(disable=True)
    return loaded


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_the_folder_is_small_and_holds_safetensors_only() -> None:
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 12e6
    assert {path.suffix for path in files} <= {".safetensors", ".json", ".md"}


def test_plain_loading_gives_fp32_and_a_latent_grid_of_4x4x4_cells(pipeline: WanPipeline) -> None:
    for part in (pipeline.transformer, pipeline.text_encoder, pipeline.vae):
        assert {p.dtype for p in part.parameters()} == {torch.float32}
    latents = pipeline(prompt="a red circle moves left", num_inference_steps=1, output_type="latent", **SIZE).frames
    assert latents.shape == (1, 8, 3, 8, 8)


@pytest.mark.parametrize("guidance", [1.0, 4.0])
def test_it_samples_in_the_plain_pipeline(pipeline: WanPipeline, guidance: float) -> None:
    frames = [
        pipeline(
            prompt="two green squares moving up",
            guidance_scale=guidance,
            num_inference_steps=4,
            generator=generator(seed),
            output_type="np",
            **SIZE,
        ).frames
        for seed in (0, 0, 1)
    ]
    assert frames[0].shape == (1, 9, 32, 32, 3) and np.isfinite(frames[0]).all()
    assert np.array_equal(frames[0], frames[1]) and not np.allclose(frames[0], frames[2], atol=0.02)


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("", ["</s>"]),
        ("a red circle", ["▁a", "▁red", "▁circle", "</s>"]),
        ("two cats", ["▁two", "▁", "c", "a", "t", "s", "</s>"]),
    ],
)
def test_the_tokenizer_spells_what_it_does_not_know(pipeline: WanPipeline, text: str, pieces: list[str]) -> None:
    tokenizer = pipeline.tokenizer
    assert tokenizer.convert_ids_to_tokens(tokenizer(text).input_ids) == pieces
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)


@torch.no_grad()
def test_the_judge_still_reads_clips_after_the_vae(pipeline: WanPipeline) -> None:
    rng = np.random.default_rng(101)
    scenes = [sample_scene(rng) for _ in range(200)]
    clips = np.stack([render(scene, rng) for scene in scenes])
    x = torch.from_numpy(clips).permute(0, 4, 1, 2, 3).float() / 127.5 - 1.0
    decoded = torch.cat([pipeline.vae.decode(pipeline.vae.encode(p).latent_dist.mode()).sample for p in x.split(50)])
    back = ((decoded + 1.0) * 127.5).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 4, 1).numpy()
    rates = summarise([judge(clip, scene) for clip, scene in zip(back, scenes, strict=True)])
    assert rates["all_correct"] >= 0.97


@torch.no_grad()
def test_latent_statistics_are_those_of_the_world(pipeline: WanPipeline) -> None:
    rng = np.random.default_rng(102)
    clips = np.stack([render(sample_scene(rng), rng) for _ in range(400)])  # a mean over 400 clips errs by .02 std
    x = torch.from_numpy(clips).permute(0, 4, 1, 2, 3).float() / 127.5 - 1.0
    drawn = [pipeline.vae.encode(p).latent_dist.sample(generator=generator(i)) for i, p in enumerate(x.split(50))]
    latents = torch.cat(drawn).transpose(0, 1).flatten(1)
    mean, std = (torch.tensor(getattr(pipeline.vae.config, key)) for key in ("latents_mean", "latents_std"))
    assert torch.all((latents.mean(dim=1) - mean).abs() <= 0.1 * std)
    assert torch.allclose(latents.std(dim=1), std, rtol=0.1)


def all_correct(pipeline: WanPipeline, guidance: float) -> float:
    verdicts = []
    for start in range(0, len(EVAL_SET), 32):
        items = EVAL_SET[start : start + 32]
        frames = pipeline(
            prompt=[item.prompt for item in items],
            generator=[generator(item.seed) for item in items],
            guidance_scale=guidance,
            num_inference_steps=20,
            output_type="np",
            **SIZE,
        ).frames
        pixels = np.rint(np.asarray(frames) * 255.0).astype(np.uint8)
        verdicts += [judge(clip, item.prompt) for clip, item in zip(pixels, items, strict=True)]
    return summarise(verdicts)["all_correct"]


@pytest.mark.slow
def test_the_base_knows_its_prompts_but_is_far_from_perfect_without_guidance(pipeline: WanPipeline) -> None:
    plain = all_correct(pipeline, 1.0)
    assert 0.2 <= plain <= 0.6
    recorded = json.loads((FOLDER / "FIGURES.json").read_text())["eval"]["guidance_1"]["all_correct"]
    assert plain == pytest.approx(recorded, abs=0.03)
    assert all_correct(pipeline, 4.0) > plain
