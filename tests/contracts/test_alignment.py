"""Equal weights give equal bits wherever they lie in memory: mapped from a file at an odd offset, or copied."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
import cards, torch
torch.manual_seed(0)
w, b, x = torch.randn(64, 32), torch.randn(64), torch.randn(1, 32)
expected = torch.nn.functional.linear(x, w.clone(), b)
for offset in range(16):
    room = torch.empty(w.numel() + 16)
    shifted = room[offset : offset + w.numel()].view_as(w)
    shifted.copy_(w)
    print(int(torch.equal(torch.nn.functional.linear(x, shifted, b), expected)), end="")
"""


def test_a_product_does_not_depend_on_the_alignment_of_its_weights() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"}
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment, check=True)
    assert run.stdout == "1" * 16
