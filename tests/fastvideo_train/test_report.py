"""report.html of runs whose folders are written here, with clips drawn by ShapeWorld and judged by ShapeEval.

The oracle for the videos is PyAV on the bytes in the page; for the page, Python's own HTML parser.
"""

from __future__ import annotations

import base64
import json
import math
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cards.errors import UserError
from fastvideo_train.logging.metrics_csv import MetricsCSV
from fastvideo_train.logging.samples import load_samples, save_samples
from fastvideo_train.report import write_report
from inference.media import read_video
from methods.shapeworld.heldout import EVAL_SET, training_scene
from methods.shapeworld.judge import judge
from methods.shapeworld.render import render
from methods.shapeworld.scene import parse

RATES = {
    "before": {"all_correct": 0.445, "valid": 0.79, "colour": 0.71, "shape": 0.52, "motion": 0.66, "count": 0.41},
    "after": {"all_correct": 0.742, "valid": 0.95, "colour": 0.91, "shape": 0.79, "motion": 0.86, "count": 0.66},
}
CONFIG = """run: demo
seed: 3
steps: 120
batch_size: 96
lr: null
devices: 1
eval:
  count: 128
method:
  _target_: methods.diffusion_nft.DiffusionNFT
  mix: 0.3
  lr: 0.0003
  lora: {rank: 8, alpha: 16}
  betas: [0.9, 0.999]
  steps: 120
card:
  name: wan21
  source: null
  size: tiny
"""


def write_clips(run: Path, phase: str, count: int, wrong_every: int, seed: int) -> None:
    """Clips of the evaluation's prompts; every ``wrong_every``-th shows something else."""
    rng = np.random.default_rng(seed)
    items = EVAL_SET[:count]
    scenes = [parse(item.prompt) if i % wrong_every else training_scene(rng) for i, item in enumerate(items)]
    clips = [render(scene, rng) for scene in scenes]
    verdicts = [asdict(judge(clip, item.prompt)) for clip, item in zip(clips, items)]
    save_samples(run, phase, clips, [i.prompt for i in items], [i.seed for i in items], verdicts, fps=8)


def write_run(
    run: Path, *, steps: int = 120, finished: bool = True, clips: int = 16, phases: Sequence[int] = ()
) -> Path:
    """A DiffusionNFT run's folder as the trainer leaves it."""
    run.mkdir(parents=True, exist_ok=True)
    (run / "config.yaml").write_text(CONFIG)
    rng = np.random.default_rng(0)
    metrics = MetricsCSV(run / "metrics.csv")
    for step in range(1, steps + 1):
        gain = 1 - math.exp(-step / 50)
        row: dict[str, float] = {"parity/c2": 0.0} if step % 50 == 1 else {}
        row |= {
            "train/loss": 0.9 - 0.1 * gain + 0.02 * rng.normal(),
            "train/reward": 0.45 + 0.3 * gain + 0.04 * rng.normal(),
            "train/grad_norm": abs(1.1 + 0.3 * rng.normal()),
            "train/lr": 3e-4,
            "reward/all_correct": 0.3 + 0.3 * gain + 0.05 * rng.normal(),
        }
        for name in ("colour", "shape", "motion", "two_objects", "position", "count"):
            row[f"reward/{name}"] = min(1.0, 0.4 + 0.4 * gain * rng.uniform(0.6, 1) + 0.03 * rng.normal())
        metrics.log(step, row | {"time/step_seconds": 2.1 + 0.2 * rng.normal()})
    evaluated: list[dict[str, Any]] = [{"phase": "before", "step": 0, **RATES["before"]}]
    write_clips(run, "before", clips, 2, seed=1)
    for step in phases:
        share = step / steps
        rates = {k: v + share * (RATES["after"][k] - v) for k, v in RATES["before"].items()}
        evaluated.append({"phase": f"step-{step:06d}", "step": step, **rates})
        write_clips(run, f"step-{step:06d}", clips, 3, seed=step)
    if finished:
        evaluated.append({"phase": "after", "step": steps, **RATES["after"]})
        write_clips(run, "after", clips, 7, seed=2)
        summary = {
            "card": "wan21-tiny",
            "card_digest": "c0ffee" * 10,
            "parents": ["ba5e" * 16],
            "method": "diffusion_nft",
            "seed": 3,
            "steps": steps,
            "seconds": 412.3,
            "plan": "single",
            "devices": 1,
            "machine": "x86_64, 2 threads",
            "eval": RATES,
            "weight_change": {"transformer": 0.0123},
            "export": str(run / "export"),
        }
        (run / "summary.json").write_text(json.dumps(summary))
    (run / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in evaluated))
    return run


class Page(HTMLParser):
    """What a browser would fetch, show and nest."""

    VOID = frozenset({"meta", "link", "br", "line", "circle", "path", "img", "input"})

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.stack: list[str] = []
        self.feed(text)
        self.close()
        assert not self.stack, f"never closed: {self.stack}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.stack and self.stack[-1] == tag, f"</{tag}> closes {self.stack[-3:]}"
        self.stack.pop()

    def handle_data(self, data: str) -> None:
        if not self.stack or self.stack[-1] not in ("style", "script"):
            self.text.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.tags if name == tag]

    def shown(self) -> str:
        return " ".join(" ".join(self.text).split())


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "demo", phases=(40, 80))


def test_the_page_asks_the_network_for_nothing(finished: Path) -> None:
    html = write_report(finished).read_text()
    page = Page(html)
    urls = [
        value for _, attrs in page.tags for name, value in attrs.items() if name in ("src", "href", "poster", "data")
    ]
    assert urls and all(value is not None and value.startswith("data:") for value in urls)
    assert not re.search(r"https?://|@import|url\(", html)
    assert len(html) < 3_000_000


def test_videos_are_the_clips(finished: Path, tmp_path: Path) -> None:
    page = Page(write_report(finished).read_text())
    videos = page.all("video")
    assert len(videos) == 2 * 16 + 4 * 4  # the pairs, and four prompts through four phases
    assert all({"muted", "autoplay", "loop", "playsinline"} <= set(video) for video in videos)
    first_after = next(v for v in videos if str(v["aria-label"]).startswith("after"))
    file = tmp_path / "clip.mp4"
    file.write_bytes(base64.b64decode(str(first_after["src"]).split(",")[1]))
    frames, fps = read_video(file)
    assert fps == 8 and frames.shape == (9, 192, 192, 3)
    prompt, native = load_samples(finished, "after")[0]
    assert prompt == EVAL_SET[0].prompt and native.shape == (9, 32, 32, 3)
    assert np.array_equal(frames[:, ::6, ::6], native)


def test_samples_come_back_as_they_were_generated(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    clips = [render(training_scene(rng), rng) for _ in range(3)]
    save_samples(tmp_path, "before", clips, list("abc"), [1, 2, 3], [{}, {}, {}], fps=8)
    save_samples(tmp_path, "before", clips[:2], list("ab"), [1, 2], [{"score": math.nan}, {}], fps=8)
    loaded = load_samples(tmp_path, "before")
    assert [prompt for prompt, _ in loaded] == ["a", "b"]
    assert sorted(p.name for p in (tmp_path / "samples/before").iterdir()) == ["000.mp4", "001.mp4", "samples.json"]
    for clip, (_, back) in zip(clips, loaded):
        error = np.mean((clip.astype(float) - back) ** 2)
        assert 10 * math.log10(255**2 / error) > 38  # dB; the plain 32x32 file has 25


def test_the_page_tells_the_run(finished: Path) -> None:
    page = Page(write_report(finished).read_text())
    text = page.shown()
    for item in EVAL_SET[:16]:
        assert item.prompt in text
    for said in ("DiffusionNFT on wan21-tiny", "0.445 → 0.742", "+0.297", "128 prompts", "7 min", "transformer 0.0123"):
        assert said in text
    command = "python train.py method=diffusion_nft card=wan21 seed=3 steps=120 batch_size=96"
    for part in (command, "method.mix=0.3", "'method.lora={rank:8,alpha:16}'"):
        assert part in text
    assert "python -m fastvideo_train.serve ckpt=" in text
    assert "mix: 0.3" in text  # the configuration
    charts = {json.loads(str(f["data-series"]))[0]["name"]: f for f in page.all("figure")}
    logged = MetricsCSV(finished / "metrics.csv").rows()
    points = json.loads(str(charts["train/loss"]["data-series"]))[0]["points"]
    assert [p[0] for p in points] == [row["step"] for row in logged]
    assert [float(p[1]) for p in points] == pytest.approx([row["train/loss"] for row in logged], abs=1e-4)


def test_verdicts_of_the_clips(finished: Path) -> None:
    text = Page(write_report(finished).read_text()).shown()
    marks = {
        phase: [entry["verdict"]["all_correct"] for entry in _entries(finished, phase)] for phase in ("before", "after")
    }
    gained = sum(not b and a for b, a in zip(marks["before"], marks["after"]))
    assert gained > 0 and f"now right {gained}" in text


def test_what_a_prompt_says_stays_text(tmp_path: Path) -> None:
    nasty = "\"><script>alert(1)</script> & <b>bold</b> 'quoted'"
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(f"note: {json.dumps('</pre><script>alert(2)</script>')}\n")
    clip = np.zeros((5, 32, 32, 3), np.uint8)
    save_samples(run, "before", [clip], [nasty], [0], [{"all_correct": False, "valid": False, "reason": "<i>x"}], fps=8)
    (run / "eval.jsonl").write_text(json.dumps({"phase": "before", "step": 0, "<u>metric": 0.5, "b": 1.0}) + "\n")
    page = Page(write_report(run).read_text())
    assert nasty in page.shown() and "</pre><script>alert(2)</script>" in page.shown()
    assert len(page.all("script")) == 1  # the page's own
    assert not page.all("u") and "<u>metric" in page.shown() and "<i>x" in page.shown()


def test_a_run_that_was_killed(tmp_path: Path) -> None:
    run = write_run(tmp_path / "killed", steps=37, finished=False, clips=2)
    with (run / "metrics.csv").open("a") as file:
        file.write("38,0.5")
    with (run / "eval.jsonl").open("a") as file:
        file.write('{"phase": "step-0')
    text = Page(write_report(run).read_text()).shown()
    assert "not finished" in text and "37 of 120" in text and "0.445 → –" in text
    assert "not yet" in text and "resume=auto" in text and "fastvideo_train.serve" not in text


def test_the_newest_evaluation_stands_in_for_the_end(tmp_path: Path) -> None:
    run = write_run(tmp_path / "killed", steps=60, finished=False, clips=2, phases=(30,))
    text = Page(write_report(run).read_text()).shown()
    assert "before and step 30" in text and "0.445 → 0.594" in text


def test_finetune_is_about_its_validation_loss(tmp_path: Path) -> None:
    run = tmp_path / "ft"
    run.mkdir()
    (run / "config.yaml").write_text("method: {_target_: methods.finetune.Finetune, steps: 5}\ncard: {name: wan21}\n")
    losses = {"before": {"val_loss": 0.31, "all_correct": 0.4}, "after": {"val_loss": 0.24, "all_correct": 0.5}}
    (run / "summary.json").write_text(json.dumps({"card": "wan21", "method": "finetune", "eval": losses}))
    MetricsCSV(run / "metrics.csv").log(1, {"train/loss": 0.3, "train/nothing": math.nan})
    html = write_report(run).read_text()
    assert "0.310 → 0.240" in Page(html).shown()
    assert '<span class="delta good">-0.070</span>' in html  # a loss is better when lower
    assert "nan" not in html


@pytest.mark.parametrize("name", ["config.yaml", "metrics.csv", "eval.jsonl", "summary.json"])
def test_any_one_file_is_enough(finished: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes((finished / name).read_bytes())
    assert "</html>" in write_report(tmp_path).read_text()


def test_large_clips_are_shrunk_to_fit(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    noise = [rng.integers(0, 256, (12, 160, 240, 3), dtype=np.uint8) for _ in range(6)]
    (tmp_path / "config.yaml").write_text("run: x\n")
    save_samples(tmp_path, "before", noise, list("abcdef"), list(range(6)), [{}] * 6, fps=16)
    assert sum(p.stat().st_size for p in (tmp_path / "samples/before").glob("*.mp4")) > 2_500_000
    html = write_report(tmp_path).read_text()
    assert len(html) < 3_000_000 and len(Page(html).all("video")) == 6


def test_not_a_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"not a run's folder: expected at least one of config\.yaml"):
        write_report(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "fastvideo_train.report", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and done.stderr.startswith("error: ") and "Traceback" not in done.stderr


def _entries(run: Path, phase: str) -> list[dict[str, Any]]:
    return json.loads((run / "samples" / phase / "samples.json").read_text())["samples"]


def test_reward_hacking_is_told_at_the_top_and_shape_eval_is_drawn_beside_the_reward(tmp_path: Path) -> None:
    log = MetricsCSV(tmp_path / "metrics.csv")
    for step, since in enumerate((0.0, 3.0, 3.0), start=1):
        row = {"train/reward": 0.1 * step, "watch/score": 1 - 0.1 * step, "watch/hacking_since": since}
        log.log(step, row)
    page = Page(write_report(tmp_path).read_text())
    assert "Reward hacking" in page.shown() and "since step 3" in page.shown()
    names = {json.loads(str(figure["data-series"]))[0]["name"] for figure in page.all("figure")}
    assert {"train/reward", "watch/score"} <= names
    log.truncate_after(1)
    assert "Reward hacking" not in Page(write_report(tmp_path).read_text()).shown()
