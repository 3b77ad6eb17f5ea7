"""`seatrial validate`: broken jobs are refused at the right place, good ones are not, and nothing is started or written."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import seatrial
from seatrial.cli.main import main
from seatrial.data.prepare import prepare
from seatrial.hardware.host_memory import HostMemory
from seatrial.job import preset_text, presets
from seatrial.job.schema import JobFile
from seatrial.job.validate import SECTIONS
from seatrial.launch import preflight

sys.path.insert(0, str(Path(__file__).parents[1] / "unit/data"))
from chat_cases import MARKED, write_tokenizer

SOURCE = Path(seatrial.__file__).parents[1]
GIB = 1024**3
# What a person fills in, here with what is on every machine.
FILLED = (
    (r'(?m)^train = "data/tokens" .*$', 'train = "builtin:python-library"'),
    (r'(?m)^tokenizer = "<.*$', 'tokenizer = "bytes"'),
    (r'(?m)^launcher = "slurm" .*$', 'launcher = "local"'),
)


def filled(preset: str) -> str:
    text = preset_text(preset)
    for pattern, value in FILLED:
        text = re.sub(pattern, value, text)
    return text


@dataclass
class Said:
    """What a command said and how it ended."""

    code: int
    out: str
    err: str

    @property
    def errors(self) -> list[dict[str, Any]]:
        return list(json.loads(self.err)["errors"])

    def at(self, place: tuple[int, int]) -> list[str]:
        """The problems told at (line, column)."""
        return [e["message"] for e in self.errors if (e["line"], e["column"]) == place]


Validate = Callable[..., Said]


@pytest.fixture
def validate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Validate:
    """Run the verb on a text, in an empty folder, on a host without GPUs that has `gib` of memory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")

    def validate(text: str, *arguments: str, gib: float = 1e6, verb: str = "validate") -> Said:
        monkeypatch.setattr(
            preflight, "host_memory", lambda: HostMemory(round(gib * GIB), "as the test says")
        )
        Path("job.toml").write_bytes(text.encode("utf-8", "surrogateescape"))
        before = {p.name for p in tmp_path.iterdir()}
        capsys.readouterr()
        words = [a for a in arguments if a != "--plain"]
        code = main([verb, "job.toml", *words, *([] if "--plain" in arguments else ["--json"])])
        out, err = capsys.readouterr()
        assert {p.name for p in tmp_path.iterdir()} == before, "it wrote something"
        return Said(code, out, err)

    return validate


@pytest.mark.parametrize("preset", presets())
def test_a_preset_that_is_filled_in_is_accepted(validate: Validate, preset: str) -> None:
    said = validate(filled(preset))
    assert (said.code, said.err) == (0, "")
    assert json.loads(said.out)["layout"]["world_size"] in (8, 128)


FIRST, EIGHT, SEVEN, LARGE = "first-voyage", "llama3-8b-h100", "qwen2.5-7b-h200", "qwen2.5-72b-b300"

# Preset, what stands there, what is put there, what of it the problem must point at (elsewhere: BEFORE^IT), part of the problem.
BROKEN = [
    (FIRST, 'preset = "qwen2.5-tiny"', 'preset = "qwen2.5-tinny"', '"qwen2.5-tinny"', "no built-in model"),
    (FIRST, 'name = "first-voyage"', 'name = "first/voyage"', '"first/voyage"', "is not a valid name for a run folder"),
    (FIRST, "nodes = 2", "nodes = 0", "0", "cluster.nodes must be at least 1"),
    (FIRST, "nodes = 2", "nodes = 1000000", "1000000", "cluster.nodes must be at most 100,000"),
    (FIRST, "gpus_per_node = 4", 'gpus_per_node = "four"', '"four"', "expected an integer"),
    (FIRST, "tensor = 2", "tensor = 3", "3", "does not divide"),
    (FIRST, "pipeline = 2", "pipeline = 8", "8", "the model has only 4"),
    (FIRST, "shard = 2", "shard = 3", "3", "12 ranks, but 2 nodes x 4 GPUs = 8 ranks"),
    (FIRST, 'schedule = "1f1b"', 'schedule = "1f2b"', '"1f2b"', "parallel.schedule: expected"),
    (FIRST, "stages_per_rank = 1", "stages_per_rank = 2", "2", "allows one stage on each rank"),
    (FIRST, "steps = 200", "steps = 0", "0", "train.steps must be at least 1"),
    (FIRST, "steps = 200", "steps = 2e2", "2e2", "expected an integer"),
    (FIRST, "sequence_length = 256", "sequence_length = 255", "255", "is not divisible by 2 x tensor 2"),
    (FIRST, "sequence_length = 256", "sequence_length = 4096", "4096", "max_position_embeddings"),
    (FIRST, "global_batch = 32", "global_batch = 30", "30", "is not divisible by data-parallel size"),
    (FIRST, "global_batch = 32", "global_batch = 320000", "train = ^\"builtin:python-library\"", "fewer than the 81,920,001 of one step"),
    (FIRST, 'precision = "fp32"', 'precision = "fp16"', '"fp16"', 'expected "fp32", "bf16" or "fp8"'),
    (FIRST, "seed = 1234", "seed = -1", "-1", "train.seed must be at least 0"),
    (FIRST, "seed = 1234", "seed = 18446744073709551616", "18446744073709551616", "must be less than"),
    (FIRST, "lr = 3e-3", "lr = 3e300", "3e300", "optimizer.lr must be at most 1"),
    (FIRST, "lr = 3e-3", "lr = 0.0", "0.0", "optimizer.lr must be at least"),
    (FIRST, "lr = 3e-3", "lr = nan", "nan", "finite"),
    (FIRST, "lr = 3e-3", "learning_rate = 3e-3", "learning_rate", "unknown key `learning_rate`"),
    (FIRST, "warmup_steps = 20", "warmup_steps = 201", "201", "more than train.steps"),
    (FIRST, 'decay = "cosine"', 'decay = "step"', '"step"', "optimizer.decay: expected"),
    (FIRST, "weight_decay = 0.1", "weight_decay = inf", "inf", "finite"),
    (FIRST, "weight_decay = 0.1", "weight_decay = 400", "400", "must be at most 100"),
    (FIRST, "clip_norm = 1.0", "clip_norm = 1e-300", "1e-300", "clipped gradients would vanish"),
    (FIRST, "clip_norm = 1.0", '[[optimizer.groups]]\nlr_factor = 0.5\nmatch = "norm"', '"norm"', 'no parameter is named "norm"'),
    (FIRST, "every_steps = 50", 'every_steps = "often"', '"often"', "expected a number of steps"),
    (FIRST, "keep = 3", "keep = 0", "0", "checkpoint.keep must be at least 1"),
    (FIRST, "keep = 3", 'keep = 3\nfolder = "/dev/null/saved"', '"/dev/null/saved"', "/dev/null is not a folder"),
    (FIRST, "snapshot_every_steps = 10", "snapshot_copies = 3", "3", "must be at most 2"),
    (FIRST, "snapshot_every_steps = 10", 'snapshot_copies = "all"', '"all"', 'expected 0, 1, 2 or "auto"'),
    (FIRST, "snapshot_every_steps = 10", "hang_min_s = 1e300", "1e300", "must be at most 2,678,400"),
    (FIRST, "snapshot_every_steps = 10", "silence_s = 0.5", "0.5", "one late heartbeat"),
    (FIRST, '"builtin:python-library"', '"corpus"', '"corpus"', "there is no "),
    (FIRST, '"builtin:python-library"', '"builtin:python"', '"builtin:python"', "no built-in corpus"),
    (FIRST, '"builtin:python-library"', '"s3:/bucket"', '"s3:/bucket"', "there is no "),
    (FIRST, 'tokenizer = "bytes"', 'tokenizer = "job.toml"', '"job.toml"', "is not a tokenizer.json"),
    (FIRST, 'tokenizer = "bytes"', 'tokenizer = "byte"', '"byte"', "does not exist"),
    (FIRST, 'tokenizer = "bytes"', 'tokenizer = "/dev/zero"', '"/dev/zero"', "is not a file"),
    (FIRST, 'tokenizer = "bytes"', 'tokenizer = "a\\u0000b"', '"a\\u0000b"', "does not exist"),
    (FIRST, 'tokenizer = "bytes"', 'tokenizer = "."', '"."', "is a folder"),
    (FIRST, 'launcher = "local"', 'launcher = "lsf"', '"lsf"', "there is no launcher"),
    (FIRST, 'launcher = "local"', 'launcher = "local"\ndevice = "cuda"', '"cuda"', "no CUDA device on this host"),
    (FIRST, 'launcher = "local"', 'launcher = "local"\nport = 80', "80", "cluster.port must be at least 1024"),
    (FIRST, "[optimizer]", "[optimiser]", "optimiser", "unknown section"),
    (EIGHT, 'gpu = "H100 SXM"', 'gpu = "H100 SMX"', '"H100 SMX"', 'unknown GPU "H100 SMX"'),
    (EIGHT, "async_tensor = true", 'async_tensor = "true"', '"true"', "expected true or false"),
    (EIGHT, "tensor = 2", "tensor = 1", "async_tensor = ^true", "async_tensor = true has no effect"),
    (EIGHT, 'preset = "llama3-8b"', 'preset = "llama3-8b"\nrope_theta = 0.5', "0.5", "must be at least 1"),
    (SEVEN, 'preset = "qwen2.5-7b"', 'preset = "qwen2.5-7b"\ninit_from = "weights"', '"weights"', "init_from: no folder"),
    (SEVEN, 'preset = "qwen2.5-7b"', 'hf = "weights"', '"weights"', "weights: no such file"),
    (SEVEN, "microbatch = 2", "microbatch = 3", "global_batch = ^256", "not divisible by data-parallel size 8 x microbatch 3"),
    (LARGE, '"InfiniBand NDR 8x400"', '"InfiniBand NDR 9x400"', '"InfiniBand NDR 9x400"', "unknown network"),
    (LARGE, "tensor = 8", "tensor = 16", "16", "a tensor-parallel group must stay within one node"),
    (LARGE, "preempt_grace_s = 300", "preempt_grace_s = 0", "0", "must be at least 1"),
]  # fmt: skip


def test_there_are_enough_of_them() -> None:
    assert len(BROKEN) >= 40
    assert {preset for preset, *_ in BROKEN} == set(presets())


@pytest.mark.parametrize(
    ("preset", "there", "broken", "caret", "problem"), BROKEN, ids=lambda value: str(value)[:40]
)
def test_a_broken_job_is_refused_at_its_place(
    validate: Validate, preset: str, there: str, broken: str, caret: str, problem: str
) -> None:
    good = filled(preset)
    assert good.count(there) >= 1, "the preset has changed"
    text = good.replace(there, broken, 1)
    before, _, target = caret.rpartition("^")
    at = text.index(before + target, 0 if before else text.index(broken)) + len(before)
    place = (text.count("\n", 0, at) + 1, at - (text.rfind("\n", 0, at) + 1) + 1)
    said = validate(text)
    assert (said.code, said.out) == (2, "")
    assert any(problem in message for message in said.at(place)), f"not at {place}: {said.errors}"
    messages = [e["message"] for e in said.errors]
    assert len(messages) == len(set(messages)), "told twice"
    for verb in ("train", "drill"):
        again = validate(text, verb=verb)
        assert (again.code, again.errors) == (2, said.errors), f"{verb} says something else"
    assert validate(text, "--render", verb="train").errors == said.errors


def test_all_problems_come_at_once_and_in_order(validate: Validate) -> None:
    text = filled(EIGHT)
    for there, broken in (
        ('gpu = "H100 SXM"', 'gpu = "H100 SMX"'),
        ('train = "builtin:python-library"', 'train = "corpus"'),
        ('tokenizer = "bytes"', 'tokenizer = "none.json"'),
        ("lr = 3e-4", "lr = 3e300"),
        ("steps = 10000 ", "stepz = 10000 "),
    ):
        assert there in text
        text = text.replace(there, broken, 1)
    said = validate(text)
    lines = [e["line"] for e in said.errors]
    assert len(lines) == 6, said.errors  # one more: `steps` is missing
    assert lines == sorted(lines)


@pytest.mark.parametrize("preset", [EIGHT, SEVEN, LARGE])
def test_an_unfilled_preset_is_refused(validate: Validate, preset: str) -> None:
    text = preset_text(preset)
    said = validate(text)
    assert said.code == 2
    told = [e for e in said.errors if "is not filled in" in e["message"]]
    assert [text.splitlines()[e["line"] - 1].split()[0] for e in told] == ["tokenizer"]
    assert any("there is no " in e["message"] and "seatrial data prepare" in e["hint"] for e in said.errors)


def test_what_stands_where_the_run_would_save_is_looked_at(validate: Validate, tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    text = preset_text(FIRST).replace("keep = 3", f'keep = 3\nfolder = "{tmp_path}/saved"')
    assert validate(text).code == 0
    (tmp_path / "saved/first-voyage").touch()
    (problem,) = validate(text).errors
    assert problem["message"] == f"{tmp_path}/saved/first-voyage is not a folder"
    assert text.splitlines()[problem["line"] - 1].startswith("folder = ")


# -- memory


def test_model_exceeding_host_memory_is_refused_with_breakdown(validate: Validate) -> None:
    said = validate(filled(LARGE), gib=23)
    assert said.code == 2
    (problem,) = said.errors
    assert re.search(
        r"more host memory than is available: [0-9.]+ TiB \(CPU ranks .*checkpoint staging .* CPU processes \(no CUDA device",
        problem["message"],
    )
    assert "as the test says" in problem["message"]
    assert filled(LARGE).splitlines()[problem["line"] - 1].startswith("preset = ")
    assert problem["hint"] == "start it where its 128 B300 SXM are; --ignore-memory starts anyway"
    for verb in ("train", "drill"):
        assert validate(filled(LARGE), gib=23, verb=verb).errors == said.errors
    ignored = validate(filled(LARGE), "--ignore-memory", gib=23)
    assert ignored.code == 0
    (note,) = json.loads(ignored.out)["notes"]
    assert note.startswith(problem["message"])
    plain = validate(filled(LARGE), "--ignore-memory", "--plain", gib=23)
    assert plain.out.endswith(" seatrial train job.toml --ignore-memory\n"), (
        "what it says next would be refused"
    )
    assert json.loads(ignored.out)["memory"]["snapshot_copies"] == 0


def test_where_the_copies_alone_do_not_fit_there_are_fewer(validate: Validate) -> None:
    text = filled(FIRST).replace(
        'preset = "qwen2.5-tiny"', 'preset = "qwen2.5-tiny"\nhidden_size = 1024\nhead_dim = 256'
    )
    need = json.loads(validate(text).out)["memory"]["host_bytes"] / GIB
    said = validate(text, gib=need - 0.001)
    memory = json.loads(said.out)["memory"]
    assert (said.code, memory["snapshot_copies"]) == (0, 1)
    assert "a run that loses a node resumes from its last checkpoint" in memory["snapshot_copies_reason"]
    asked = text.replace("snapshot_every_steps = 10", "snapshot_copies = 2\nsnapshot_every_steps = 10")
    refused = validate(asked, gib=need - 0.001)
    assert (refused.code, [e["hint"] for e in refused.errors]) == (
        2,
        ['snapshot_copies = 1 or "auto" would fit'],
    )


def test_plan_needs_no_data_or_memory_of_the_target_machines(validate: Validate) -> None:
    for preset in (EIGHT, SEVEN):
        text = preset_text(preset)
        with pytest.MonkeyPatch.context() as nothing:
            nothing.setattr("seatrial.launch.preflight.preflight", None)
            assert validate(text, "--own", verb="plan", gib=0).code == 0


def test_validation_data_is_looked_at_like_training_data(validate: Validate, tmp_path: Path) -> None:
    text = filled(FIRST).replace("[cluster]", 'validation = "other"\n[cluster]', 1)
    text = text.replace("[optimizer]", "validate_every_steps = 50\nvalidate_samples = 9\n[optimizer]", 1)
    line = text.splitlines().index('validation = "other"') + 1
    said = validate(text)
    assert said.code == 2
    (message,) = said.at((line, 14))
    assert message.startswith("there is no ")
    (tmp_path / "text.md").write_text("too short")
    other = Path(message.removeprefix("there is no "))
    prepare([str(tmp_path / "text.md")], "bytes", other)
    (message,) = validate(text).at((line, 14))
    assert message.endswith("0 samples of 256: too few of train.validate_samples = 9")
    (tmp_path / "text.md").write_text("enough text" * 1000)
    prepare([str(tmp_path / "text.md")], "bytes", other, force=True)
    said = validate(text)
    assert said.code == 0
    assert f"validation: {other}: 11k tokens (bytes)" in json.loads(said.out)["data"]


def test_a_chat_template_leaves_the_tokens_of_text_bounded(validate: Validate, tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "chat", MARKED)
    text = re.sub(r"(?m)^tokenizer = .*$", 'tokenizer = "chat/tokenizer.json"', filled(FIRST))
    text = text.replace('preset = "qwen2.5-tiny"', 'preset = "qwen2.5-tiny"\nvocab_size = 400')
    (tmp_path / "short.md").write_text("too short")
    (tmp_path / "short.jsonl").write_text('{"text": "too short"}')
    refused = validate(re.sub(r"(?m)^train = .*$", 'train = "short.md"', text))
    (message,) = [e["message"] for e in refused.errors]
    assert message.endswith("/short.md has at most 28 tokens: fewer than the 8,193 of one step")
    # A conversation may be as long as its template makes it.
    assert validate(re.sub(r"(?m)^train = .*$", 'train = "short.jsonl"', text)).code == 0


# -- as a command


@pytest.mark.cluster  # slow
def test_it_loads_no_torch_and_takes_about_a_second(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(filled(FIRST))
    code = (
        "import sys; from seatrial.cli.main import main; code = main(['validate', 'job']); "
        "print(sorted(m for m in sys.modules if m == 'torch'), code)"
    )

    def spent() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    def once() -> float:
        before = spent()
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert done.stdout.startswith("job.toml: first-voyage could start here\n")
        assert done.stdout.endswith("[] 0\n")
        return spent() - before

    assert min(once() for _ in range(3)) < 1.5
    assert [p.name for p in tmp_path.iterdir()] == ["job.toml"]


def test_a_job_is_found_without_its_suffix(validate: Validate, capsys: pytest.CaptureFixture[str]) -> None:
    validate(filled(FIRST))
    Path("job").mkdir()  # as a model that was exported under that name
    for verb in (["validate"], ["plan", "--own"], ["train", "--render"], ["drill", "--set", "train.stepz=1"]):
        capsys.readouterr()
        code = main([verb[0], "job", *verb[1:]])
        _, err = capsys.readouterr()
        assert code == (2 if verb[0] == "drill" else 0), err
        assert "folder" not in err
    Path("job").rmdir()
    assert main(["validate", "jobb"]) == 2
    assert "jobb: error: no such file" in capsys.readouterr().err


# -- anything: SEATRIAL_FUZZ=20000 tries that many, SEATRIAL_FUZZ_SEED=2 others

FUZZ_COUNT, FUZZ_SEED = (
    int(os.environ.get("SEATRIAL_FUZZ", "300")),
    int(os.environ.get("SEATRIAL_FUZZ_SEED", "1")),
)
VALUES = [
    *("0", "1", "-1", "3", "7", "1000003", "999999999", "10**9", "0x" + "f" * 5000, "1e308", "-0.0", "5e-324", "nan", "-inf"),
    *("true", "[]", "[1, 2]", "{}", '{ factor = 8.0 }', "1979-05-27", "07:32:00", '""', '"auto"', '"bytes"', '"slurm"', '"cuda"'),
    *('"~nobody-of-that-name/x"', '"a\\u0000b"', '"' + "x" * 300 + '"', '"\\u202e"', '"s3://"', '"s3://bucket/prefix"', '"file:///x"'),
    *('"<x>"', '"/proc/self/mem"', '"/dev/null"', '"."', '"/"', '"builtin:"', "'''\n'''", "[[[[[[1]]]]]]"),
]  # fmt: skip
KEYS = [f"{s}.{k}" for s, section in SECTIONS.items() for k in section.model_fields] + list(
    JobFile.model_fields
)


def mutated(draw: random.Random) -> str:
    """A preset with a few things done to its text."""
    text = filled(draw.choice(presets()))
    for _ in range(draw.randint(1, 4)):
        lines = text.split("\n")
        at = draw.randrange(len(lines))
        match draw.randrange(9):
            case 0:
                del lines[at]
            case 1:
                lines.insert(at, lines[draw.randrange(len(lines))])
            case 2 | 3:
                values = [i for i, line in enumerate(lines) if re.match(r"[a-z_0-9]+ = ", line)]
                if values:
                    i = draw.choice(values)
                    lines[i] = f"{lines[i].split(' = ')[0]} = {draw.choice(VALUES)}"
            case 4 | 5:
                section, _, key = draw.choice(KEYS).rpartition(".")
                where = next((i for i, line in enumerate(lines) if line.startswith(f"[{section}]")), 0)
                lines.insert(where + 1 if section else 1, f"{key} = {draw.choice(VALUES)}")
            case 6:
                lines = [
                    'parallel = "auto"',
                    *(
                        line
                        for line in lines
                        if not line.startswith(
                            (
                                "tensor",
                                "pipeline",
                                "shard",
                                "sched",
                                "stages",
                                "resh",
                                "async",
                                "[parallel]",
                                "replicate",
                            )
                        )
                    ),
                ]
            case 7:
                whole = bytearray("\n".join(lines).encode("utf-8", "surrogateescape"))
                if whole:
                    whole[draw.randrange(len(whole))] = draw.randrange(256)
                lines = whole.decode("utf-8", "surrogateescape").split("\n")
            case _:
                i = draw.randrange(len(lines[at]) + 1)
                lines[at] = (
                    lines[at][:i]
                    + draw.choice(["[", "]", '"', "'", "=", "#", ".", "\\", "{", "\t", "é", "\r"])
                    + lines[at][i:]
                )
        text = "\n".join(lines)
    return text


def fuzz(validate: Validate, seed: int, count: int) -> dict[int, int]:
    """How many ended with which exit code."""
    codes: dict[int, int] = {}
    for n in range(count):
        text = mutated(random.Random(f"{seed}/{n}"))
        arguments = ["--ignore-memory"] if n % 2 else []
        said = validate(text, *arguments, gib=8 if n % 3 else 1e6)
        codes[said.code] = codes.get(said.code, 0) + 1
        if said.code == 1 and "s3://bucket" in text:
            continue  # nothing else is wrong with it
        assert said.code in (0, 2), f"seed {seed}/{n}: exit {said.code}\n{said.err}\n{text}"
        if said.code == 2:
            assert said.errors, f"seed {seed}/{n}"
            assert all(e["message"] for e in said.errors)
        else:
            json.loads(said.out)
    return codes


@pytest.mark.cluster
def test_no_job_file_is_a_crash(validate: Validate) -> None:
    codes = fuzz(validate, FUZZ_SEED, FUZZ_COUNT)
    print(codes)
    assert codes[2] > codes[0] > 0
