"""The wheel: it holds the three packages with all they read at run time, nothing else, and works without the checkout.

It is built from a copy of the sources, unpacked, and run from an empty folder.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HOMES = {
    "specdecode_ref": ROOT / "specdecode_ref",
    "specdecode_kernels": ROOT / "kernels" / "specdecode_kernels",
    "specdecode_app": ROOT / "app" / "specdecode_app",
}
WEIGHTS = {".safetensors", ".gguf", ".bin", ".pt", ".pth", ".npz"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel, built offline from what is in the checkout now."""
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("specdecode_ref", "kernels", "app", "tests", "tutorials"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(copy)]
    run = subprocess.run(command, cwd=out, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    (file,) = out.iterdir()
    return zipfile.ZipFile(file)


@pytest.fixture(scope="module")
def unpacked(wheel: zipfile.ZipFile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel's files, as an installer would lay them."""
    folder = tmp_path_factory.mktemp("site")
    wheel.extractall(folder)
    return folder


def outside(unpacked: Path, folder: Path, *arguments: str) -> str:
    """What Python prints with the unpacked wheel first on the path and the checkout out of sight."""
    env = os.environ | {"PYTHONPATH": str(unpacked)}
    run = subprocess.run([sys.executable, *arguments], cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_it_holds_every_file_of_the_packages_and_no_other(wheel: zipfile.ZipFile) -> None:
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    there = {
        f"{package}/{path.relative_to(folder).as_posix()}"
        for package, folder in HOMES.items()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and not path.name.startswith(".")
    }
    assert packed == there
    assert {name.partition("/")[0] for name in packed} == HOMES.keys()


def test_it_holds_no_tests_and_no_weights_but_small_heads(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    heads = {info.filename: info.file_size for info in wheel.infolist() if Path(info.filename).suffix in WEIGHTS}
    assert all(name.startswith("specdecode_ref/heads/") and name.endswith(".safetensors") for name in heads)
    assert max(heads.values()) <= 20_000_000 and sum(heads.values()) <= 45_000_000
    assert [name for name in names if "test" in Path(name).stem.split("_") or "tests" in Path(name).parts] == []
    assert sum(info.file_size for info in wheel.infolist()) - sum(heads.values()) < 5_000_000


def test_the_shipped_heads_are_found_outside_the_checkout(unpacked: Path, tmp_path: Path) -> None:
    code = "from specdecode_ref.drafters.shipped import HEADS; print(*(p.name for p in (HEADS / 'smollm2').iterdir()))"
    assert sorted(outside(unpacked, tmp_path, "-c", code).split()) == ["draft", "eagle", "medusa"]


def test_it_names_its_licence_and_its_command(wheel: zipfile.ZipFile) -> None:
    (info,) = {name.partition("/")[0] for name in wheel.namelist() if ".dist-info/" in name}
    assert "Apache License" in wheel.read(f"{info}/licenses/LICENSE").decode()
    assert "License-Expression: Apache-2.0" in wheel.read(f"{info}/METADATA").decode()
    assert "specdecode = specdecode_ref.cli:main" in wheel.read(f"{info}/entry_points.txt").decode()


def test_its_packages_import_outside_the_checkout(unpacked: Path, tmp_path: Path) -> None:
    code = "import {0}; print({0}.__file__)"
    for package in HOMES:
        home = outside(unpacked, tmp_path, "-c", code.format(package)).strip()
        assert home == str(unpacked / package / "__init__.py")


def test_its_command_runs_outside_the_checkout(unpacked: Path, tmp_path: Path) -> None:
    text = outside(unpacked, tmp_path, "-m", "specdecode_ref.cli", "--help")
    for command in ("generate", "bench", "trace", "models", "app"):
        assert command in text
