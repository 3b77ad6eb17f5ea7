"""The command itself: help, version, verbs, init, schema, exit codes; each as a process of its own."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

import seatrial
from seatrial.job import preset_text, presets

pytestmark = pytest.mark.cluster  # for its time: it starts no cluster

SOURCE = Path(seatrial.__file__).parents[1]
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run the command line in an empty folder."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "COLUMNS": "200", "NO_COLOR": "1"}

    def run(*arguments: str, code: str | None = None) -> subprocess.CompletedProcess[str]:
        program = ["-m", "seatrial"] if code is None else ["-c", code]
        return subprocess.run(
            [sys.executable, *program, *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return run


HELP = """\
usage: seatrial VERB [options]

From bare GPU nodes to a finished foundation-model training run.

verbs:
  init         write a job file from a preset
  schema       print the JSON schema of the job file, for editors
  validate     check whether a job can start here, and list what prevents it
  check        judge whether nodes are fit to train on
  explain      explain a finding of a check
  plan         predict layout, memory, speed and cost of a job
  scale        measure the job's speed at several numbers of nodes
  data         prepare text for training
  train        run a job; the same command again resumes it
  attach       follow a run to its end, wherever it runs
  status       show the state of a run, also as its scheduler sees it
  stop         save the state of a run and end it
  agent        run the agent of one node, as schedulers start it
  drill        inject faults into copies of the job and judge each recovery
  ls           list the runs here and their states
  watch        show a run from its folder
  report       report on a run: plan and measurement, goodput, failures, cost
  bundle       archive a run's records and logs for support, without secrets
  logs         show the logs of a run's ranks and agents
  verify       verify a checkpoint, or a whole run with its samples
  checkpoints  list a run's checkpoints and their states
  export       write a checkpoint as a Hugging Face folder
  completion   print a completion script for bash, zsh or fish

options:
  -h, --help     this text; `seatrial VERB --help` for one verb
  -V, --version  the version

A first run on this machine:
  seatrial init --preset first-voyage
  seatrial train first-voyage.toml
"""


def test_help(run: Run) -> None:
    for option in ("--help", "-h"):
        done = run(option)
        assert (done.returncode, done.stdout, done.stderr) == (0, HELP, "")


def test_no_verb_is_bad_input_with_the_help(run: Run) -> None:
    done = run()
    assert (done.returncode, done.stdout, done.stderr) == (2, "", HELP)


def test_version(run: Run) -> None:
    done = run("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"seatrial {seatrial.__version__}\n", "")


def test_help_loads_nothing_heavy(run: Run) -> None:
    done = run(
        code="import sys; from seatrial.cli.main import main; main(['--help']); "
        "print(sorted(m for m in sys.modules if m.split('.')[0] in ('torch', 'pydantic', 'rich', 'numpy', 'asyncio') "
        "or m.startswith('seatrial.cli.') and m != 'seatrial.cli.main'))"
    )
    assert done.stdout == HELP + "[]\n"


def test_help_takes_at_most_a_fifth_of_a_second_of_a_processor(run: Run) -> None:
    def spent() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    def once() -> float:
        before = spent()
        run("--help")
        return spent() - before

    assert min(once() for _ in range(5)) <= 0.2


@pytest.mark.parametrize(
    ("arguments", "stderr"),
    [
        (("trian",), "error: unknown verb `trian`\n  hint: did you mean `seatrial train`?\n"),
        (
            ("fly",),
            "error: unknown verb `fly`\n  hint: verbs: init, schema, validate, check, explain, plan, scale, data, train, attach, status, stop, agent, drill, ls, watch, report, bundle, logs, verify, checkpoints, export, completion\n",
        ),
        (
            ("--fast",),
            "error: unknown option --fast\n  hint: usage: seatrial VERB [options]; see seatrial --help\n",
        ),
        (
            ("schema", "--fast"),
            "error: unrecognized arguments: --fast\n"
            "  hint: usage: seatrial schema [-h] [--json]; see seatrial schema --help\n",
        ),
        (
            ("init",),
            "error: no preset named\n  hint: seatrial init --preset first-voyage; all: seatrial init --list\n",
        ),
        (
            ("init", "--preset", "first"),
            'error: no preset "first"\n'
            "  hint: known: first-voyage, qwen2.5-7b-h200, llama3-8b-h100, qwen2.5-72b-b300\n",
        ),
        (
            ("init", "--preset", "first-voyage", "--out", "."),
            "error: . is a folder\n  hint: name a file in it: --out seatrial.toml\n",
        ),
        (
            ("init", "--preset", "first-voyage", "--out", "none/job.toml"),
            "error: none/job.toml cannot be written: No such file or directory\n"
            "  hint: name a folder that exists and is writable with --out\n",
        ),
    ],
)
def test_bad_input_exits_2_with_a_hint(run: Run, arguments: tuple[str, ...], stderr: str) -> None:
    done = run(*arguments)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", stderr)


def test_errors_as_json(run: Run) -> None:
    done = run("init", "--preset", "first", "--json")
    assert (done.returncode, done.stdout) == (2, "")
    assert json.loads(done.stderr) == {
        "schema_version": 1,
        "errors": [
            {
                "message": 'no preset "first"',
                "file": None,
                "line": None,
                "column": None,
                "hint": "known: first-voyage, qwen2.5-7b-h200, llama3-8b-h100, qwen2.5-72b-b300",
            }
        ],
    }
    usage = run("schema", "--fast", "--json")
    assert usage.returncode == 2
    assert json.loads(usage.stderr)["errors"][0]["message"] == "unrecognized arguments: --fast"


class TestInit:
    def test_writes_the_preset_and_names_the_next_step(self, run: Run, tmp_path: Path) -> None:
        done = run("init", "--preset", "first-voyage")
        assert (done.returncode, done.stdout, done.stderr) == (
            0,
            "wrote first-voyage.toml\n",
            "next: seatrial train first-voyage.toml\n",
        )
        text = (tmp_path / "first-voyage.toml").read_text()
        assert tomllib.loads(text)["name"] == "first-voyage"
        assert "# sequences a step, whatever the layout" in text

    def test_never_replaces_a_file_unasked(self, run: Run, tmp_path: Path) -> None:
        (tmp_path / "job.toml").write_text("mine")
        done = run("init", "--preset", "first-voyage", "--out", "job.toml")
        assert (done.returncode, done.stdout, done.stderr) == (
            2,
            "",
            "error: job.toml exists\n  hint: --force replaces it; --out FILE writes elsewhere\n",
        )
        assert (tmp_path / "job.toml").read_text() == "mine"
        assert run("init", "--preset", "first-voyage", "--out", "job.toml", "--force").returncode == 0
        assert "qwen2.5-tiny" in (tmp_path / "job.toml").read_text()
        assert [p.name for p in tmp_path.iterdir()] == ["job.toml"]

    def test_json(self, run: Run, tmp_path: Path) -> None:
        done = run("init", "--preset", "llama3-8b-h100", "--json")
        assert json.loads(done.stdout) == {
            "schema_version": 1,
            "preset": "llama3-8b-h100",
            "file": "llama3-8b-h100.toml",
            "next": "seatrial validate llama3-8b-h100.toml",
        }
        assert done.stderr == ""

    def test_keys_to_fill_in_are_listed(self, run: Run) -> None:
        done = run("init", "--preset", "llama3-8b-h100")
        assert done.stderr == "next: seatrial validate llama3-8b-h100.toml\n"

    def test_a_dash_prints_it(self, run: Run, tmp_path: Path) -> None:
        done = run("init", "--preset", "first-voyage", "--out", "-")
        assert (done.returncode, done.stdout, done.stderr) == (0, preset_text("first-voyage"), "")
        document = json.loads(run("init", "--preset", "first-voyage", "--out", "-", "--json").stdout)
        assert document == {
            "schema_version": 1,
            "preset": "first-voyage",
            "text": preset_text("first-voyage"),
        }
        assert list(tmp_path.iterdir()) == []

    def test_list(self, run: Run) -> None:
        done = run("init", "--list")
        assert done.returncode == 0
        lines = done.stdout.splitlines()
        assert [line.split()[0] for line in lines] == [
            "first-voyage",
            "qwen2.5-7b-h200",
            "llama3-8b-h100",
            "qwen2.5-72b-b300",
        ]
        assert lines[3] == (
            "qwen2.5-72b-b300  The reference run: Qwen2.5-72B on 16 nodes of eight B300 (128 GPUs), started by Slurm."
        )
        document = json.loads(run("init", "--list", "--json").stdout)
        assert document["schema_version"] == 1
        assert [p["name"] for p in document["presets"]] == [line.split()[0] for line in lines]


def test_schema(run: Run) -> None:
    done = run("schema")
    assert (done.returncode, done.stderr) == (0, "")
    schema = json.loads(done.stdout)
    assert schema["title"] == "Seatrial job file"
    assert schema["additionalProperties"] is False
    assert schema["required"] == ["name", "model", "data", "train", "optimizer", "checkpoint"]
    batch = schema["$defs"]["TrainSection"]["properties"]["global_batch"]
    assert batch["description"] == "sequences a step, whatever the layout"
    document = json.loads(run("schema", "--json").stdout)
    assert document == {"schema_version": 1, "schema": schema}


def test_the_schema_knows_names_and_a_preset_names_the_schema(run: Run) -> None:
    schema = json.loads(run("schema").stdout)
    for section, key, name in (
        ("ModelSection", "preset", "qwen2.5-tiny"),
        ("ClusterSection", "gpu", "B300 SXM"),
        ("ClusterSection", "gpu", "H100 80GB HBM3"),
        ("ClusterSection", "network", "InfiniBand NDR 8x400"),
    ):
        known = schema["$defs"][section]["properties"][key]["anyOf"][0]["enum"]
        assert name in known
        assert len(known) == len(set(known)), "JSON schema: SHOULD be unique"
    for preset in presets():
        first, *more = preset_text(preset).splitlines()
        assert first == "#:schema ./seatrial.schema.json"
        assert any(line.endswith(": seatrial schema > seatrial.schema.json") for line in more)


FAILING = """
import argparse, sys, types
from seatrial.base.errors import RunFailed
from seatrial.cli import main as command
verb = types.ModuleType("failing")
verb.add_arguments = lambda parser: parser.add_argument("--json", action="store_true", help="its own")
def run(args):
    {body}
verb.run = run
sys.modules["failing"] = verb
command.VERBS["failing"] = ("failing", "fail")
sys.argv[1:1] = ["failing"]
command.entry()
"""


@pytest.mark.parametrize(
    ("body", "code", "stderr"),
    [
        ("return 75", 75, ""),
        (
            "raise RunFailed('rank 3 died', hint='see its log')",
            1,
            "error: rank 3 died\n  hint: see its log\n",
        ),
        ("raise KeyboardInterrupt", 130, "interrupted\n"),
        ("raise SystemExit(7)", 7, ""),
    ],
)
def test_how_a_verb_ends_is_the_exit_code(run: Run, body: str, code: int, stderr: str) -> None:
    done = run(code=FAILING.format(body=body))
    assert (done.returncode, done.stdout, done.stderr) == (code, "", stderr)


def test_a_bug_is_reported_as_one(run: Run) -> None:
    done = run(code=FAILING.format(body="1 / 0"))
    assert done.returncode == 3
    assert done.stderr.startswith("Traceback (most recent call last):\n")
    assert done.stderr.endswith(
        "internal error: ZeroDivisionError: division by zero\n"
        "  hint: this is a bug in Seatrial: please report it with the traceback and the command\n"
    )
    document = json.loads(run("--json", code=FAILING.format(body="1 / 0")).stderr)
    assert document["errors"][0]["message"] == "internal error: ZeroDivisionError: division by zero"
    assert "1 / 0" in document["traceback"] or "run" in document["traceback"]


@pytest.mark.parametrize("arguments", [["schema"], ["--version"]])
def test_a_reader_that_leaves_causes_no_traceback(tmp_path: Path, arguments: list[str]) -> None:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    process = subprocess.Popen(
        [sys.executable, "-m", "seatrial", *arguments],
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    with process.stderr:
        assert process.stderr.read() == b""
    assert process.wait(timeout=60) == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_an_answer_that_a_full_disk_did_not_take_was_not_given(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "seatrial", "explain", "MSR005"],
            cwd=tmp_path,
            env=environment,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 1
    assert "No space left on device" in done.stderr


def test_names_that_are_not_utf8(run: Run, tmp_path: Path) -> None:
    source, out = os.fsdecode(b"caf\xe9.txt"), os.fsdecode(b"store-\xe9")
    (tmp_path / source).write_text("text")
    made = run("data", "prepare", source, "--out", out)
    assert (made.returncode, made.stdout.splitlines()[0]) == (0, "folder      store-\\udce9")
    shown = run("data", "show", out, "--json")
    assert (shown.returncode, json.loads(shown.stdout)["folder"]) == (0, out)
