"""A card that rewrites prompts behind the programs: the refined prompt is told beside the video, mistakes end early."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from fastvideo_train.generate import main
from tests.support.tiny_unified import save_tiny_unified_export

ASKED = "a crimson ball drifting west"
CLIP = ["steps=2", "frames=5", "guidance=1", "seed=4", "device=cpu", "max_tokens=8"]


@pytest.fixture(scope="module")
def export(wan_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_unified_export(wan_folder, tmp_path_factory.mktemp("unified") / "export")


@pytest.fixture(scope="module")
def url(export: Path, serve_app: Callable[[Any], Any]) -> Iterator[str]:
    from inference.engine import Engine
    from inference.serving.app import create_app
    from inference.serving.settings import Settings

    settings = Settings(max_work=400.0)
    engine = Engine("cpu", budget=settings.budget())
    with serve_app(create_app(engine, engine.load(export), settings)) as address:
        yield address


def generated(export: Path, out: Path, *more: str) -> dict[str, str]:
    """Metadata of the file."""
    from safetensors import safe_open

    assert main([f"ckpt={export}", f"prompt={ASKED}", f"out={out}", *CLIP, *more]) == 0
    with safe_open(out, "pt") as stream:
        return stream.metadata()


def served(url: str, **fields: Any) -> dict[str, Any]:
    body = {"prompt": ASKED, "num_inference_steps": 2, "num_frames": 5, "guidance_scale": 1, "seed": 4, **fields}
    reply = httpx.post(f"{url}/v1/videos", json=body, timeout=30)
    assert reply.status_code == 200, reply.text
    video, limit = reply.json(), time.monotonic() + 60
    while video["status"] not in ("completed", "failed"):
        assert time.monotonic() < limit
        time.sleep(0.01)
        video = httpx.get(f"{url}/v1/videos/{video['id']}").json()
    return video


def test_generate_tells_the_refined_prompt(export: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metadata = generated(export, tmp_path / "a.safetensors", "temperature=0")
    assert metadata["prompt"] == ASKED
    assert f"refined prompt: {metadata['refined_prompt']}" in capsys.readouterr().out
    warm = generated(export, tmp_path / "b.safetensors", "temperature=1.5")
    assert warm["refined_prompt"] != metadata["refined_prompt"]


def test_a_prompt_that_stays_as_it_is(export: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [option for option in CLIP if not option.startswith("max_tokens")]
    argv = [f"ckpt={export}", f"prompt={ASKED}", *options, "refine=false"]
    assert main([*argv, f"out={tmp_path}/a.mp4"]) == 0
    assert "refined prompt" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ("temperature=-1", "temperature: got -1.0"),
        ("max_tokens=0", "max_tokens: got 0"),
        ("refine=perhaps", "refine: got 'perhaps'"),
    ],
)
def test_mistakes_end_before_weights_load(
    export: Path, tmp_path: Path, extra: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    import shutil

    bare = tmp_path / "bare"
    shutil.copytree(export, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    assert main([f"ckpt={bare}", "prompt=a", f"out={tmp_path}/x.mp4", extra]) == 2
    assert expected in capsys.readouterr().err


def test_another_card_takes_no_word_of_it(wan_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"ckpt={wan_folder}", "prompt=a", f"out={tmp_path}/x.mp4", "refine=true"]) == 2
    assert "refine: got True, expected nothing" in capsys.readouterr().err


def test_a_served_video_tells_the_refined_prompt_and_is_the_generated_file(
    url: str, export: Path, tmp_path: Path
) -> None:
    metadata = generated(export, tmp_path / "a.safetensors", "temperature=0")
    video = served(url, temperature=0, max_tokens=8)
    assert video["status"] == "completed", video
    assert video["prompt"] == ASKED and video["refined_prompt"] == metadata["refined_prompt"]
    assert main([f"ckpt={export}", f"prompt={ASKED}", f"out={tmp_path}/a.mp4", *CLIP, "temperature=0"]) == 0
    content = httpx.get(f"{url}/v1/videos/{video['id']}/content").content
    assert content == (tmp_path / "a.mp4").read_bytes()


def test_a_served_prompt_may_stay_as_it_is(url: str) -> None:
    video = served(url, refine=False)
    assert video["status"] == "completed" and video["refined_prompt"] is None


def test_bad_fields_are_400(url: str) -> None:
    for fields, words in (
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"refine": False, "temperature": 1}, "temperature"),
    ):
        reply = httpx.post(f"{url}/v1/videos", json={"prompt": "a", **fields})
        assert reply.status_code == 400 and words in reply.json()["error"]["message"]
