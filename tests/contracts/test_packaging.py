"""What is shipped: the wheel's content, where an installed wheel finds conf/, and what constraints.txt pins."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from fastvideo_train.paths import conf_dir

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("cards", "loops", "inference", "methods", "fastvideo_train")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def shipped_files(folder: str) -> set[str]:
    """Files of a folder of the checkout, as POSIX paths from the root; caches left out."""
    files = (file for file in (ROOT / folder).rglob("*") if file.is_file() and "__pycache__" not in file.parts)
    return {file.relative_to(ROOT).as_posix() for file in files}


def python(code: str, *, path: Path, cwd: Path) -> str:
    """Standard output of ``code`` in a new interpreter whose PYTHONPATH is ``path``."""
    env = {**os.environ, "PYTHONPATH": str(path)}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    (file,) = out.glob("*.whl")
    return file


def test_the_wheel_carries_every_file_of_the_packages_and_conf_inside_fastvideo_train(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    expected = set().union(*(shipped_files(package) for package in PACKAGES))
    expected |= {f"fastvideo_train/{name}" for name in shipped_files("conf")}
    assert names == expected


def test_the_wheel_carries_the_bundled_weights(wheel: Path) -> None:
    names = [name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("cards/wan21/weights/")]
    for component in ("transformer", "vae", "text_encoder"):
        folder = f"cards/wan21/weights/tiny/{component}/"
        assert any(name.startswith(folder) and name.endswith(".safetensors") for name in names), (folder, names)
    assert "cards/reward/weights/tiny/model.safetensors" in zipfile.ZipFile(wheel).namelist()


def test_an_installed_wheel_finds_its_own_conf_and_not_a_strangers(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    (site / "conf").mkdir()
    (site / "conf" / "train.yaml").write_text("stranger: true\n")
    found = python("from fastvideo_train.paths import conf_dir; print(conf_dir())", path=site, cwd=tmp_path)
    assert found.strip() == str(site / "fastvideo_train" / "conf")


def test_a_checkout_finds_conf_at_its_root() -> None:
    assert conf_dir() == ROOT / "conf"


def test_constraints_pin_what_pyproject_asks_for() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pins = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}
    assert len(pins) == len(lines) and all(version and "+" not in version for version in pins.values())
    for line in PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"]:
        requirement = Requirement(line)
        pin = pins[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(pin), f"{line} but constraints.txt pins {pin}"


def test_every_console_script_can_be_called(tmp_path: Path) -> None:
    targets = [target.split(":") for target in PROJECT["scripts"].values()]
    loop = f"for module, name in {targets}: assert callable(getattr(importlib.import_module(module), name))"
    python(f"import importlib\n{loop}", path=ROOT, cwd=tmp_path)
