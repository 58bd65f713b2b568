"""``generate then=``: a picture by one card, the clip of it by another, and the mistakes that end early."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fastvideo_train.generate import main
from inference.engine import Engine
from inference.image_video import first_frame
from inference.plain_request import plain_task
from inference.request import Request
from tests.support.tiny_i2v import write_i2v_folder

PROMPT = "a red circle moves left"


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_i2v_folder(tmp_path_factory.mktemp("i2v"))


def test_the_clip_is_that_of_the_two_requests_by_hand(
    wan_folder: Path, clips: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "x.safetensors"
    command = [f"ckpt={wan_folder}", f"then={clips}", f"prompt={PROMPT}", "seed=3", "steps=2", "guidance=1", "frames=5"]
    assert main([*command, "height=16", "width=24", f"out={out}"]) == 0
    asked = Request(prompt=PROMPT, seed=3, steps=2, guidance=1.0, height=16, width=24)
    engine = Engine()
    images, videos = engine.load(wan_folder), engine.load(clips)
    picture = engine.run(Request(**{**vars(asked), "frames": 1}), images)
    made = {"frames": 5, "task": plain_task(videos.card), "inputs": {"image": first_frame(picture)}}
    clip = engine.run(Request(**{**vars(asked), **made}), videos)
    assert torch.equal(load_file(out)["latents"][0], clip.latents)
    assert "to load wan21-tiny and wan21-i2v-tiny" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["then={wan}"], "takes no first frame"),
        (["then={clips}", "image=x.png"], "image"),
        (["then={clips}", "width=17"], "width"),
        (["ckpt={clips}", "then={clips}"], "takes image with every request"),
    ],
)
def test_mistakes(
    wan_folder: Path, clips: Path, options: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    filled = [option.format(wan=wan_folder, clips=clips) for option in options]
    ckpt = [] if any(option.startswith("ckpt") for option in filled) else [f"ckpt={wan_folder}"]
    assert main([*ckpt, *filled, f"prompt={PROMPT}", f"out={tmp_path / 'x.gif'}"]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "x.gif").exists()
