"""`seatrial plan` as a command: options, exit codes, files, a dry run, and errors."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from verb_cases import NDR

import seatrial
from presets import preset_file
from seatrial.cli import plan
from seatrial.cli.main import main

SMALL = str(preset_file("llama3-8b-h100"))
REFERENCE = str(preset_file("qwen2.5-72b-b300"))
CPU = str(preset_file("first-voyage"))

Captured = pytest.CaptureFixture[str]


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    plan.add_arguments(parser)
    return parser.parse_args(words)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")


def test_exit_codes(capsys: Captured) -> None:
    assert main(["plan", SMALL, "--own"]) == 0
    assert "verdict      fits" in capsys.readouterr().out
    assert main(["plan", SMALL, "--own", "--set", "train.microbatch=8"]) == 1
    assert "does not fit" in capsys.readouterr().out
    assert main(["plan", CPU]) == 0
    assert "speed is not" in capsys.readouterr().out


def test_reports_all_problems_at_once(capsys: Captured) -> None:
    wrong = ["--network", "foo", "--target", "abc", "--price", "-1", "--storage-gb-s", "0", "--nodes", "0"]
    more = ["--stack", "nemmo", "--fp8", "--dry-run", "99", "--html", "nowhere/plan.html"]
    assert main(["plan", "missing.toml", *wrong, *more]) == 2
    err = capsys.readouterr().err
    for words in (
        'unknown network "foo"',
        '"abc" is no rate, percentage',
        "--price -1",
        "--storage-gb-s 0",
        "--nodes 0",
        'did you mean "nemo"?',
        "--dry-run 99",
        "without --fit and --dry-run",
        "nowhere/plan.html: error: cannot be written",
        "missing.toml: error: no such file",
        "10 problems",
    ):
        assert words in err, words


def test_fp8_of_another_stack(capsys: Captured) -> None:
    """Faster by less than the factor 2 of its peak; unknown where a GPU has none. Our trainer has it by its job file."""
    step_s = {}
    for precision, options in (
        ("bf16", ["--stack", "nemo"]),
        ("fp8", ["--stack", "nemo", "--fp8"]),
        ("ours bf16", []),
        ("ours fp8", ["--set", "train.precision=fp8"]),
    ):
        options = ["--json", "--own", *options]
        assert main(["plan", SMALL, *options]) in (0, 1)
        plan = json.loads(capsys.readouterr().out)
        step_s[precision] = plan["own"]["prediction"]["step_s"]
    assert step_s["bf16"] / 2 < step_s["fp8"] < step_s["bf16"] / 1.1
    assert step_s["ours bf16"] / 2 < step_s["ours fp8"] < step_s["ours bf16"] / 1.1
    assert main(["plan", SMALL, "--fp8"]) == 2
    assert 'train.precision = "fp8" in the job file' in capsys.readouterr().err
    assert main(
        ["plan", SMALL, "--own", "--stack", "nemo", "--fp8", "--set", "cluster.gpu=A100-80GB SXM"]
    ) in (0, 1)
    assert "no peak is known for fp8 on A100" in capsys.readouterr().out


@pytest.mark.parametrize(
    "target",
    ["nan", "-5", "0", "120%", "45 per cent", "1e400", "", "0d", "3651d", "5 days", "5d12h", "9" * 400],
)
def test_a_target_is_a_rate_a_share_or_a_time(target: str, capsys: Captured) -> None:
    assert main(["plan", SMALL, f"--target={target}"]) == 2
    assert "is no rate, percentage" in capsys.readouterr().err


def test_a_target_with_a_comma_or_per_cent(capsys: Captured) -> None:
    assert main(["plan", SMALL, "--own", "--target", "2,500", "--target", "70 %"]) == 0
    out = capsys.readouterr().out
    assert "2,500 tokens/s/GPU is met by the prediction" in out
    assert "MFU 70 % is outside the interval" in out


def test_probability_of_an_end_is_shown_on_request(capsys: Captured) -> None:
    assert main(["plan", SMALL, "--own"]) == 0
    assert "likely" not in capsys.readouterr().out
    assert main(["plan", SMALL, "--own", "--target", "2d", "--target=72 h", "--target", "0.1h"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert re.search(
        r"the end within 2 d: [67]\d % likely, needs 7,\d{3} tokens/s/GPU; 7\d % with microbatch 2, tight ",
        out,
    )
    assert "the end within 3 d: more than 99 % likely, needs " in out
    assert "the end within 0.1 h: less than 1 % likely, needs " in out
    assert out.count("(steps as in their interval, failures at the assumed rate)") == 3


def test_json(capsys: Captured) -> None:
    assert main(["plan", SMALL, "--json", "--price", "2"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["schema_version"] == 1
    assert told["finish"]["cost"] == pytest.approx(2 * told["finish"]["own"]["gpu_hours"])
    assert told["dry_run"] == []


def test_a_tight_layout_exits_with_0(capsys: Captured) -> None:
    keys = (
        "parallel.tensor=1",
        "parallel.async_tensor=false",
        "train.activation_checkpointing=full",
        "train.microbatch=8",
        "train.sequence_length=6144",
    )
    own = ["plan", SMALL, "--own", *(word for key in keys for word in ("--set", key))]
    assert main(own) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "gradients sharded: with whole gradients a GPU needs" in out
    assert "memory fits: " in out
    assert main([*own, "--set", "train.accumulate=whole"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "memory tight: " in out
    assert "verdict tight, " in out
    assert out.count("exceeded their prediction by that much") == 1


def test_fit(capsys: Captured) -> None:
    assert main(["plan", SMALL, "--fit"]) == 0
    out = capsys.readouterr().out
    assert "8.03B parameters: 16.1 GB of weights in bf16, 128 GB of states to train them" in out
    assert "the smallest clusters in which a layout fits" in out
    assert all(len(line) <= 100 for line in out.splitlines())
    assert main(["plan", SMALL, "--fit", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["account"]["weights"]["bf16"] == 2 * told["account"]["parameters"]
    assert all(c["needs_bytes"] <= c["room_bytes"] for c in told["clusters"] if c["fits"])
    assert main(["plan", SMALL, "--fit", "--svg", "a.svg"]) == 2


def test_pictures_and_page(tmp_path: Path, capsys: Captured) -> None:
    assert main(["plan", SMALL, "--own", "--svg", "w.svg", "--html", "p.html"]) == 0
    assert "written: p.html" in capsys.readouterr().err
    assert ElementTree.parse(tmp_path / "w.svg").getroot().tag.endswith("svg")
    page = (tmp_path / "p.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "Plan of llama3-8b-h100" in page
    assert "<script" not in page
    # Of a speed that is not known there is no picture; the page says what is known.
    assert main(["plan", CPU, "--svg", "c.svg"]) == 2
    assert "no chart: the speed is unknown" in capsys.readouterr().err
    assert main(["plan", CPU, "--html", "c.html"]) == 0


def test_measured_rates_are_used(tmp_path: Path, capsys: Captured) -> None:
    reports = tmp_path / "runs" / "llama3-8b-h100" / "reports"
    reports.mkdir(parents=True)
    report = {"schema_version": 1, "measured": {"gpu": {"kind": "NVIDIA A100-SXM4-80GB"}}}
    (reports / "check.json").write_text(json.dumps(report))
    assert main(["plan", SMALL, "--own", "--full"]) == 0
    assert "the job is planned for H100 SXM" in " ".join(capsys.readouterr().out.split())


@pytest.mark.cluster  # slow
def test_an_open_job_is_planned(tmp_path: Path, capsys: Captured) -> None:
    text = Path(SMALL).read_text()
    start, end = text.index("[parallel]"), text.index("[train]")
    (tmp_path / "open.toml").write_text('parallel = "auto"\n' + text[:start] + text[end:])
    assert main(["plan", "open.toml"]) == 0
    out = capsys.readouterr().out
    assert 'the layout chosen by parallel = "auto"' in out
    assert "verdict      fits" in out


def test_another_network_changes_the_speed(capsys: Captured) -> None:
    steps = []
    for name in (NDR, "RoCE 4x100"):
        nodes = ["--set", "cluster.nodes=4", "--set", "train.activation_checkpointing=none"]
        assert main(["plan", SMALL, "--own", "--json", "--network", name, *nodes]) in (0, 1)
        steps.append(json.loads(capsys.readouterr().out)["own"]["prediction"]["step_s"])
    assert steps[0] < steps[1]


@pytest.mark.ci
@pytest.mark.cluster
def test_a_dry_run_is_compared_with_the_closed_form(capsys: Captured) -> None:
    """On CPU the highest point may differ, other kernels being at work; all that is sent and held is the same."""
    assert main(["plan", CPU, "--dry-run", "0", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["dry_run"]
    assert len(told) == 1
    for rank in told[0]["ranks"]:
        for pair in rank["pairs"]:
            if pair["what"] != "highest point of memory":
                assert pair["agrees"], pair
    assert any("CPU kernels" in note for note in told[0]["notes"])


def test_no_torch_and_an_ordinary_pipe() -> None:
    """As a process: no torch, plain lines, and a reader that goes away is no error of ours."""
    code = (
        "import sys; from seatrial.cli.main import main; "
        f"code = main(['plan', {REFERENCE!r}, '--own']); sys.stdout.flush(); "
        "print('torch' in sys.modules, code, file=sys.stderr)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(seatrial.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stderr.strip().endswith("False 0")
    assert "\x1b" not in done.stdout
    assert "verdict" in done.stdout


def test_a_failed_dry_run_loses_no_finished_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("seatrial.plan.report.dryrun_comparison.compare_with_dry_run", stopped)
    with pytest.raises(KeyboardInterrupt):
        plan.run(parsed(SMALL, "--own", "--dry-run", "--json", "--html", "p.html"))
    assert json.loads(capsys.readouterr().out)["dry_run"] == []
    assert "Plan of " in (tmp_path / "p.html").read_text()


def test_a_picture_that_cannot_be_made_loses_no_json(capsys: Captured) -> None:
    assert main(["plan", CPU, "--svg", "c.svg", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["own"]["prediction"] is None


def test_speed_of_experts_is_unknown_other_stacks_refused(capsys: Captured) -> None:
    keys = ("model.preset=qwen3-30b-a3b", "model.num_hidden_layers=4", "train.compile=false")
    experts = ("--own", *(word for key in keys for word in ("--set", key)))
    assert main(["plan", SMALL, *experts, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["own"]["memory_bytes"]["parameters"] > 0
    assert found["own"]["prediction"] is None
    assert "mixture of experts is not modelled" in found["own"]["why_unknown"]
    assert main(["plan", SMALL, *experts, "--stack", "nemo"]) == 2
    assert "experts of the stack nemo are not modelled" in capsys.readouterr().err
    assert main(["plan", SMALL, *experts, "--set", "train.precision=fp32", "--dry-run"]) == 2
    assert "the dry run cannot trace experts in fp32" in capsys.readouterr().err
