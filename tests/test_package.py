"""The wheel is whole: built from the source distribution, installed alone, every public name is there."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]

LOOK_AROUND = """
import importlib
import sys
from importlib.resources import files
from pathlib import Path

installed, *packages = sys.argv[1:]
for name in packages:
    module = importlib.import_module(name)
    assert Path(module.__file__).is_relative_to(installed), f"{name} comes from {module.__file__}"
    for public in getattr(module, "__all__", []):
        getattr(module, public)
import hf_carryover
from hf_carryover.cli.demo import DRAFTER
assert (files(hf_carryover) / "py.typed").is_file()
for file in ("config.json", "model.safetensors"):
    assert (files("hf_carryover.model_cards") / DRAFTER / file).is_file(), file
"""


def run(*command, **kwargs):
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, **kwargs)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Folder that holds nothing but the installed wheel."""
    source, dist, target = (tmp_path_factory.mktemp(name) for name in ("source", "dist", "target"))
    for folder in {folder.split("/")[0] for folder in SETUPTOOLS["package-dir"].values()}:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    run("-m", "build", "--no-isolation", "--outdir", str(dist), str(source))
    (wheel,) = dist.glob("*.whl")
    run("-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), str(wheel))
    return target


@pytest.fixture
def environment(installed):
    return os.environ | {"PYTHONPATH": str(installed)}


def test_wheel_has_every_public_name(installed, environment, tmp_path):
    run("-c", LOOK_AROUND, str(installed), *SETUPTOOLS["packages"], cwd=tmp_path, env=environment)


def test_wheel_has_the_command(installed, environment, tmp_path):
    assert "demo" in run("-m", "hf_carryover.cli", "--help", cwd=tmp_path, env=environment)
    assert (installed / "bin" / "hf-carryover").is_file()
