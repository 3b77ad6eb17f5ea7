"""`seatrial drill` without a run: what it lists and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cluster  # for its time: it starts no cluster

JOB = """
name = "small"
[model]
preset = "qwen2.5-tiny"
[data]
train = "builtin:python-library"
[train]
steps = 200
sequence_length = 64
global_batch = 4
[optimizer]
lr = 1e-3
[checkpoint]
every_steps = 10
"""


def drill(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "job.toml").write_text(JOB)
    return subprocess.run(
        [sys.executable, "-m", "seatrial", "drill", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_list_needs_no_job(tmp_path: Path) -> None:
    done = drill(tmp_path, "--list")
    assert done.returncode == 0
    assert done.stdout.splitlines()[0].startswith("kill_rank ")
    assert len(done.stdout.splitlines()) == 30
    assert done.stderr == ""


def test_the_list_as_json(tmp_path: Path) -> None:
    document = json.loads(drill(tmp_path, "--list", "--json", "--only", "storm,xid_94").stdout)
    assert document["schema_version"] == 1
    assert [s["name"] for s in document["scenarios"]] == ["storm", "xid_94"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "JOB is missing"),
        (("job.toml", "--only", "earthquake"), "there is no scenario earthquake"),
        (("job.toml", "--only", "kill_rnak"), "did you mean kill_rank or kill_two_ranks?"),
        (("job.toml", "--steps", "3"), "--steps 3 is too few"),
        (("job.toml", "--seconds", "-1"), "--seconds -1"),
        (("absent.toml",), "no such file"),
        (("job.toml", "--set", 'cluster.launcher="slurm"'), "virtual cluster on this machine"),
    ],
)
def test_bad_input_is_refused_before_anything_is_made(
    tmp_path: Path, arguments: tuple[str, ...], says: str
) -> None:
    done = drill(tmp_path, *arguments)
    assert done.returncode == 2
    assert says in done.stderr
    assert "hint:" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_help_loads_no_torch(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "import seatrial.cli.drill, seatrial.drill.conduct, seatrial.drill.report\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
