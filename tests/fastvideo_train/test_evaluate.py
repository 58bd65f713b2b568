"""The evaluation of a card: the same clips and marks as the engine and the judge give, long clips in pieces."""

import json

import numpy as np
import pytest

from cards.registry import family
from fastvideo_train.evaluate import Piece, main, questions
from inference.engine import Engine
from inference.request import Request
from methods.rewards.reward import RewardBatch
from methods.rewards.shape_eval import ShapeEvalReward
from methods.shapeworld.heldout import EVAL_SET


def report(tmp_path, *arguments):
    out = tmp_path / "report.json"
    assert main([*arguments, f"out={out}"]) == 0
    return json.loads(out.read_text())


def test_marks_are_those_of_the_engines_clips(tmp_path, capsys):
    found = report(tmp_path, "ckpt=wan21", "count=3", "repeats=2", "steps=6", "guidance=1", "device=cpu")
    engine = Engine("cpu", batching="shape", max_rows=32)
    instance = engine.load(family("wan21").card("tiny"))
    asked = [(item, item.seed + 1000 * k) for k in range(2) for item in EVAL_SET[:3]]
    clips = engine.run_interleaved([Request(i.prompt, seed=s, steps=6, guidance=1) for i, s in asked], instance)
    batch = RewardBatch([clip.frames_FHWC() for clip in clips], [item.prompt for item, _ in asked], [{}] * 6)
    score = ShapeEvalReward().score(batch).parts["score"].reshape(2, 3)
    assert found["pieces"]["whole"]["score"]["repeats"] == pytest.approx(score.mean(1))
    assert found["pieces"]["whole"]["score"]["mean"] == pytest.approx(score.mean())
    assert found["digest"] == instance.card.digest
    shown = capsys.readouterr().out
    assert f"{score.mean():.3f}" in shown and "seeds 1: all_correct" in shown


def test_a_long_clip_is_judged_in_pieces_of_the_cards_length(tmp_path):
    found = report(tmp_path, "ckpt=wan21", "prompts=still", "count=1", "steps=2", "guidance=1", "frames=21")
    assert list(found["pieces"]) == ["frames 0 to 8", "frames 9 to 17"]


def test_the_error_counts_prompts_and_leaves_out_what_was_not_asked():
    marks = np.array([[1.0, 0.0, np.nan, 1.0], [1.0, 1.0, np.nan, 1.0]])
    (summary,) = Piece("whole", {"motion": marks, "count": np.full((2, 4), np.nan)}).summary().items()
    assert summary[0] == "motion"
    assert summary[1] == {
        "mean": pytest.approx(5 / 6),
        "se": pytest.approx(np.std([1, 0.5, 1], ddof=1) / 3**0.5),
        "repeats": pytest.approx([2 / 3, 1.0]),
    }


def test_phrasings_ask_for_the_meaning_of_the_same_scenes():
    said = questions("phrasings", 4)
    assert [meaning for _, _, meaning in said] != [prompt for prompt, _, _ in said]
    assert all("still" in prompt for prompt, _, _ in questions("still", 128))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["prompts=actions"], "takes none"),
        (["prompts=actions", "steps=4"], "steps: a session has its card's own"),
        (["steps=0"], "steps"),
        (["out=/"], "is a folder"),
        (["out=/dev/null/report.json"], "is a file"),
        (["repeats=0"], "repeats"),
        (["seed=1"], "unknown option"),
    ],
)
def test_mistakes_are_told_before_weights_load(arguments, expected, capsys, monkeypatch):
    monkeypatch.setattr(Engine, "load", lambda *_: pytest.fail("weights were loaded"))
    assert main(["ckpt=wan21", *arguments]) == 2
    assert expected in capsys.readouterr().err
