"""The cost book: closed forms for its averages and its lines, and a file that is whole or ignored."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cards.card import CostModel
from inference.cost import (
    CLIP,
    FLOOR_SECONDS,
    SETTLING,
    SMOOTHING,
    CostBook,
    Workload,
    affine_fit,
    device_name,
    workload_of,
)
from loops.loop import ModelCall

PRIOR = CostModel(base_seconds=0.5, per_token_seconds=0.001)


def book(max_entries: int = 4096, card: str = "c" * 64, device: str = "cpu: x") -> CostBook:
    return CostBook(card_digest=card, device=device, priors={"net": PRIOR}, max_entries=max_entries)


def work(rows: int = 1, *, signature: str = "s", tokens: int = 1000, component: str = "net") -> Workload:
    return Workload(component, signature, rows, tokens)


# -- predicting


def test_an_empty_book_is_the_cards_cost_model() -> None:
    assert book().predict(work(3)) == pytest.approx(0.5 + 0.001 * 1000 * 3)
    other = CostModel()
    assert book().predict(work(3, component="vae")) == pytest.approx(
        other.base_seconds + 3000 * other.per_token_seconds
    )


def test_one_known_batch_scales_the_cost_model() -> None:
    costs = book()
    costs.observe(work(2), 5.0)  # the model says 2.5
    assert costs.predict(work(2)) == 5.0
    assert costs.predict(work(4)) == pytest.approx(2 * (0.5 + 4.0))


@given(st.floats(0, 10), st.floats(0.01, 10), st.sets(st.integers(1, 64), min_size=2, max_size=6), st.integers(1, 200))
@settings(max_examples=50, deadline=None)
def test_unseen_batches_lie_on_the_line_through_the_known_ones(
    base: float, slope: float, known: set[int], n: int
) -> None:
    costs = book()
    for rows in known:
        costs.observe(work(rows), base + slope * rows)
    assert costs.predict(work(n)) == pytest.approx(base + slope * n, rel=1e-6, abs=1e-6)


def test_a_fit_is_never_negative() -> None:
    assert affine_fit([(1, 4.0, 1), (2, 2.0, 1)]) == (3.0, 0.0)  # larger batches cost less: noise, so the mean
    assert affine_fit([(1, 1.0, 1), (2, 3.0, 1)]) == (0.0, pytest.approx(7 / 5))  # the line through 0: sum xy / sum xx
    assert affine_fit([(0, 1.0, 1), (2, 5.0, 1)]) == (1.0, 2.0)


def test_an_unseen_shape_follows_the_nearest_one_of_its_component() -> None:
    costs = book()
    costs.observe(work(tokens=1000, signature="small"), 15.0)  # 10 x the model
    costs.observe(work(tokens=64000, signature="large"), 129.0)  # 2 x the model
    assert costs.predict(work(tokens=2000, signature="new")) == pytest.approx(10 * 2.5)
    assert costs.predict(work(tokens=40000, signature="new")) == pytest.approx(2 * 40.5)
    assert costs.predict(work(tokens=1000, signature="")) == 15.0  # the same tokens: its very figure
    assert costs.predict(work(tokens=1000, component="vae")) == pytest.approx(2e-3)  # another component learns nothing


def test_nothing_is_free() -> None:
    costs = CostBook(card_digest="c", device="d", priors={"net": CostModel(base_seconds=0, per_token_seconds=0)})
    assert costs.predict(work()) == FLOOR_SECONDS
    costs.observe(work(), 0.0)
    assert costs.predict(work(7)) >= FLOOR_SECONDS


def test_a_whole_request_is_the_sum_of_its_forwards() -> None:
    costs = book()
    costs.observe(work(), 2.0)
    costs.observe(work(component="vae"), 3.0)
    assert costs.request_seconds([(work(), 20), (work(component="vae"), 1)]) == pytest.approx(43.0)


# -- averaging


def test_a_slow_first_forward_does_not_count() -> None:
    costs = book()
    for seconds in (60.0, 1.0, 1.0):
        costs.observe(work(), seconds)
    assert costs.predict(work()) == 1.0


def test_an_outlier_moves_a_settled_average_by_at_most_its_clipped_share() -> None:
    costs = book()
    for _ in range(SETTLING):
        costs.observe(work(), 1.0)
    costs.observe(work(), 1000.0)
    assert costs.predict(work()) == pytest.approx(1 + SMOOTHING * (CLIP - 1))


@pytest.mark.parametrize("level", [0.01, 0.5, 3.0, 100.0])
def test_a_lasting_change_is_followed(level: float) -> None:
    costs = book()
    for _ in range(SETTLING):
        costs.observe(work(), 1.0)
    for _ in range(80):
        costs.observe(work(), level)
    assert costs.predict(work()) == pytest.approx(level, rel=0.01)


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0])
def test_what_is_no_duration_is_refused(seconds: float) -> None:
    costs = book()
    with pytest.raises(ValueError, match="finite number >= 0"):
        costs.observe(work(), seconds)
    assert len(costs) == 0


def test_the_entry_observed_longest_ago_leaves_first() -> None:
    costs = book(max_entries=2)
    costs.observe(work(1), 1.0)
    costs.observe(work(2), 7.0)
    costs.observe(work(1), 1.0)
    costs.observe(work(1, signature="t"), 9.0)
    assert len(costs) == 2
    assert [(s["signature"], s["rows"]) for s in costs.figures()["steps"]] == [("s", 1), ("t", 1)]
    assert costs.predict(work(2)) == pytest.approx(1.0 / 1.5 * 2.5)  # from one row alone


# -- signatures


def test_signatures_differ_where_a_forward_does_and_nowhere_else() -> None:
    def call(rows: int = 1, frames: int = 2, dtype: torch.dtype = torch.float32, **more: object) -> ModelCall:
        tensors = {"latents": torch.zeros(rows, frames, 3, dtype=dtype), "timestep": torch.zeros(rows)}
        return ModelCall("net", "velocity", tensors, more)

    base = workload_of(call(), 6)
    assert base == Workload("net", "velocity; latents:float32[2, 3]; timestep:float32[]", 1, 6)
    assert workload_of(call(rows=4), 6) == Workload("net", base.signature, 4, 6)
    others = [call(frames=3), call(dtype=torch.bfloat16), call(text_padding="folded")]
    assert len({base.signature, *(workload_of(c, 6).signature for c in others)}) == 4
    stateful = ModelCall("net", "velocity", call().tensors, {"state": object()})
    assert workload_of(stateful, 6).signature == base.signature


def test_a_cpu_has_a_name() -> None:
    assert device_name("cpu").startswith("cpu: ")
    assert device_name("cpu") == device_name("cpu")


# -- the file


def test_a_saved_book_predicts_the_same_and_goes_on_alike(tmp_path: Path) -> None:
    ours, theirs = book(), book()
    for rows, seconds in ((1, 1.0), (2, 1.5), (1, 1.2), *[(4, 3.0)] * 8):
        ours.observe(work(rows), seconds)
    assert ours.save(tmp_path) and theirs.load(tmp_path)
    assert theirs.figures() == ours.figures()
    for costs in (ours, theirs):
        costs.observe(work(1), 5.0)
        costs.observe(work(4), 9.0)
    assert theirs.figures() == ours.figures()
    assert os.listdir(tmp_path) == [ours.file_name]


def test_figures_are_json_with_requests_by_name() -> None:
    costs = book()
    costs.observe(work(), 2.0)
    figures = json.loads(json.dumps(costs.figures({"t2v": [(work(), 20)]})))
    assert figures["requests"] == {"t2v": 40.0}
    assert figures["steps"] == [{"component": "net", "signature": "s", "rows": 1, "seconds": 2.0, "observations": 1}]


def test_no_file_is_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert not book().load(tmp_path)
    assert not caplog.records


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "\x00" * 100,
        lambda text: text.replace('"schema_version": 1', '"schema_version": 2'),
        lambda text: text.replace('"schema_version"', '"version"'),
        lambda text: text.replace('"seconds": 2.0', '"seconds": -2.0'),
        lambda text: text.replace('"seconds": 2.0', '"seconds": "2"'),
        lambda text: text.replace('"seconds": 2.0', '"seconds": NaN'),
        lambda text: text.replace("c" * 64, "c" * 12 + "d" * 52),
        lambda text: text.replace("cpu: x", "cpu; x"),
    ],
    ids=["empty", "cut", "zeros", "schema", "no schema", "negative", "text", "nan", "card", "device"],
)
def test_a_file_that_is_not_this_books_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[str], str]
) -> None:
    costs = book()
    costs.observe(work(), 2.0)
    costs.save(tmp_path)
    path = tmp_path / costs.file_name
    damaged = damage(path.read_text())
    assert damaged != path.read_text()
    path.write_text(damaged)
    fresh = book()
    with caplog.at_level(logging.WARNING):
        assert not fresh.load(tmp_path)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert len(fresh) == 0
    assert fresh.save(tmp_path)  # and it is replaced by the next save


def test_other_cards_and_devices_have_files_of_their_own(tmp_path: Path) -> None:
    books = [book(), book(card="d" * 64), book(device="NVIDIA H200")]
    for seconds, costs in enumerate(books, start=1):
        costs.observe(work(), float(seconds))
        costs.save(tmp_path)
    assert len(os.listdir(tmp_path)) == 3
    for seconds, like in enumerate(books, start=1):
        fresh = book(card=like.card_digest, device=like.device)
        assert fresh.load(tmp_path)
        assert fresh.predict(work()) == seconds


def test_a_folder_that_cannot_be_written_to_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert not book().save(blocked)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


WRITER = """
import sys
from collections.abc import Callable
from pathlib import Path
from inference.cost import CostBook, Workload
book = CostBook(card_digest="c" * 64, device="cpu: x")
for rows in range(1, 300):
    book.observe(Workload("net", "s", rows, 10), 1.0)
book.save(Path(sys.argv[1]))
print("saved", flush=True)
while True:
    book.save(Path(sys.argv[1]))
"""


def test_a_writer_that_is_killed_leaves_a_whole_file(tmp_path: Path) -> None:
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    with writer.stdout:
        assert writer.stdout.readline() == "saved\n"
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    fresh = book()
    assert fresh.load(tmp_path)
    assert len(fresh) == 299
