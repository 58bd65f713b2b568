"""The C library keeps freed memory, so the same buffers serve again without new page faults.

Buffers of 48 MB: up to 32 MB glibc learns by itself to keep them.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
from fastvideo_train.host_memory import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
import torch
torch.set_num_threads(1)
for _ in range(3):
    torch.ones(12_000_000).add(1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    torch.ones(12_000_000).add(1)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str, environment: dict[str, str]) -> int:
    done = subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_buffers_are_used_again_without_page_faults() -> None:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_")}
    assert faults("keep", clean) < faults("plain", clean) / 10


def test_settings_of_the_environment_win(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastvideo_train.host_memory import keep_freed_memory

    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    assert not keep_freed_memory()
