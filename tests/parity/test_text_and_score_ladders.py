"""The ladders of text and score cards: a sound folder holds every row, and each row breaks on the fault it is for."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cards.card import CARD_FILE, Parity, Source
from cards.errors import UserError
from inference.engine import Engine
from inference.instance import ModelInstance, Resident
from inference.load import card_of
from inference.parity.__main__ import main
from inference.parity.interleave import (
    GateReport,
    artifact_difference,
    completion_difference,
    interleave_gate,
    score_difference,
)
from inference.parity.ladder import run_ladder
from inference.parity.library import library_of
from inference.parity.requests import gate_requests, gate_tasks
from inference.parity.score import score_rows
from inference.parity.text import text_rows
from loops.ar_decode import Completion
from loops.score import Score
from tests.support.tiny_clip import save_tiny_clip
from tests.support.tiny_qwen3 import save_tiny_qwen3

EVERY = Parity(levels=("C0", "C1", "C2", "C3"))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_qwen3(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_clip(tmp_path_factory.mktemp("clip"))


@pytest.fixture(scope="module")
def lm(qwen: Path) -> ModelInstance:
    return Engine().load(card_of(qwen).derive(parity=EVERY))


@pytest.fixture(scope="module")
def scorer(clip: Path) -> ModelInstance:
    return Engine().load(clip)


def hooked(instance: ModelInstance, component: str, hook: Callable[[Any], Any]) -> ModelInstance:
    """The instance with a module of its own whose output goes through ``hook``."""
    module = copy.deepcopy(instance.module(component))
    part = module.lm_head if component == "lm" else module.visual_projection
    assert isinstance(part, nn.Module)
    part.register_forward_hook(lambda _module, _args, output: hook(output))
    return instance.view({component: Resident(module)})


def failed(reports: Any) -> list[tuple[str, str]]:
    return [(report.level, report.what) for report in reports if not report.passed]


# -- differences


def test_a_completion_differs_by_its_logprobs_or_wholly() -> None:
    said = Completion("ab", (1, 2), 3, "length", torch.tensor([-1.0, -2.0], dtype=torch.float64))
    assert completion_difference(said, replace(said, logprobs=said.logprobs + 0.0)) == 0  # type: ignore[operator]
    assert completion_difference(said, replace(said, logprobs=said.logprobs - 0.5)) == 0.5  # type: ignore[operator]
    assert completion_difference(replace(said, logprobs=None), replace(said, logprobs=None)) == 0
    assert completion_difference(None, None) == 0
    for other in (
        None,
        replace(said, logprobs=None),
        replace(said, token_ids=(1, 3)),
        replace(said, text="a"),
        replace(said, finish="stop"),
    ):
        assert completion_difference(said, other) == math.inf
        assert completion_difference(other, said) == math.inf
    assert math.isnan(completion_difference(said, replace(said, logprobs=said.logprobs * math.nan)))  # type: ignore[operator]


def test_a_score_differs_by_its_frames_or_wholly() -> None:
    score = Score(0.5, torch.tensor([0.25, 0.75], dtype=torch.float64), (1, 3))
    assert score_difference(score, replace(score, frames_F=score.frames_F + 0.125)) == 0.125
    assert score_difference(None, None) == 0
    assert score_difference(score, None) == math.inf
    assert score_difference(score, replace(score, indices=(1, 2))) == math.inf


def test_an_artifact_with_another_part_differs_wholly(lm: ModelInstance, scorer: ModelInstance) -> None:
    text, score = Engine().run(gate_requests(lm)[0], lm), Engine().run(gate_requests(scorer)[0], scorer)
    assert artifact_difference(text, text) == 0
    assert artifact_difference(score, score) == 0
    assert artifact_difference(text, score) == math.inf
    assert artifact_difference(text, replace(text, completion=None)) == math.inf
    assert artifact_difference(score, replace(score, score=None)) == math.inf
    assert artifact_difference(text, replace(text, video=torch.zeros(1))) == math.inf


# -- texts


def test_every_row_of_a_sound_text_folder_holds(qwen: Path) -> None:
    reports = list(run_ladder(card_of(qwen).derive(parity=EVERY)))
    assert failed(reports) == []
    assert [r.level for r in reports] == ["C0"] * 3 + ["C1"] * 3 + ["C2"] * 2 + ["C3", "interleave"]
    assert all(r.difference == 0 for r in reports if r.level in ("C0", "C1", "interleave"))


def test_the_text_rows_break_on_logits_that_are_not_the_librarys(lm: ModelInstance) -> None:
    library = library_of(lm.card, torch.device("cpu"))
    tilt = 1e-3 * torch.randn(lm.module("lm").config.vocab_size, generator=torch.Generator().manual_seed(0))  # type: ignore[union-attr]
    assert failed(text_rows(hooked(lm, "lm", lambda logits: logits + tilt), "text", library, seed=0)) == [
        ("C0", "lm == the library's module"),
        ("C0", "components == those of a second load"),
        ("C1", "greedy tokens and their log-probs == generate's"),
        ("C2", "rollout log-probs == the library's forward over the whole text, with gradient"),
    ]


def test_the_text_rows_break_on_a_model_that_does_not_repeat_itself(lm: ModelInstance) -> None:
    generator = torch.Generator().manual_seed(0)
    noisy = hooked(lm, "lm", lambda logits: logits + torch.randn(logits.shape, generator=generator))
    broken = failed(text_rows(noisy, "text", library_of(lm.card, torch.device("cpu")), seed=0))
    assert ("C1", "engine == reference driver, temperature 1") in broken
    assert ("C2", "rollout == serve, token for token") in broken


def test_the_interleave_gate_of_texts_breaks_on_state_that_requests_share(lm: ModelInstance) -> None:
    last: list[torch.Tensor] = []

    def hook(logits: torch.Tensor) -> torch.Tensor:
        previous, last[:] = list(last), [logits]
        return logits + 1e-3 * previous[0] if previous else logits

    assert interleave_gate(lm).difference == 0
    assert not interleave_gate(hooked(lm, "lm", hook)).passed


# -- scores


def test_every_row_of_a_sound_score_folder_holds(clip: Path) -> None:
    reports = list(run_ladder(card_of(clip)))
    assert failed(reports) == []
    assert [r.level for r in reports] == ["C0"] * 4 + ["C1"] * 2 + ["C3", "interleave"]
    assert [r.difference for r in reports if "driver" in r.what or r.level == "interleave"] == [0, 0]


def test_the_score_rows_break_on_features_that_are_not_the_librarys(scorer: ModelInstance) -> None:
    library = library_of(scorer.card, torch.device("cpu"))
    tilt = 1e-2 * torch.randn(8, generator=torch.Generator().manual_seed(0))
    assert failed(score_rows(hooked(scorer, "clip", lambda x: x + tilt), "score", library, seed=0)) == [
        ("C0", "similarity / 100 == the library's"),
        ("C0", "components == those of a second load"),
        ("C1", "engine == CLIPModel, whole clips in one forward"),
    ]


def test_the_score_rows_break_on_nan(scorer: ModelInstance) -> None:
    library = library_of(scorer.card, torch.device("cpu"))
    broken = failed(score_rows(hooked(scorer, "clip", lambda x: x * math.nan), "score", library, seed=0))
    assert {level for level, _ in broken} == {"C0", "C1"}


def test_the_interleave_gate_of_scores_breaks_on_state_that_requests_share(scorer: ModelInstance) -> None:
    calls: list[int] = []

    def hook(features: torch.Tensor) -> torch.Tensor:
        calls.append(len(calls))
        return features.roll(calls[-1] % 3, -1)

    assert interleave_gate(scorer).difference == 0
    assert not interleave_gate(hooked(scorer, "clip", hook)).passed


# -- the command


@pytest.mark.parametrize("family", ["qwen", "clip"])
def test_the_command_checks_a_plain_folder(
    family: str, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([f"card={request.getfixturevalue(family)}", "seed=3"]) == 0
    out = capsys.readouterr().out
    for word in ("C0", "C1", "C3", "interleave", "8 of 8 rows hold"):
        assert word in out


@pytest.mark.parametrize("family", ["qwen", "clip"])
def test_a_broken_row_exits_with_1(
    family: str, tmp_path: Path, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    """No difference is below zero, so this card promises what nothing can keep."""
    folder = Path(request.getfixturevalue(family))
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    parity = Parity(levels=("C3",), tolerances={"C3": -1.0}, interleave_required=False)
    card = card_of(folder).derive(source=Source(kind="folder", location="."), parity=parity)
    (tmp_path / CARD_FILE).write_text(card.to_json())
    assert main([f"card={tmp_path}"]) == 1
    assert "0 of 1 rows hold" in capsys.readouterr().out


def test_a_card_of_no_task_with_a_gate_says_so(qwen: Path) -> None:
    card = card_of(qwen)
    loop = card.loops["decode"].model_copy(update={"kind": "dance"})
    with pytest.raises(UserError, match=r"has the tasks text; the gates ask for t2v.*ar_decode or score"):
        gate_tasks(card.model_copy(update={"loops": {"decode": loop}}))


def test_a_report_of_inf_does_not_pass() -> None:
    assert not GateReport("C1", "x", math.inf, 1e9).passed
