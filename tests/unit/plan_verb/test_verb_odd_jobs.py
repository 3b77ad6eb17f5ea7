"""Odd jobs: the verb answers each or reports what is wrong, and invents no values."""

from __future__ import annotations

import contextlib
import io
import json
import math
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from seatrial.cli.main import main

JOB = """name = "odd"
{open}
[model]
preset = "{preset}"
[data]
train = "data/tokens"
[cluster]
launcher = "slurm"
nodes = {nodes}
gpus_per_node = {per_node}
{cluster}
{parallel}
[train]
steps = {steps}
sequence_length = {sequence}
global_batch = {batch}
microbatch = {micro}
precision = "{precision}"
compile = {compiled}
[optimizer]
lr = 1e-4
[checkpoint]
every_steps = {every}
"""
PLAIN = {
    "open": "",
    "preset": "qwen2.5-7b",
    "nodes": 1,
    "per_node": 8,
    "cluster": 'gpu = "H100 SXM"',
    "parallel": "[parallel]",
    "steps": 1000,
    "sequence": 4096,
    "batch": 64,
    "micro": 1,
    "precision": "bf16",
    "compiled": "false",
    "every": 100,
}


def plan(folder: Path, *options: str, **changed: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the verb for this job."""
    file = folder / "odd.toml"
    file.write_text(JOB.format(**PLAIN | changed), encoding="utf-8")
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["plan", str(file), "--runs", str(folder / "runs"), *options])
    return code, out.getvalue(), err.getvalue()


def endless(value: Any, at: str = "") -> Iterator[str]:
    """Where a document has a number that is none."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from endless(inner, f"{at}.{key}")
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from endless(inner, f"{at}[{i}]")
    elif isinstance(value, float) and not math.isfinite(value):
        yield at


def judge(code: int, out: str, err: str) -> dict[str, Any]:
    """What must hold of every answer; the document, empty for a refusal."""
    assert code in (0, 1, 2), err
    if code == 2:
        assert "error" in err
        assert "hint" in err
        return {}
    told: dict[str, Any] = json.loads(out)
    assert list(endless(told)) == []
    own = told["own"]
    assert (own["fits"] is False) == (code == 1)
    p = own["prediction"]
    if p is None:
        assert own["why_unknown"]
        return told
    assert sum(w["share"] for w in p["waterfall"]) == pytest.approx(1)
    assert min(w["share"] for w in p["waterfall"]) > -1e-9
    assert p["low_s"] < p["step_s"] < p["high_s"]
    assert 0 < p["mfu"] < 1
    search = told.get("search")
    if search and search["own_costs"] is not None and own["fits"]:
        assert search["own_costs"] >= 0
    return told


@st.composite
def jobs(draw: st.DrawFn) -> dict[str, object]:
    """Mostly jobs that can be: sizes that divide each other, on hardware that is known or not."""
    preset = draw(st.sampled_from(["qwen2.5-0.5b", "llama3.2-1b", "llama3-8b", "qwen2.5-72b"]))
    nodes, per_node = draw(st.sampled_from([1, 2, 3, 4, 16])), draw(st.sampled_from([1, 2, 4, 8]))
    tensor = draw(st.sampled_from([t for t in (1, 2, 4, 8) if per_node % t == 0]))
    rest = nodes * per_node // tensor
    pipeline = draw(st.sampled_from([p for p in (1, 2, 3, 4) if rest % p == 0]))
    parallel = [f"tensor = {tensor}", f"pipeline = {pipeline}"]
    schedule, stages = "1f1b", 1
    if pipeline > 1:
        schedule, stages = draw(
            st.sampled_from([("1f1b", 1), ("gpipe", 1), ("interleaved-1f1b", 2), ("zero-bubble", 2)])
        )
        parallel += [f'schedule = "{schedule}"', f"stages_per_rank = {stages}"]
    if schedule == "zero-bubble":
        parallel.append("reshard_after_forward = false")
    micro = draw(st.sampled_from([1, 2, 3, 16]))
    cluster = []
    if card := draw(st.sampled_from(["H100 SXM", "A100-40GB SXM", "MI300X", "H900 SXM", ""])):
        cluster.append(f'gpu = "{card}"')
    if draw(st.booleans()):
        cluster.append('network = "RoCE 8x200"')
    auto = draw(st.sampled_from([False, False, False, True]))
    return {
        "open": 'parallel = "auto"' if auto else "",
        "preset": preset,
        "nodes": nodes,
        "per_node": per_node,
        "cluster": "\n".join(cluster),
        "parallel": "" if auto else "\n".join(["[parallel]", *parallel]),
        "steps": draw(st.sampled_from([1, 1000, 10**9])),
        "sequence": draw(st.sampled_from([16, 512, 8192])),
        "batch": rest // pipeline * micro * pipeline * draw(st.integers(1, 4)),
        "micro": micro,
        "precision": draw(st.sampled_from(["bf16", "bf16", "fp32"])),
        "compiled": "false" if schedule == "zero-bubble" else draw(st.sampled_from(["true", "false"])),
        "every": draw(st.sampled_from(['"auto"', "1", "100", "1000000000"])),
    }


@pytest.mark.cluster  # slow
@given(changed=jobs(), stack=st.sampled_from(["seatrial", "nemo"]), storage=st.sampled_from(["0.001", "20"]))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_job_is_answered_or_refused(changed: dict[str, object], stack: str, storage: str) -> None:
    options = ("--json", "--own", "--stack", stack, "--storage-gb-s", storage)
    with TemporaryDirectory() as folder:
        judge(*plan(Path(folder), *options, **changed))


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"nodes": 3, "batch": 24 * 7}, 0),
        ({"nodes": 7, "per_node": 7, "batch": 49}, 0),
        ({"per_node": 1, "batch": 8, "preset": "qwen2.5-72b"}, 1),
        ({"per_node": 1, "batch": 1, "sequence": 1, "preset": "qwen2.5-tiny", "steps": 1, "every": 1}, 0),
        ({"micro": 3, "batch": 48}, 1),
        ({"micro": 3}, 2),
        ({"batch": 4}, 2),
        ({"cluster": 'device = "cpu"'}, 0),
        ({"cluster": 'gpu = "A100-80GB PCIe"', "nodes": 2}, 0),  # no network is known
        ({"cluster": 'gpu = "H100 SXM"\nnetwork = "Token Ring"', "nodes": 2}, 2),
        ({"parallel": "[parallel]\ncontext = 2"}, 0),
        ({"parallel": "[parallel]\nexpert = 2"}, 2),
        ({"parallel": "[parallel]\npipeline = 28", "nodes": 7, "per_node": 4, "batch": 56}, 0),
        ({"open": 'parallel = "auto"', "parallel": ""}, 0),
    ],
)
def test_odd_jobs(changed: dict[str, object], code: int, tmp_path: Path) -> None:
    found, out, err = plan(tmp_path, "--json", "--own", **changed)
    assert found == code, err
    judge(found, out, err)


@pytest.mark.cluster  # slow
def test_searched_layouts_are_never_worse(tmp_path: Path) -> None:
    found = judge(*plan(tmp_path, "--json", micro=12, batch=96, sequence=256))
    assert found["search"]["own_costs"] >= 0


def test_no_file_is_lost(tmp_path: Path) -> None:
    """A picture in the place of the job, or two in one file."""
    file = tmp_path / "odd.toml"
    for options in (("--svg", str(file)), ("--svg", str(tmp_path / "a"), "--html", str(tmp_path / "a"))):
        code, _, err = plan(tmp_path, "--own", *options)
        assert code == 2
        assert "lost" in err or "twice" in err
    assert file.read_text(encoding="utf-8").startswith('name = "odd"')
