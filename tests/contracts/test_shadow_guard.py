"""The guard in fastvideo_train/__init__.py, in fresh interpreters: it sees strangers, and it costs nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def start(code: str, *, path: list[Path], cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a new interpreter whose PYTHONPATH is ``path``."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    return subprocess.run([sys.executable, "-c", code], env=env, cwd=cwd, capture_output=True, text=True, timeout=60)


def make_stranger(folder: Path, *, package: str, form: str) -> Path:
    """A package or a module called ``package`` in ``folder``; where a message is to say that it was found."""
    folder.mkdir()
    if form == "module":
        file = folder / f"{package}.py"
        file.write_text("raise SystemExit('the stranger was imported')\n")
        return file
    (folder / package).mkdir()
    (folder / package / "__init__.py").write_text("raise SystemExit('the stranger was imported')\n")
    return folder / package


@pytest.mark.parametrize("package", ["cards", "loops", "inference", "methods"])
@pytest.mark.parametrize("form", ["package", "module"])
def test_a_stranger_earlier_on_the_path_is_refused_by_name(tmp_path: Path, package: str, form: str) -> None:
    stranger = make_stranger(tmp_path / "site", package=package, form=form)
    result = start("import fastvideo_train", path=[tmp_path / "site", ROOT], cwd=tmp_path)
    last = result.stderr.strip().splitlines()[-1]
    assert result.returncode == 1
    assert last.startswith("fastvideo_train.ShadowedPackageError: ")
    for part in (repr(package), f"got {stranger}", f"expected {ROOT / package}", "PYTHONPATH"):
        assert part in last


def test_a_stranger_in_the_working_directory_is_refused(tmp_path: Path) -> None:
    make_stranger(tmp_path / "work", package="methods", form="package")
    code = "import sys; assert sys.path[0] == ''; import fastvideo_train"
    result = start(code, path=[ROOT], cwd=tmp_path / "work")
    assert "ShadowedPackageError" in result.stderr


def test_a_stranger_that_is_already_imported_is_refused(tmp_path: Path) -> None:
    code = "import sys, types; sys.modules['loops'] = types.ModuleType('loops'); sys.modules['loops'].__file__ = "
    code += f"{str(tmp_path / 'loops' / '__init__.py')!r}; import fastvideo_train"
    result = start(code, path=[ROOT], cwd=tmp_path)
    assert f"got {tmp_path / 'loops'}, expected {ROOT / 'loops'}" in result.stderr


def test_a_stranger_later_on_the_path_and_a_link_to_ourselves_are_fine(tmp_path: Path) -> None:
    make_stranger(tmp_path / "site", package="methods", form="package")
    (tmp_path / "link").symlink_to(ROOT, target_is_directory=True)
    result = start("import fastvideo_train", path=[tmp_path / "link", ROOT, tmp_path / "site"], cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")


def test_the_guard_imports_no_plane_and_no_heavy_library(tmp_path: Path) -> None:
    code = "import sys, fastvideo_train; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    result = start(code, path=[ROOT], cwd=tmp_path)
    heavy = {
        "cards",
        "loops",
        "inference",
        "methods",
        "torch",
        "numpy",
        "hydra",
        "lightning",
        "diffusers",
        "transformers",
    }
    assert result.returncode == 0, result.stderr
    assert not heavy & set(result.stdout.split())
