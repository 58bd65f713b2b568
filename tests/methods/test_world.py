"""Ranks: a world of one here, two real processes over gloo in the last test."""

from __future__ import annotations

import functools
import json
import math
import operator
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cards.errors import UserError
from methods.world import World


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_shares_are_equal_and_cover_the_batch_in_rank_order(size: int) -> None:
    items = list(range(12))
    parts = [items[World(rank, size).share(12, "batch_size")] for rank in range(size)]
    assert functools.reduce(operator.iadd, parts, []) == items
    assert {len(part) for part in parts} == {12 // size}


def test_an_uneven_batch_is_named() -> None:
    with pytest.raises(UserError, match="batch_size: got 7, expected a multiple of the 2 devices"):
        World(0, 2).share(7, "batch_size")


def test_a_world_of_one_needs_no_process_group() -> None:
    values = np.array([[1.0, math.nan]])
    assert World().gather(values) is values
    assert World().mean({"a": 2.0}) == {"a": 2.0}


RANK = """
import json, sys
import numpy as np
import torch.distributed as dist
from methods.world import World

rank, store, nan = int(sys.argv[1]), sys.argv[2], float("nan")
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
world = World(rank, 2)
table = world.gather(np.array([[rank + 0.25, nan]]) if rank else np.array([[0.25, 7.0]]))
means = world.mean({"both": [1.0, 4.0][rank], "one": [nan, 3.0][rank], "none": nan})
print(json.dumps([table.tolist(), means]))
dist.destroy_process_group()
"""


def test_two_processes_see_each_other(tmp_path: Path) -> None:
    """float64 exact, NaN kept by gather and left out of means; the same answer on both ranks."""
    commands = [[sys.executable, "-c", RANK, str(rank), str(tmp_path / "store")] for rank in (0, 1)]
    root = Path(__file__).parents[2]
    processes = [subprocess.Popen(c, stdout=subprocess.PIPE, text=True, cwd=root) for c in commands]
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    for output in outputs:
        table, means = json.loads(output)
        assert table[0] == [0.25, 7.0] and table[1][0] == 1.25 and math.isnan(table[1][1])
        assert means["both"] == 2.5 and means["one"] == 3.0 and math.isnan(means["none"])
