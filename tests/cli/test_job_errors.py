"""What a user reads when a job file is wrong: the whole text, through the command.

The verb here only loads the job, so that these texts do not depend on what runs it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import seatrial

SOURCE = Path(seatrial.__file__).parents[1]
LOAD = """
import sys, types
from pathlib import Path
from seatrial.cli import main as command
from seatrial.job import load_job
verb = types.ModuleType("load")
def add_arguments(parser):
    parser.add_argument("job", type=Path)
    parser.add_argument("--set", action="append", default=[], dest="overrides")
def run(args):
    print(load_job(args.job, args.overrides).layout)
    return 0
verb.add_arguments, verb.run = add_arguments, run
sys.modules["load"] = verb
command.VERBS["load"] = ("load", "load a job")
sys.argv[1:1] = ["load"]
command.entry()
"""


def load(folder: Path, text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "job.toml").write_text(text)
    return subprocess.run(
        [sys.executable, "-c", LOAD, "job.toml", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


JOB = """\
name = "trial"

[model]
preset = "qwen2.5-tiny"

[data]
train = "builtin:python-library"

[cluster]
nodes = 2
gpus_per_node = 4

[parallel]
tensor = 2
pipeline = 2

[train]
steps = 200
sequence_length = 256
global_batch = 32
microbatch = 4

[optimizer]
lr = 3e-3
warmup_steps = 20

[checkpoint]
every_steps = 50
"""

BAD = (
    JOB.replace('"qwen2.5-tiny"', '"qwen2.5-tiny"\nnum_key_value_heads = 1')
    .replace("steps = 200", 'steps = "200"', 1)
    .replace("sequence_length = 256", "sequence_length = 255")
    .replace("global_batch = 32", "global_batch = 30")
    .replace("warmup_steps", "warm_up_steps")
    .replace("every_steps = 50", "every_step = 50\nseed = 3")
)

EXPECTED = """\
job.toml:15:10: error: num_key_value_heads 1 is not divisible by tensor 2: a head cannot be split
  15 | tensor = 2
     |          ^
  hint: use tensor = 1
job.toml:19:9: error: train.steps: expected an integer, found the string "200"
  19 | steps = "200"
     |         ^^^^^
  hint: remove the quotes: 200
job.toml:20:19: error: sequence_length 255 is not divisible by 2 x tensor 2 = 4: an uneven sequence-parallel shard aborts the process
  20 | sequence_length = 255
     |                   ^^^
  hint: use sequence_length = 252 or 256
job.toml:21:16: error: global_batch 30 is not divisible by data-parallel size 2 x microbatch 4 = 8
  21 | global_batch = 30
     |                ^^
  hint: use global_batch = 24 or 32
job.toml:26:1: error: unknown key `warm_up_steps` in [optimizer]
  26 | warm_up_steps = 20
     | ^^^^^^^^^^^^^
  hint: did you mean `warmup_steps`?
job.toml:28:2: error: [checkpoint] is missing the key `every_steps`
  28 | [checkpoint]
     |  ^^^^^^^^^^
  hint: add it below the section's header: every_steps = 500
job.toml:29:1: error: unknown key `every_step` in [checkpoint]
  29 | every_step = 50
     | ^^^^^^^^^^
  hint: did you mean `every_steps`?
job.toml:30:1: error: unknown key `seed` in [checkpoint]
  30 | seed = 3
     | ^^^^
  hint: `seed` is a key of [train]
8 problems
"""


def test_all_problems_at_once(tmp_path: Path) -> None:
    done = load(tmp_path, BAD)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == EXPECTED


def test_a_good_job(tmp_path: Path) -> None:
    done = load(tmp_path, JOB)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "tensor 2 x pipeline 2 x shard 2, 1f1b\n"


def test_problems_of_overrides_point_at_them(tmp_path: Path) -> None:
    done = load(tmp_path, JOB, "--set", "train.steps=many", "--set", "parallel.pipeline=8")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        '--set train.steps=many: error: train.steps: expected an integer, found the string "many"\n'
        "--set parallel.pipeline=8: error: tensor 2 x pipeline 8 = 16 does not divide 2 nodes x 4 GPUs = 8 ranks\n"
        "  hint: use pipeline = 1, 2 or 4\n"
        "--set parallel.pipeline=8: error: pipeline 8 needs 8 layers, but the model has only 4\n"
        "  hint: use at most 4 stages\n"
        "3 problems\n"
    )


def test_a_syntax_error(tmp_path: Path) -> None:
    done = load(tmp_path, JOB.replace('name = "trial"', "name = trial"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "job.toml:1:8: error: not valid TOML: invalid value\n"
        "  1 | name = trial\n"
        "    |        ^\n"
        '  hint: text needs double quotes; numbers, true and false need none: name = "voyage"\n'
    )


def test_a_missing_file(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    done = subprocess.run(
        [sys.executable, "-c", LOAD, "jobb.toml"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "jobb.toml: error: no such file\n"
        "  hint: create one: seatrial init --preset first-voyage --out jobb.toml\n"
    )


def test_problems_as_json(tmp_path: Path) -> None:
    done = load(tmp_path, BAD, "--json")
    assert (done.returncode, done.stdout) == (2, "")
    document = json.loads(done.stderr)
    assert document["schema_version"] == 1
    assert len(document["errors"]) == 8
    assert document["errors"][1] == {
        "message": 'train.steps: expected an integer, found the string "200"',
        "file": "job.toml",
        "line": 19,
        "column": 9,
        "hint": "remove the quotes: 200",
    }
