"""The import-linter contracts of pyproject.toml, on small trees that keep or break one rule each."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULES = ["cards", "loops", "inference", "methods", "fastvideo_train"]


def lint(tree: Path, imports: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Write the five planes into ``tree``, give each file of ``imports`` its line, and run lint-imports there."""
    for package in MODULES:
        (tree / package).mkdir()
        (tree / package / "__init__.py").write_text("")
    for name in ("serve.py", "generate.py", "export.py"):
        (tree / "fastvideo_train" / name).write_text("")
    for file, line in imports.items():
        (tree / file).write_text(line + "\n")
    shutil.copy(ROOT / "pyproject.toml", tree)
    env = {**os.environ, "PYTHONPATH": str(tree)}
    code = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    return subprocess.run(
        [sys.executable, "-c", code, "--no-cache"], cwd=tree, env=env, capture_output=True, text=True, timeout=60
    )


def test_a_tree_that_imports_downwards_is_kept(tmp_path: Path) -> None:
    result = lint(
        tmp_path,
        {
            "loops/a.py": "import cards",
            "inference/a.py": "import loops, cards",
            "methods/a.py": "import inference, cards",
            "fastvideo_train/serve.py": "import inference",
            "fastvideo_train/export.py": "import methods",
        },
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("imports", "broken"),
    [
        ({"cards/a.py": "import loops"}, "cards.a -> loops"),
        ({"loops/a.py": "import inference"}, "loops.a -> inference"),
        ({"inference/a.py": "import methods"}, "inference.a -> methods"),
        ({"methods/a.py": "import fastvideo_train.export"}, "methods.a -> fastvideo_train.export"),
        ({"fastvideo_train/serve.py": "import methods"}, "fastvideo_train.serve -> methods"),
        (
            {
                "fastvideo_train/generate.py": "import fastvideo_train.export",
                "fastvideo_train/export.py": "import methods",
            },
            "fastvideo_train.export -> methods",
        ),
    ],
)
def test_an_import_against_the_rules_is_broken(tmp_path: Path, imports: dict[str, str], broken: str) -> None:
    result = lint(tmp_path, imports)
    assert result.returncode == 1, result.stdout + result.stderr
    assert broken in result.stdout
