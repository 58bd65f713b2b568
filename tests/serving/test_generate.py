"""``fastvideo_train.generate``: latents are WanPipeline's bit for bit, files hold what they say, mistakes end early."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastvideo_train.generate import main

PROMPT = "a red circle moves left"


def latents_of(path: Path) -> torch.Tensor:
    from safetensors.torch import load_file

    tensors = load_file(path)
    assert list(tensors) == ["latents"]
    return tensors["latents"]


def pipeline(folder: Path, solver: str, shift: float) -> Any:
    import diffusers

    pipe = diffusers.WanPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    if solver == "euler":
        pipe.scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=shift)
    return pipe


def reference(pipe: Any, *, guidance: float, seed: int, output_type: str, size: tuple[int, int, int]) -> Any:
    frames, height, width = size
    return pipe(
        PROMPT,
        num_frames=frames,
        height=height,
        width=width,
        num_inference_steps=6,
        guidance_scale=guidance,
        generator=torch.Generator("cpu").manual_seed(seed),
        output_type=output_type,
    ).frames


@pytest.mark.parametrize("solver", ["unipc", "euler"])
@pytest.mark.parametrize(("guidance", "size"), [(1.0, (9, 32, 32)), (5.0, (9, 32, 32)), (5.0, (5, 48, 16))])
def test_latents_equal_wan_pipeline(
    wan_folder: Path, tmp_path: Path, solver: str, guidance: float, size: tuple[int, int, int]
) -> None:
    frames, height, width = size
    out = tmp_path / "x.safetensors"
    code = main(
        [
            *(f"ckpt={wan_folder}", f"prompt={PROMPT}", "steps=6", f"guidance={guidance}", "seed=3"),
            *(f"solver={solver}", f"frames={frames}", f"height={height}", f"width={width}", "device=cpu", f"out={out}"),
        ]
    )
    assert code == 0
    pipe = pipeline(wan_folder, solver, 3.0)
    expected = reference(pipe, guidance=guidance, seed=3, output_type="latent", size=size)
    ours = latents_of(out)
    assert ours.dtype == torch.float32 and ours.shape == expected.shape
    assert torch.equal(ours, expected)


def test_shift_and_heads_of_another_folder(make_wan_folder: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_wan_folder(heads=3, head_dim=24, flow_shift=5.0, scheduler="FlowMatchEulerDiscreteScheduler", seed=7)
    out = tmp_path / "x.safetensors"
    assert (
        main([f"ckpt={folder}", f"prompt={PROMPT}", "steps=6", "guidance=5", "seed=2", f"out={out}", "device=cpu"]) == 0
    )
    pipe = pipeline(folder, "own", 5.0)
    expected = reference(pipe, guidance=5.0, seed=2, output_type="latent", size=(9, 32, 32))
    assert torch.equal(latents_of(out), expected)


def test_the_batched_policy_is_close(wan_folder: Path, tmp_path: Path) -> None:
    base = [f"ckpt={wan_folder}", f"prompt={PROMPT}", "steps=6", "guidance=5", "seed=3", "device=cpu"]
    for policy in ("sequential", "batched"):
        assert main([*base, f"guidance_policy={policy}", f"out={tmp_path / policy}.safetensors"]) == 0
    difference = latents_of(tmp_path / "batched.safetensors") - latents_of(tmp_path / "sequential.safetensors")
    assert difference.abs().max() <= 1e-4


def test_frames_equal_wan_pipeline(wan_folder: Path, tmp_path: Path) -> None:
    """A png is lossless: its pixels are those that diffusers makes, to one rounding."""
    from PIL import Image

    out = tmp_path / "new" / "x.png"
    argv = [f"ckpt={wan_folder}", f"prompt={PROMPT}", "steps=6", "guidance=5", "seed=3", "device=cpu"]
    assert main([*argv, f"out={out}"]) == 0
    pipe = pipeline(wan_folder, "unipc", 3.0)
    frames = reference(pipe, guidance=5.0, seed=3, output_type="np", size=(9, 32, 32))[0]
    expected = np.concatenate(list((frames * 255).round().astype(np.uint8)), axis=1)
    # The VAE runs channels last on a CPU, other roundings than the pipeline's: a value may fall on the next level.
    assert np.abs(np.asarray(Image.open(out)).astype(int) - expected).max() <= 1


@pytest.mark.parametrize("suffix", ["mp4", "webm", "gif"])
def test_videos_by_suffix(wan_folder: Path, tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]) -> None:
    from inference.media import probe_video

    out = tmp_path / f"x.{suffix}"
    code = main(
        [
            *(f"ckpt={wan_folder}", "prompt=a blue square", "steps=2", "frames=5", "height=16", "width=24"),
            *("seed=11", "fps=10", "scale=2", "device=cpu", f"out={out}"),
        ]
    )
    assert code == 0
    info = probe_video(out)
    assert (info.frames, info.height, info.width) == (5, 32, 48)
    assert info.fps == pytest.approx(10)
    printed = capsys.readouterr().out
    assert str(out) in printed and "seed 11" in printed and "5 frames of 48x32 at 10 fps" in printed


def test_without_a_seed_each_run_differs_and_says_which(
    wan_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [f"ckpt={wan_folder}", "prompt=a", "steps=2", "frames=1", "device=cpu"]
    assert main([*argv, f"out={tmp_path}/a.safetensors"]) == 0
    assert main([*argv, f"out={tmp_path}/b.safetensors"]) == 0
    seed = capsys.readouterr().out.splitlines()[0].partition("seed ")[2].partition(",")[0]
    assert main([*argv, f"out={tmp_path}/c.safetensors", f"seed={seed}"]) == 0
    first, second, again = (latents_of(tmp_path / f"{name}.safetensors") for name in "abc")
    assert not torch.equal(first, second)
    assert torch.equal(first, again)


BAD = [
    (["foo=1"], "unknown option 'foo'"),
    (["out=x.avi"], "expected a file name that ends in one of"),
    (["out=."], "expected a file name"),
    (["ckpt=/no/such/folder"], "no such folder"),
    (["frames=10"], "use 9 or 13"),
    (["height=33"], "height: got 33"),
    (["solver=heun"], "expected one of: dpm2, euler, lcm, unipc"),
    (["guidance_policy=both"], "sequential"),
    (["steps=0"], "steps: got 0"),
    (["seed=-1"], "seed: got -1"),
    (["guidance=-1"], "guidance: got -1"),
    (["guidance=nan"], "guidance: got nan"),
    (["shift=0"], "shift: got 0"),
    (["fps=0"], "fps: got '0'"),
    (["scale=0"], "scale: got '0'"),
    (["device=tpu"], "device: got 'tpu'"),
    (["prompt"], "key=value"),
]


@pytest.mark.parametrize(("extra", "expected"), BAD, ids=[" ".join(extra) for extra, _ in BAD])
def test_mistakes_end_before_weights_load(
    wan_folder: Path, tmp_path: Path, extra: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder's weights are gone, so a run that got as far as loading would say that instead."""
    import shutil

    folder = tmp_path / "wan"
    shutil.copytree(wan_folder, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    argv = {"ckpt": str(folder), "prompt": "a", "out": str(tmp_path / "x.mp4"), "device": "cpu"}
    for part in extra:
        key, equals, _ = part.partition("=")
        if equals:
            argv.pop(key, None)
    before = sorted(tmp_path.rglob("*"))
    started = time.monotonic()
    code = main([*(f"{key}={value}" for key, value in argv.items()), *extra])
    captured = capsys.readouterr()
    assert code == 2
    assert captured.err.startswith("error: ") and expected in captured.err
    assert "Traceback" not in captured.err and captured.out == ""
    assert time.monotonic() - started < 5
    assert sorted(tmp_path.rglob("*")) == before


def test_a_parent_that_is_a_file(wan_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main([f"ckpt={wan_folder}", "prompt=a", f"out={tmp_path}/file/deep/x.mp4"]) == 2
    assert "is a file" in capsys.readouterr().err


def test_a_folder_that_is_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"ckpt={tmp_path}", "prompt=a", f"out={tmp_path}/x.mp4"]) == 2
    assert "model_index.json" in capsys.readouterr().err


def test_a_missing_weight_file_is_named(wan_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import shutil

    folder = tmp_path / "wan"
    shutil.copytree(wan_folder, folder)
    (folder / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    assert main([f"ckpt={folder}", "prompt=a", f"out={tmp_path}/x.mp4", "device=cpu"]) == 2
    assert "vae" in capsys.readouterr().err
    assert not (tmp_path / "x.mp4").exists()


@pytest.mark.parametrize("argv", [["--help"], ["prompt=a", "out=x.avi"]])
def test_as_a_program(argv: list[str]) -> None:
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "fastvideo_train.generate", *argv],
        capture_output=True,
        text=True,
        timeout=120,
    )
    own = [line for line in result.stderr.splitlines() if not line.startswith("import time:")]
    if argv == ["--help"]:
        assert result.returncode == 0 and "usage:" in result.stdout and own == []
    else:
        assert result.returncode == 2 and len(own) == 1 and own[0].startswith("error: out: got 'x.avi'")
    loaded = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert not loaded & {"torch", "diffusers", "transformers", "av"}
