"""Planning does not load torch: neither the planner, nor the modules that print its answers, nor the verb."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

import seatrial

PRESETS = Path(str(files("seatrial.job") / "presets"))
# What takes long to load, and is not needed before `--dry-run` and `--png`.
HEAVY = "[m for m in ('torch', 'numpy', 'matplotlib', 'transformers') if m in sys.modules]"
LOAD = f"""
import importlib, pkgutil, sys
for package in ("seatrial.plan", "seatrial.ui"):
    for found in pkgutil.iter_modules(importlib.import_module(package).__path__):
        if not found.name.startswith("scale_"):  # the report of measurements, whose statistics need numpy
            importlib.import_module(f"{{package}}.{{found.name}}")
import seatrial.cli.plan
print({HEAVY})
"""
RUN = f"""
import sys
from seatrial.cli.main import main
code = main(sys.argv[1:])
print({HEAVY}, file=sys.stderr)
sys.exit(code)
"""


def python(code: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(seatrial.__file__).parents[1]), "NO_COLOR": "1"}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_no_module_of_the_planner_loads_torch(tmp_path: Path) -> None:
    done = python(LOAD, folder=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


@pytest.mark.cluster  # slow
@pytest.mark.parametrize("options", [("--full", "--plain"), ("--fit", "--json")])
def test_the_verb_does_not_load_torch(options: tuple[str, ...], tmp_path: Path) -> None:
    job = ["plan", str(PRESETS / "llama3-8b-h100.toml"), "--set", "train.global_batch=16"]
    done = python(RUN, *job, *options, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "[]"
    if "--json" in options:
        assert json.loads(done.stdout)["schema_version"]
