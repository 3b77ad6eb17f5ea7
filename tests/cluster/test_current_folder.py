"""No verb executes Python modules that lie in the current folder: neither our own process nor any that it starts."""

from __future__ import annotations

import getpass
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

import seatrial
from conftest import ONE_NODE, write_corpus
from seatrial.job.preset_files import preset_text

pytestmark = [pytest.mark.cluster, pytest.mark.ci]

# Whatever is imported anywhere, planted under its name: what Python brings along, and what we depend on.
OTHERS = "seatrial numpy torch rich pydantic safetensors tokenizers pyarrow xxhash zstandard boto3 matplotlib triton"
NAMES = sorted(
    {n for n in sys.stdlib_module_names if not n.startswith("_")}
    | {"sitecustomize", "usercustomize", "typing_extensions", *OTHERS.split()}
)
PLANTED = """import os
with open("/proc/self/cmdline") as command, open(os.environ["PLANTED_TOLD"], "a") as told:
    told.write(__name__ + " by " + " ".join(command.read().split("\\0")[:6]).replace("\\n", " ") + "\\n")
"""
SSH = """#!/bin/sh
# Stands in for ssh: the host is this machine, and its shell begins in the same folder.
while [ "${1#-}" != "$1" ]; do shift; done
shift
exec sh -c "$*"
"""
SMALL = ONE_NODE.replace("steps = 12", "steps = 4").replace("every_steps = 4", "every_steps = 2")
VERBS = (
    "init --preset first-voyage --out first.toml",
    "schema",
    "explain GPU001",
    "plan job.toml",
    "plan job.toml --dry-run",
    "plan big.toml --html plan.html --png plan.png",
    "data prepare corpus --out tokens --workers 2",
    "data export tokens --out pair",
    "data import pair --tokenizer bytes --out imported",
    "data show tokens",
    "data verify tokens",
    "train job.toml --plain",
    "watch small --once",
    "verify small",
    "checkpoints small --verify",
    "export runs/small --out hf",
    "check --from tokens",
    "check job.toml --timeout 20",
    "check --hostfile hosts --stage node all --timeout 20",
    "drill job.toml --only kill_rank",
)
_LONG = (  # each is a process tree that another verb has too
    "plan big.toml --html plan.html --png plan.png",
    "check job.toml --timeout 20",
    "drill job.toml --only kill_rank",
)


class Place:
    """A folder full of modules, and what of them was executed."""

    def __init__(self, folder: Path, names: Iterable[str]) -> None:
        self.folder = folder
        self.told = folder / "told"
        for name in names:
            (folder / f"{name}.py").write_text(PLANTED)
        (folder / "job.toml").write_text(SMALL)
        (folder / "big.toml").write_text(preset_text("llama3-8b-h100"))
        write_corpus(folder)
        (folder / "matplotlibrc").write_text("text.usetex: True\n")  # would start latex
        (folder / "hosts").write_text("127.0.0.2\n127.0.0.3\n")
        (folder / "bin").mkdir()
        (folder / "bin/ssh").write_text(SSH)
        (folder / "bin/ssh").chmod(0o755)
        self.environment = {
            **{
                k: v
                for k, v in os.environ.items()
                if not k.startswith(("PYTHON", "SLURM_", "TORCHINDUCTOR_"))
            },
            "PLANTED_TOLD": str(self.told),
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(folder / "tmp"),
        }
        (folder / "tmp").mkdir()

    def run(self, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=self.folder,
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )

    def executed(self) -> list[str]:
        found = self.told.read_text().splitlines() if self.told.exists() else []
        self.told.unlink(missing_ok=True)
        return found


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("planted"), NAMES)


@pytest.fixture
def few(tmp_path: Path) -> Place:
    """Only modules that Python itself does not need before the first line of ours."""
    return Place(tmp_path, ("shutil", "json", "random", "subprocess", "numpy", "torch"))


def test_what_is_planted_would_be_noticed(place: Place, few: Place) -> None:
    place.run(sys.executable, "-m", "shutil")
    assert place.executed()
    few.run(sys.executable, "-P", "-c", "import json", PYTHONPATH=":/nowhere")
    assert few.executed() == ["json by " + f"{sys.executable} -P -c import json "]


@pytest.mark.parametrize(
    "words", [pytest.param(w, marks=pytest.mark.long if w in _LONG else ()) for w in VERBS]
)
def test_no_verb_executes_what_lies_in_the_current_folder(place: Place, words: str) -> None:
    done = place.run(sys.executable, "-P", "-m", "seatrial", *words.split())
    assert not place.executed()
    # The verb has really done its work: a process that failed at once would prove nothing.
    assert done.returncode in ((0, 1) if words.startswith("check") else (0,)), done.stdout + done.stderr


@pytest.mark.long
def test_compiled_code_is_kept_in_a_private_folder(place: Place) -> None:
    """Nor does what torch asks other Pythons for execute anything of the current folder."""
    foreign = place.folder / "tmp" / f"torchinductor_{getpass.getuser()}"
    foreign.mkdir(mode=0o777, exist_ok=True)  # importing torch has made it already, with nothing in it
    one = "cluster.nodes=1 cluster.gpus_per_node=1 parallel.tensor=1 parallel.pipeline=1 optimizer.warmup_steps=1 train.steps=1 name=compiled model.num_hidden_layers=1"
    words = [word for key in f"{one} train.compile=true".split() for word in ("--set", key)]
    done = place.run(sys.executable, "-P", "-m", "seatrial", "train", "job.toml", "--plain", *words)
    assert not place.executed()
    assert done.returncode == 0, done.stderr
    assert os.listdir(foreign) == []
    (own,) = [p for p in foreign.parent.iterdir() if p != foreign]
    assert (own.name, own.stat().st_mode & 0o777) == (f"seatrial-{os.getuid()}", 0o700)
    assert list(own.rglob("*.so"))  # it was compiled, and kept there


def test_python_m_seatrial_ignores_modules_in_the_current_folder(few: Place) -> None:
    done = few.run(sys.executable, "-m", "seatrial", "plan", "job.toml", "--dry-run")
    assert not few.executed()
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "entries",
    [":/nowhere", *(pytest.param(e, marks=pytest.mark.long) for e in ("/nowhere:", "/nowhere::/nothing"))],
)
def test_an_empty_entry_of_pythonpath_means_nothing(few: Place, entries: str) -> None:
    """As `export PYTHONPATH=$PYTHONPATH:/x` leaves one by accident: to Python it is the current folder."""
    command = Path(sys.executable).with_name("seatrial")
    done = few.run(str(command), "plan", "job.toml", "--dry-run", PYTHONPATH=entries)
    assert not few.executed()
    assert done.returncode == 0, done.stderr


def test_a_folder_in_pythonpath_is_used(few: Place) -> None:
    for said in (".", str(few.folder)):
        few.run(sys.executable, "-P", "-m", "seatrial", "schema", PYTHONPATH=f":{said}")
        assert few.executed()


def test_python_is_started_in_one_place_only() -> None:
    source = Path(seatrial.__file__).parent
    used = {
        str(file.relative_to(source)): len(re.findall(r"\bsys\.executable\b", file.read_text()))
        for file in source.rglob("*.py")
    }
    assert {name: n for name, n in used.items() if n} == {
        "base/process.py": 1,  # process.python
        "check/live/agent_pool.py": 1,  # which interpreter the other hosts are to use, if none is named
        "launch/ssh.py": 2,  # the same; and told, not started
        "check/node/node_storage.py": 1,  # -I -S: without any module of anybody
    }
