"""What a person sees: plain lines, the live lines, the summary; everything from the run folder."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from presets import preset_job
from seatrial.base import units
from seatrial.record import events, lock
from seatrial.record.failure import Failure, RankError
from seatrial.record.folder import RunFolder
from seatrial.record.ledger import LedgerRecord, LedgerWriter
from seatrial.record.metrics import MetricsRecord, MetricsWriter
from seatrial.record.view import read_view
from seatrial.ui import figures
from seatrial.ui.console import TrainConsole
from seatrial.ui.live import LivePane, pane
from seatrial.ui.out import Out
from seatrial.ui.summary import live_pairs, print_status, summary_json

RECORD = MetricsRecord(
    50, 409600, 2.43124, 0.834, 3e-3, 0.48, 0.01, 9120.4, 1140.05, None, 312 * 2**20, 1.7e9, 1
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "a-run")
    folder.control.mkdir(parents=True)
    folder.job_toml.write_text("[train]\nsteps = 200\nglobal_batch = 32\nsequence_length = 256\n")
    return folder


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    return Terminal()


def write(folder: RunFolder, first: int, last: int, **changes: Any) -> None:
    metrics, ledger = MetricsWriter(folder), LedgerWriter(folder)
    for n in range(first, last + 1):
        record = dataclasses.replace(RECORD, step=n, tokens=n * 8192, loss=5.0 - n / 100, time=time.time())
        record = dataclasses.replace(record, **changes)
        metrics.write(record)
        ledger.write(LedgerRecord(n, (n - 1) * 32, n * 32, record.generation))
    metrics.close()
    ledger.close()


def console(folder: RunFolder, stream: io.StringIO, **options: Any) -> TrainConsole:
    return TrainConsole(folder, **({"total_steps": 200, "generation": 1, "stream": stream} | options))


def test_plain_line() -> None:
    assert figures.step_line(RECORD, 200, 72.4, "GPU") == (
        "step  50/200  loss 2.4312  grad 0.83  tok/s 9,120  tok/s/GPU 1,140  MFU unknown  mem 312 MiB  "
        "ETA 1 min 12 s"
    )
    better = dataclasses.replace(RECORD, loss=math.nan, mfu=0.4123, memory_bytes=None, step=5)
    assert figures.step_line(better, None, None, "rank") == (
        "step      5  loss nan  grad 0.83  tok/s 9,120  tok/s/rank 1,140  MFU 41.2 %  mem unknown  ETA unknown"
    )


def test_metrics_of_other_packages_are_shown(folder: RunFolder) -> None:
    more = {"perplexity": 11.3712, "watts\x1b": math.nan}
    assert figures.step_line(dataclasses.replace(RECORD, extra=more), 200, 72.4, "GPU").endswith(
        "mem 312 MiB  perplexity 11.37, watts\N{REPLACEMENT CHARACTER} nan  ETA 1 min 12 s"
    )
    write(folder, 1, 3, extra=more)
    view = read_view(folder)
    assert view.last is not None
    said = io.StringIO()
    print_status(Out(said), view, time.time())
    assert re.search(r"metrics +perplexity 11.37, watts", said.getvalue())
    assert json.loads(summary_json(view, time.time()))["extra"] == {
        "perplexity": 11.3712,
        "watts\x1b": "NaN",
    }
    assert [pair.text for pair in live_pairs(view, 0.0) if pair.label == "metrics"] == [
        figures.extra(view.last)
    ]


def test_the_load_of_experts_is_shown(folder: RunFolder) -> None:
    assert figures.experts(RECORD) == ""
    load = {"router_aux_loss": 2.5, "expert_load_max": 1.84, "expert_load_min": 0.3125, "idle_experts": 2}
    write(folder, 1, 3, **load)
    view = read_view(folder)
    said = io.StringIO()
    print_status(Out(said), view, time.time())
    text = "load 0.31 to 1.84 of the mean, 2 idle, balance loss 2.5000"
    assert re.search(rf"experts +{text}\n", said.getvalue())
    assert [pair.text for pair in live_pairs(view, 0.0) if pair.label == "experts"] == [text]
    assert load.items() <= json.loads(summary_json(view, time.time())).items()


def test_steps_and_events_in_the_order_they_happened(folder: RunFolder) -> None:
    out = io.StringIO()
    view = console(folder, out)
    write(folder, 1, 1)
    events.append(folder, "loss_spike", "loss jumped", severity="warning", generation=1, node=0, rank=3)
    events.append(folder, "agent_started", "not worth a line", generation=1)
    write(folder, 2, 2)
    events.append(folder, "checkpoint_saved", "checkpoint of step 2", generation=1)
    view.poll()
    view.poll()
    lines = out.getvalue().splitlines()
    assert [line[:26] for line in lines] == [
        "step   1/200  loss 4.9900 ",
        "warning on node 0 rank 3: ",
        "step   2/200  loss 4.9800 ",
        "  checkpoint of step 2",
    ]
    assert lines[0].endswith("ETA unknown")  # a first step tells nothing of those that follow
    assert lines[2].endswith("ETA 1 min 35 s")


def test_only_its_own_generation(folder: RunFolder) -> None:
    out = io.StringIO()
    write(folder, 1, 3)
    events.append(folder, "rank_failed", "old trouble", severity="error", generation=1)
    view = console(folder, out, generation=2)
    write(folder, 3, 3, generation=2)
    view.poll()
    assert [line[:12] for line in out.getvalue().splitlines()] == ["step   3/200"]


def test_damaged_lines_are_reported_once(folder: RunFolder) -> None:
    out = io.StringIO()
    view = console(folder, out)
    folder.metrics.write_bytes(b'\xff\n{"step": 1}\n')
    folder.events.write_bytes(b"x\n")
    view.poll()
    view.poll()
    assert [line[:44] for line in out.getvalue().splitlines()] == [
        "warning: events.jsonl:1: not an event (not J",
        "warning: metrics.jsonl:1: not a metrics reco",
        "warning: metrics.jsonl:2: not a metrics reco",
    ]


@pytest.mark.parametrize("why", ["plain", "NO_COLOR", "dumb"])
def test_plain_lines_on_a_terminal(
    folder: RunFolder, terminal: Terminal, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    if why == "NO_COLOR":
        monkeypatch.setenv("NO_COLOR", "1")
    if why == "dumb":
        monkeypatch.setenv("TERM", "dumb")
    with console(folder, terminal, plain=why == "plain") as view:
        write(folder, 1, 2)
        view.poll()
    assert "\x1b" not in terminal.getvalue()
    assert terminal.getvalue().count("step ") == 2


def test_live_lines_on_a_terminal(folder: RunFolder, terminal: Terminal) -> None:
    with console(folder, terminal) as view:
        view.poll()
        assert "starting: no step yet" in terminal.getvalue()
        write(folder, 1, 50)
        events.append(folder, "checkpoint_saved", "checkpoint of step 50", generation=1)
        view.poll()
    text = terminal.getvalue()
    assert "checkpoint of step 50" in text
    assert " 50/200" in text
    assert " 49/200" not in text  # drawn in place, not a line a step
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is given back


@pytest.mark.parametrize("total", [None, 200, 1_000_000])
def test_live_lines_fit_80_columns(total: int | None) -> None:
    from rich.console import Console, Group

    out = io.StringIO()
    record = dataclasses.replace(RECORD, tokens_per_s=319_000.0, tokens_per_s_per_gpu=2500.0, mfu=0.48)
    Console(file=out, width=80).print(Group(*pane(record, total, 72.0, 0.0)))
    lines = out.getvalue().splitlines()
    assert len(lines) == 2
    assert all(len(line) <= 80 for line in lines)
    assert "mem 312 MiB" in lines[1]


def test_header(folder: RunFolder, tmp_path: Path) -> None:
    job = preset_job("first-voyage", folder=tmp_path)
    out = io.StringIO()
    view = console(folder, out, generation=3)
    view.header(
        job,
        device="cpu",
        device_reason="no CUDA device here",
        data_summary="builtin:python-library, 9.9M tokens",
        notes=["renamed the old run: a is now b"],
        resume_step=50,
    )
    text = out.getvalue()
    for piece in (
        "first-voyage\n",
        "qwen2, ",
        "8 ranks on 2 nodes x 4",
        "8,192 tokens per step",
        "9.9M tokens",
        "cpu (no CUDA device here)",
        f"every {job.checkpoint.every_steps} steps",
        str(folder.path),
        "resumes, newest checkpoint step 50, generation 3",
        "renamed the old run: a is now b",
    ):
        assert piece in text
    assert all(len(line) <= 80 for line in text.splitlines() if str(folder.path) not in line)


def test_summary_of_a_finished_run(folder: RunFolder) -> None:
    out = io.StringIO()
    write(folder, 1, 200)
    events.append(
        folder, "sample", "s", generation=1, data={"prompt": "def ", "text": "f():\n    \x1b[2Jreturn\n"}
    )
    view = console(folder, out)
    view.poll()
    before = len(out.getvalue())
    view.summary(view.ended("finished"))
    text = out.getvalue()[before:]
    assert "a-run finished: step 200 of 200" in text
    assert "loss         4.9900 -> 3.0000" in text
    assert "9,120 tokens/s (median), 1,140 a rank, MFU unknown" in text
    assert "200 steps, every sample seen once" in text
    assert "  | def f():\n  |     \N{REPLACEMENT CHARACTER}[2Jreturn\n" in text
    assert f"next         seatrial watch {folder.path} --once" in text


def test_summary_of_a_failed_run(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    out = io.StringIO()
    write(folder, 1, 3)
    error = folder.rank_error(1, 1, 5)
    error.parent.mkdir(parents=True)
    trace = "Traceback\n" + "".join(f"  line {i}\n" for i in range(40)) + "ValueError: boom\n"
    written = RankError(1e9, 5, 1, "ValueError", "boom", trace, False, 1, "look there")
    error.write_text(json.dumps(vars(written)))
    folder.rank_log(1, 1, 5).touch()
    view = console(folder, out, json_output=True)
    failure = Failure(1, 5, "rank 5 on node 1: ValueError: boom", "ValueError: boom", 1e9)
    view.summary(view.ended("failed", failure=failure), ["seatrial train job.toml"])
    text = out.getvalue()
    assert "a-run failed: step 3 of 200" in text
    assert "where        node 1, rank 5" in text
    assert "cause        ValueError: boom" in text
    assert "line 39\n" in text
    assert "line 20\n" not in text
    assert str(folder.rank_log(1, 1, 5)) in text
    assert "look there" in text
    assert "next         seatrial train job.toml" in text
    document = json.loads(capsys.readouterr().out)
    assert (document["schema_version"], document["state"], document["step"]) == (1, "failed", 3)
    assert document["failure"]["traceback"] == trace
    assert document["next_commands"] == ["seatrial train job.toml"]


def test_summary_finds_the_failure_itself(folder: RunFolder) -> None:
    out = io.StringIO()
    events.append(
        folder,
        "run_failed",
        "m",
        severity="error",
        generation=1,
        data={"node": 0, "rank": 2, "cause": "killed"},
    )
    view = console(folder, out)
    view.summary(view.ended("failed"))
    assert "a-run failed: no step completed" in out.getvalue()
    assert "node 0, rank 2" in out.getvalue()
    assert "killed" in out.getvalue()


def test_gaps_and_damage_are_in_the_summary(folder: RunFolder) -> None:
    out = io.StringIO()
    write(folder, 1, 2)
    write(folder, 4, 4)
    folder.ledger.write_bytes(folder.ledger.read_bytes() + b"?\n")
    view = console(folder, out)
    view.summary(view.ended("finished"))
    assert "ledger       step 3 is missing" in out.getvalue()
    assert "damaged      ledger.jsonl:4: not a ledger record" in out.getvalue()


def test_status_of_a_run_with_nan_loss(folder: RunFolder) -> None:
    out = io.StringIO()
    write(folder, 1, 3, loss=math.nan, grad_norm=math.inf, tokens_per_s=math.inf)
    print_status(Out(out), read_view(folder), time.time())
    assert "loss         nan -> nan  !!!" in out.getvalue()
    assert "grad norm    inf" in out.getvalue()


def test_spark() -> None:
    assert figures.spark([1.0]) == ""
    assert figures.spark([8.0, 1.0]) == "█▁"
    assert figures.spark([2.0, 2.0, 2.0]) == "▁▁▁"
    assert figures.spark([3.0, math.nan, 1.0]) == "█!▁"
    assert len(figures.spark([float(i) for i in range(1000)])) == 40


def test_printable_takes_control_of_the_terminal_away() -> None:
    assert figures.printable("a\tb\r\nc\n") == "a\tb\nc\n"
    assert figures.printable("\x1b]0;x\x07\x9b\u202e\udc80é") == "�]0;x����é"


# -- what was left out


@pytest.fixture
def left_out(folder: RunFolder) -> RunFolder:
    """Ten steps, of which the 4th, the 5th and the last were left out."""
    folder.job_toml.write_text("[train]\nsteps = 10\nglobal_batch = 32\nsequence_length = 256\n")
    events.append(folder, "run_started", "8 ranks", generation=1)
    events.append(folder, "device", "cpu: its peak is unknown", generation=1, data={"device": "cpu"})
    metrics, ledger = MetricsWriter(folder), LedgerWriter(folder)
    for n in range(1, 11):
        skipped = n in (4, 5, 10)
        ledger.write(LedgerRecord(n, (n - 1) * 32, n * 32, 1, skipped))
        if skipped:
            data = {"step": n, "evidence": {"action": "skip"}}
            events.append(
                folder, "nonfinite", "nan", severity="warning", generation=1, node=0, rank=1, data=data
            )
            events.append(folder, "step_skipped", f"step {n} was skipped", generation=1, rank=0, data=data)
        else:
            metrics.write(dataclasses.replace(RECORD, step=n, tokens=n * 8192, time=time.time()))
    metrics.close()
    ledger.close()
    events.append(folder, "run_finished", "all 10 steps are done", generation=1)
    return folder


def test_every_view_reports_what_was_left_out(
    left_out: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    train = io.StringIO()
    view = console(left_out, train, total_steps=10, json_output=True)
    view.poll()
    assert "step 4 was skipped\n" in train.getvalue(), "it is of the run, not of the rank that wrote it"
    assert "warning on node 0 rank 1: nan: skipping it\n" in train.getvalue()
    view.summary(view.ended("finished"))
    watch = io.StringIO()
    print_status(Out(watch), read_view(left_out), time.time())
    live = "\n".join(f"  {p.label:<13}{p.text}" for p in live_pairs(read_view(left_out), time.time()))
    for shown in (train.getvalue(), watch.getvalue(), live):
        assert "  ledger       10 steps, 3 of them skipped; every sample of the others seen once" in shown
        assert "  skipped      steps 4-5, 10 (96 samples)" in shown
        assert "every sample seen once" not in shown
    assert "a-run finished: step 10 of 10, 3 skipped, after" in train.getvalue()
    assert "  step         10 of 10 (100 %)" in watch.getvalue()
    tokens = f"  tokens       {units.count(7 * 8192)}\n"
    assert tokens in train.getvalue()
    assert tokens in watch.getvalue()
    document = json.loads(capsys.readouterr().out)
    assert (document["step"], document["tokens"]) == (10, 7 * 8192)
    assert document["ledger"] == {
        "steps": 10,
        "verdict": "ok",
        "gaps": [],
        "skipped_steps": [4, 5, 10],
        "skipped_samples": 96,
    }


def test_ranks_are_gpus_only_where_they_have_some(left_out: RunFolder) -> None:
    def shown() -> str:
        out = io.StringIO()
        view = console(left_out, out, total_steps=10)
        view.poll()
        view.summary(view.ended("finished"))
        print_status(Out(out), read_view(left_out), time.time())
        return out.getvalue()

    text = shown()
    assert "tok/s/rank 1,140" in text
    assert "1,140 a rank" in text
    assert "GPU" not in text
    events.append(left_out, "device", "of another start", generation=1, data={"device": "NVIDIA H200"})
    text = shown()
    assert "tok/s/GPU 1,140" in text
    assert "1,140 a GPU" in text
    assert "312 MiB (highest of any GPU)" in text


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([5], "step 5"),
        ([5, 6], "steps 5-6"),
        ([1, 5, 6, 7, 9], "steps 1, 5-7, 9"),
        (
            list(range(1, 90, 2)),
            "steps 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31, 33, 35, 37, 39 and 25 more",
        ),
    ],
)
def test_steps_in_words(numbers: list[int], text: str) -> None:
    assert figures.steps(numbers) == text


# -- how it ended


def test_the_start_that_prints_its_end_still_holds_the_lock(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is not what `state_reason` is about."""
    out = io.StringIO()
    fd = lock.acquire(folder.lock)
    write(folder, 1, 3)
    events.append(folder, "preempted", "the state is saved", generation=1)
    data = {"preempted": True}
    events.append(folder, "run_interrupted", "goes on", severity="warning", generation=1, data=data)
    view = console(folder, out, json_output=True)
    view.summary(view.ended("preempted"))
    os.close(fd)
    reason = "stopped on request: the state is saved; the same command resumes"
    assert f"  why          {reason}\n" in out.getvalue()
    document = json.loads(capsys.readouterr().out)
    assert (document["state"], document["state_reason"], document["pid"]) == ("preempted", reason, None)


def test_outcome_known_to_the_process_overrides_missing_records(folder: RunFolder) -> None:
    write(folder, 1, 3)
    events.append(folder, "run_started", "8 ranks", generation=1)
    view = console(folder, io.StringIO())
    failure = Failure(None, None, "the disk is full", "the disk is full", 1e9)
    told = view.ended("failed", failure=failure)
    assert (told.state, told.state_reason, told.failure) == ("failed", "the disk is full", failure)
    told = view.ended("finished", "all 200 steps are already done")
    assert (told.state, told.state_reason) == ("finished", "all 200 steps are already done")


# -- the live lines


@pytest.fixture
def busy(folder: RunFolder) -> RunFolder:
    """It has recovered with a spare, left out two steps, and saved."""
    events.append(folder, "run_started", "8 ranks", generation=1)
    for node in range(5):
        events.append(folder, "node_joined", "joined", generation=1, node=node)
    slots = {"0": 0, "1": 1, "2": 2, "3": 3}
    events.append(folder, "generation_started", "g", generation=1, data={"slots": slots})
    write(folder, 1, 20)
    events.append(folder, "node_lost", "node 1 is lost", severity="error", generation=1, node=1)
    events.append(folder, "recovering", "node 1 is lost", severity="warning", generation=1)
    events.append(folder, "generation_started", "g", generation=2, data={"slots": {**slots, "1": 4}})
    events.append(folder, "recovered", "resuming after step 20", generation=2, data={"step": 20, "redone": 0})
    write(folder, 21, 30, generation=2)
    ledger = LedgerWriter(folder)
    ledger.write(LedgerRecord(31, 30 * 32, 31 * 32, 2, skipped=True))
    ledger.close()
    where = {"step": 30, "folder": "s3://b/step-00000030"}
    events.append(folder, "checkpoint_saved", "checkpoint of step 30", generation=2, data=where)
    return folder


def test_live_shows_what_once_shows(busy: RunFolder, terminal: Terminal) -> None:
    fd = lock.acquire(busy.lock)
    once = io.StringIO()
    print_status(Out(once), read_view(busy), time.time())
    with console(busy, terminal) as view:
        view.catch_up()
        view.poll()
    os.close(fd)
    live = terminal.getvalue()
    for label in ("loss", "recoveries", "nodes", "checkpoint", "ledger", "skipped"):
        line = next(x for x in once.getvalue().splitlines() if x.startswith(f"  {label} "))
        assert line[15:].split(", 0 s ago")[0][:60] in live, label
    assert "nodes        4 with ranks; lost: 1" in once.getvalue()
    for event in ("node 1 is lost", "resuming after step 20", "checkpoint of step 30"):
        assert event in live
    assert "node_joined" not in live, "a thousand of them say less than the line on nodes"
    assert re.search(r"step\D+31/200", re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", live)), (
        "the step that was left out counts"
    )


def test_the_same_eta_everywhere(busy: RunFolder, terminal: Terminal) -> None:
    plain = io.StringIO()
    fd = lock.acquire(busy.lock)
    for n in (32, 33, 34):
        write(busy, n, n, generation=2, step_time_s=float(n))
    view = read_view(busy)
    print_status(Out(plain), view, time.time())
    document = json.loads(summary_json(view, time.time()))
    lines = io.StringIO()
    console(busy, lines).poll()
    with console(busy, terminal) as live:
        live.poll()
    os.close(fd)
    told = figures.eta(document["eta_s"])
    assert f"34 of 200 (17 %), ETA {told}, last" in plain.getvalue()
    assert lines.getvalue().splitlines()[-1].endswith(f"ETA {told}")
    assert f"ETA {told}" in terminal.getvalue()


@pytest.mark.parametrize("width", [12, 24, 40, 80, 200])
@pytest.mark.parametrize("height", [4, 9, 30])
def test_live_lines_fit_any_terminal(busy: RunFolder, width: int, height: int) -> None:
    from rich.console import Console

    out = io.StringIO()
    rich = Console(file=out, width=width, height=height, force_terminal=True, color_system=None)
    live = LivePane(rich)
    view = read_view(busy)
    live.update(*pane(view.last, 200, 72.0, 0.0, unit="GPU", step=view.step, pairs=live_pairs(view, 0.0)))
    drawn = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", out.getvalue()).strip("\n").splitlines()
    live.close()
    assert 1 <= len(drawn) < height
    assert all(len(line) <= width for line in drawn)


def test_a_stream_of_bars_and_steps_shows_the_newest(folder: RunFolder, terminal: Terminal) -> None:
    """Also while the rest of what is shown is not made anew at each step."""
    with console(folder, terminal) as view:
        for n in range(1, 6):
            write(folder, n, n)
            view.poll()
            assert f" {n}/200" in terminal.getvalue()


def test_a_start_that_resumes_has_done_no_step_yet(folder: RunFolder, terminal: Terminal) -> None:
    events.append(folder, "run_started", "8 ranks", generation=1)
    write(folder, 1, 50)
    events.append(folder, "run_started", "8 ranks", generation=2)
    with console(folder, terminal, generation=2) as view:
        view.poll()
        assert "starting: no step yet after" in terminal.getvalue()
        assert " 50/200" not in terminal.getvalue()
        write(folder, 51, 51, generation=2)
        view.poll()
        assert " 51/200" in terminal.getvalue()
