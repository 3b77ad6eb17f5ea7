"""Packages as pip installs them, for a test's process and those that it starts."""

from __future__ import annotations

import os
import tomllib
import uuid
from collections.abc import Mapping
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def install(groups: Mapping[str, Mapping[str, str]], site: Path, patch: pytest.MonkeyPatch) -> None:
    """The metadata of a package with these entry points (group -> name -> object); its modules belong into `site`."""
    name = f"extra_{uuid.uuid4().hex}"
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    points = ((f"[{group}]", *(f"{n} = {o}" for n, o in names.items())) for group, names in groups.items())
    (info / "entry_points.txt").write_text("\n".join(line for lines in points for line in lines))
    _on_path(site, patch)


def install_examples(site: Path, patch: pytest.MonkeyPatch) -> None:
    """The package under examples/."""
    project = tomllib.loads((EXAMPLES / "pyproject.toml").read_text())["project"]
    install(project["entry-points"], site, patch)
    _on_path(EXAMPLES, patch)


def _on_path(folder: Path, patch: pytest.MonkeyPatch) -> None:
    patch.syspath_prepend(os.fspath(folder))
    patch.setenv("PYTHONPATH", os.fspath(folder), prepend=os.pathsep)
