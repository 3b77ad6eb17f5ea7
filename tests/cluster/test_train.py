"""`seatrial train` on a small job: to its end, killed and resumed, and with one rank killed."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from conftest import JOB, ONE_NODE, Run, records, seatrial, write_corpus
from seatrial.base.process import living
from seatrial.data.prepare import data_cache, resolve_stores, stores_identity
from seatrial.job import load_job
from seatrial.record.run import open_run

pytestmark = pytest.mark.cluster

Start = Callable[..., Run]


def run_of(folder: Path) -> Path:
    return folder / "runs" / "small"


def losses(folder: Path, torn: bool = False) -> dict[int, tuple[float, float]]:
    """Step -> (loss, gradient norm), the last record of each step; of a torn file, of those that can be read."""
    found: dict[int, tuple[float, float]] = {}
    for line in (run_of(folder) / "metrics.jsonl").read_bytes().splitlines():
        try:
            record: dict[str, Any] = json.loads(line)
        except ValueError:
            assert torn, line
            continue
        found[record["step"]] = (record["loss"], record["grad_norm"])
    return found


def weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint's files, optimizer and random state included."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted((run_of(folder) / "checkpoints" / f"step-{step:08d}").glob("*.safetensors")):
        for name, values in safetensors.torch.load_file(file).items():
            found[f"{file.name}:{name}"] = values
    return found


def assert_same_run(a: Path, b: Path, steps: int = 12, torn: bool = False) -> None:
    assert losses(a, torn) == losses(b)
    ours, theirs = weights(a, steps), weights(b, steps)
    assert ours.keys() == theirs.keys()
    assert len(ours) > 50
    for name, values in ours.items():
        assert torch.equal(values, theirs[name]), name


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, str, str]:
    """A run that was never disturbed: (folder, exit code, stdout, stderr)."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "job.toml").write_text(JOB)
    write_corpus(folder)
    run = Run(folder, "--json")
    code, out, err = run.wait()
    assert not run.processes()
    return folder, code, out, err


@pytest.fixture(scope="module")
def killed_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two nodes of which everything was killed after its second checkpoint, half-way at the latest unless writing is slow."""
    folder = tmp_path_factory.mktemp("killed")
    (folder / "job.toml").write_text(JOB)
    write_corpus(folder)
    run = Run(folder, "--set", "checkpoint.every_steps=2")
    run.wait_line("  checkpoint of step ")
    run.wait_line("  checkpoint of step ")
    run.kill_all()
    run.wait()
    run.wait_gone(within_s=5)
    return folder


@pytest.fixture
def killed(killed_run: Path, folder: Path) -> Path:
    """The test's own copy of that run, in its folder."""
    return copied(killed_run, folder)


@pytest.fixture(scope="module")
def short_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the first 4 steps, ended in order though its console was closed."""
    folder = tmp_path_factory.mktemp("short")
    (folder / "job.toml").write_text(ONE_NODE)
    write_corpus(folder)
    run = Run(folder, "--set", "train.steps=4", "--set", "checkpoint.every_steps=2")
    run.wait_line("small")
    assert run.process.stderr is not None
    run.process.stderr.close()
    run.process.stderr = None
    code = run.wait()[0]
    assert code == 0, records(run_of(folder) / "events.jsonl")[-3:]
    return folder


@pytest.fixture
def one_node(folder: Path) -> Path:
    """The test's folder, where it is not about nodes: each imports torch once."""
    (folder / "job.toml").write_text(ONE_NODE)
    return folder


@pytest.fixture
def short(short_run: Path, folder: Path) -> Path:
    return copied(short_run, folder)


def copied(project: Path, folder: Path) -> Path:
    return shutil.copytree(project, folder, symlinks=True, dirs_exist_ok=True)


class TestToTheEnd:
    def test_the_loss_falls_and_the_summary_names_all_files(self, whole: tuple[Path, int, str, str]) -> None:
        folder, code, out, err = whole
        assert code == 0, err
        found = losses(folder)
        assert list(found) == list(range(1, 13))
        assert found[12][0] < found[1][0] - 1
        document = json.loads(out)
        assert document["schema_version"] == 1
        waterfall = document["waterfall"]
        assert sum(row["seconds"] or 0.0 for row in waterfall["rows"]) == pytest.approx(waterfall["step_s"])
        assert waterfall["mfu"] is None
        for wanted in (
            "no prediction: ranks are CPU processes",
            "step   1/12",
            "step  12/12",
            "MFU unknown",
            "runs/small",
            "2 nodes x 2",
        ):
            assert wanted in err

    def test_the_run_folder_is_whole(self, whole: tuple[Path, int, str, str]) -> None:
        folder = run_of(whole[0])
        assert {p.name for p in folder.iterdir()} >= {
            "job.toml",
            "plan.json",
            "events.jsonl",
            "metrics.jsonl",
            "ledger.jsonl",
            "control",
            "checkpoints",
            "logs",
        }
        plan = json.loads((folder / "plan.json").read_text())
        assert plan["layout"]["tensor"] == 2
        ledger = records(folder / "ledger.jsonl")
        assert [(r["first_sample"], r["end_sample"]) for r in ledger] == [
            (8 * i, 8 * i + 8) for i in range(12)
        ]
        kept = sorted(p.name for p in (folder / "checkpoints").iterdir())
        # Step 8's; a later one's where writing the one before took until then, step 4's where it took until the end.
        assert kept[:1] + kept[2:] == ["latest", "step-00000012"]
        assert "step-00000004" <= kept[1] < "step-00000012"
        assert (folder / "checkpoints/latest").read_text() == "step-00000012\n"
        for node, rank in ((0, 0), (0, 1), (1, 2), (1, 3)):
            assert (folder / f"logs/000001/node{node}/rank{rank}.log").is_file()
        for node in (0, 1):
            environment = json.loads((folder / f"logs/000001/node{node}/environment.json").read_text())
            told = {v["name"]: v for v in environment["variables"]}
            assert (told["GLOO_SOCKET_IFNAME"]["value"], told["SEATRIAL_DEVICE"]["value"]) == ("lo", "cpu")
            assert all(v["reason"] for v in told.values())
        sample = [e for e in records(folder / "events.jsonl") if e["kind"] == "sample"]
        assert len(sample) == 1
        assert sample[0]["data"]["text"]

    def test_ranks_have_nothing_to_complain_of(self, whole: tuple[Path, int, str, str]) -> None:
        for log in run_of(whole[0]).glob("logs/*/*/*.log"):
            assert log.read_text() == "", log

    def test_watch_shows_it_from_the_folder_alone(self, whole: tuple[Path, int, str, str]) -> None:
        done = seatrial(whole[0], "watch", "small", "--once", "--json")
        assert done.returncode == 0, done.stderr
        view = json.loads(done.stdout)
        assert (view["state"], view["state_reason"]) == ("finished", "all 12 steps are done")
        assert view["step"] == 12
        own = json.loads(whole[2])  # of the start itself, which held the run when it said so
        assert (own["state"], own["state_reason"], own["pid"]) == ("finished", "all 12 steps are done", None)

    def test_the_same_command_again_has_nothing_to_do(self, whole: tuple[Path, int, str, str]) -> None:
        before = (run_of(whole[0]) / "metrics.jsonl").read_bytes()
        done = seatrial(whole[0], "train", "job.toml")
        assert done.returncode == 0
        assert "all 12 steps are already done" in done.stderr
        assert (run_of(whole[0]) / "metrics.jsonl").read_bytes() == before

    def test_it_leaves_as_a_hugging_face_model(self, whole: tuple[Path, int, str, str]) -> None:
        done = seatrial(whole[0], "export", "runs/small", "--out", "hf")
        assert done.returncode == 0, done.stderr
        stored = safetensors.torch.load_file(whole[0] / "hf/model.safetensors")
        checkpoint = weights(whole[0], 12)
        norm = next(v for k, v in checkpoint.items() if k.endswith(":model/model.norm.weight"))
        assert torch.equal(stored["model.norm.weight"], norm)
        assert json.loads((whole[0] / "hf/config.json").read_text())["model_type"] == "qwen2"


# The first failure ends the run, and is told of.
UNSUPERVISED = ("--set", "resilience.max_restarts=0")


class TestKilled:
    @pytest.mark.long  # TestResume begins from a run that was killed
    def test_everything_at_a_random_step_then_again(
        self, whole: tuple[Path, int, str, str], folder: Path, start: Start
    ) -> None:
        step = random.SystemRandom().randint(1, 11)
        print("killed after step", step)  # shown where the test fails
        run = start()
        run.wait_line(f"step {step:>3}/12")
        run.kill_all()
        run.wait()
        run.wait_gone(within_s=5)
        code, _, err = start().wait()
        assert code == 0, err
        assert_same_run(folder, whole[0])
        assert {m["generation"] for m in records(run_of(folder) / "metrics.jsonl")} <= {1, 2}

    @pytest.mark.long  # a killed rank that is named: test_a_rank_that_raises; one that is replaced: test_recovery
    def test_one_rank(self, folder: Path, start: Start) -> None:
        run = start("--set", "train.steps=100000", *UNSUPERVISED)
        run.wait_line("step      3/")
        os.kill(run.ranks()[3], signal.SIGKILL)
        code, _, err = run.wait()
        assert code == 1
        assert "rank 3 on node 1" in err
        assert "rank 0" not in err, "a peer that only lost its connection is not blamed"
        assert "SIGKILL" in err
        assert "logs/000001/node1/rank3.log" in err
        run.wait_gone(within_s=5)
        failed = [e for e in records(run_of(folder) / "events.jsonl") if e["kind"] == "run_failed"]
        assert [(e["node"], e["rank"]) for e in failed] == [(1, 3)]

    def test_a_rank_that_raises_is_named_with_its_traceback(self, one_node: Path, start: Start) -> None:
        run = start("--set", "train.steps=100000", *UNSUPERVISED)
        run.wait_line("step      2/")
        # The data goes away under one run: the first rank to read it says which file.
        for shard in (one_node / "runs/.data").glob("*/shard-*.bin"):
            os.truncate(shard, 0)
        code, _, err = run.wait()
        assert code == 2
        assert "shard-00000.bin" in err
        run.wait_gone(within_s=5)

    @pytest.mark.long  # the words: tests/cli/test_causes.py; the decision: tests/unit/train
    def test_a_diverged_run_is_reported_with_suggestions(self, one_node: Path, start: Start) -> None:
        """With weights that no number of steps mends; the same command would end in the same way."""
        assert start("--set", "train.steps=3", "--set", "name=short").wait()[0] == 0
        assert seatrial(one_node, "export", "runs/short", "--out", "hf").returncode == 0
        weights = safetensors.torch.load_file(one_node / "hf/model.safetensors")
        weights["model.norm.weight"] *= 1e38
        safetensors.torch.save_file(weights, one_node / "hf/model.safetensors", {"format": "pt"})
        arguments = ["--set", "model.init_from=hf", "--set", "optimizer.clip_norm=0.0"]
        code, out, err = start("--json", *arguments).wait()
        assert code == 1
        assert "small failed: step 3 of 12, 3 skipped, after" in err
        assert "  skipped      steps 1-3 (24 samples)\n" in err
        document = json.loads(out)
        assert document["state_reason"].startswith(
            "it diverged, and no more steps may be skipped: the loss is "
        )
        assert document["ledger"]["skipped_steps"] == [1, 2, 3]
        commands = [command.partition("   # ")[0] for command in document["next_commands"]]
        assert (
            commands[0]
            == "seatrial train job.toml --set model.init_from=hf --set optimizer.clip_norm=0.0 --set optimizer.lr=0.0033 --fresh"
        )
        assert not any(c.startswith("seatrial train") and "--fresh" not in c for c in commands)
        assert "steps 1-3 (24 samples)" in seatrial(one_node, "watch", "small", "--once").stdout
        assert "steps 1-3 (24 samples)" in seatrial(one_node, "verify", "small", "--ledger").stdout

    def test_a_second_start_and_then_an_interrupt(self, one_node: Path, start: Start) -> None:
        run = start("--set", "train.steps=100000")
        run.wait_line("step      2/")
        done = seatrial(one_node, "train", "job.toml", "--set", "train.steps=100000")
        assert done.returncode == 1
        assert f"process {run.process.pid}" in done.stderr
        run.process.send_signal(signal.SIGINT)
        code, _, _err = run.wait()
        assert code == 130
        run.wait_gone(within_s=5)
        assert records(run_of(one_node) / "events.jsonl")[-1]["kind"] == "run_interrupted"

    def test_a_preempted_run_has_saved_its_last_step(
        self, whole: tuple[Path, int, str, str], folder: Path, start: Start
    ) -> None:
        """SIGTERM is what a scheduler sends before it kills; the same command then goes on without a step lost."""
        run = start("--json")
        run.wait_line("step   6/12")
        run.process.send_signal(signal.SIGTERM)
        code, out, err = run.wait()
        assert code == 75, err
        assert "small preempted: step" in err
        reason = "stopped on request: the state is saved; the same command resumes"
        assert f"  why          {reason}\n" in err
        told = [json.loads(out), json.loads(seatrial(folder, "watch", "small", "--once", "--json").stdout)]
        assert [(t["state"], t["state_reason"], t["pid"]) for t in told] == [("preempted", reason, None)] * 2
        run.wait_gone(within_s=5)
        steps = records(run_of(folder) / "metrics.jsonl")
        (last,) = records(run_of(folder) / "events.jsonl")[-1:]
        assert (last["kind"], last["data"]) == ("run_interrupted", {"preempted": True})
        code, _, err = start().wait()
        assert code == 0, err
        assert_same_run(folder, whole[0])
        again = records(run_of(folder) / "metrics.jsonl")
        assert [m["step"] for m in again] == list(range(1, 13)), "no step is done twice"
        assert again[: len(steps)] == steps

    def test_the_command_itself(self, start: Start) -> None:
        run = start("--set", "train.steps=100000")
        run.wait_line("step      2/")
        run.process.kill()
        run.process.wait()
        run.wait_gone(within_s=5)

    @pytest.mark.ci
    def test_an_agent(self, start: Start) -> None:
        run = start("--set", "train.steps=100000", *UNSUPERVISED)
        run.wait_line("step      2/")
        found = {p for p in run.processes() if b"seatrial.control.agent" in _command(p)}
        parents = living()
        agents = [pid for pid in found if parents[pid] not in found]  # not those that they forked
        assert len(agents) == 2
        os.kill(agents[0], signal.SIGKILL)
        code, _, err = run.wait()
        assert code == 1
        assert "the agent was killed by SIGKILL" in err
        run.wait_gone(within_s=5)


def _command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def torchrun(folder: Path) -> None:
    """Train the run in `folder` to its end with ranks that have no agent."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    command += ["-m", "seatrial.train.worker", str(run_of(folder))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "SEATRIAL_DEVICE": "cpu"}
    # Its output goes to a file: with a pipe a rank that it left behind would keep the test waiting.
    with open(folder / "torchrun.log", "wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        assert process.wait(timeout=300) == 0, (folder / "torchrun.log").read_text()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class TestTorchrun:
    """Without agents, as docs/training.md says, and bit for bit what they would have trained."""

    @pytest.mark.long  # from a checkpoint it also begins under torchrun
    def test_from_the_beginning(self, folder: Path, whole: tuple[Path, int, str, str]) -> None:
        job = load_job(folder / "job.toml")
        runs = run_of(folder).parent
        stores = resolve_stores(job.data, data_cache(runs), folder)
        with open_run(job, runs, data=stores_identity(stores)):
            pass
        torchrun(folder)
        assert_same_run(folder, whole[0])

    @pytest.mark.ci
    def test_from_a_checkpoint(self, killed: Path, whole: tuple[Path, int, str, str]) -> None:
        torchrun(killed)
        assert_same_run(killed, whole[0])
        assert "resumed" in {e["kind"] for e in records(run_of(killed) / "events.jsonl")}


class TestResume:
    def test_in_another_layout_it_is_the_same_training(
        self, whole: tuple[Path, int, str, str], killed: Path, start: Start
    ) -> None:
        code, _, err = start(
            *("--set", "parallel.tensor=1", "--set", "parallel.pipeline=1", "--set", "parallel.shard=4")
        ).wait()
        assert code == 0, err
        assert "the job changed since the last start" in err
        theirs = losses(whole[0])
        ours = losses(killed)
        assert ours.keys() == theirs.keys()
        for step, (loss, norm) in ours.items():
            assert loss == pytest.approx(theirs[step][0], abs=1e-4)
            assert norm == pytest.approx(theirs[step][1], rel=1e-3)

    @pytest.mark.ci
    def test_a_torn_metrics_file_and_two_unusable_checkpoints(
        self, whole: tuple[Path, int, str, str], killed: Path, start: Start
    ) -> None:
        """The half-written checkpoint is removed, the damaged one quarantined, the one before used.

        The torn lines are told of, and nothing else is lost: the run comes out equal.
        """
        metrics = run_of(killed) / "metrics.jsonl"
        metrics.write_bytes(b'{"step": 1, "lo\x00\xff' + b"\n" + metrics.read_bytes() + b'{"step": 5, "tok')
        checkpoints = run_of(killed) / "checkpoints"
        before, step = sorted(int(p.name[5:]) for p in checkpoints.glob("step-*") if p.name[5:].isdigit())[
            -2:
        ]
        half = checkpoints / "step-00000016.tmp-1"
        half.mkdir(exist_ok=True)
        (half / "rank-00000.safetensors").write_bytes(b"half")
        no_manifest = checkpoints / "step-00000099"  # no save, however late, is of that step
        no_manifest.mkdir()
        (no_manifest / "rank-00000.safetensors").write_bytes(b"half")
        victim = checkpoints / f"step-{step:08d}/rank-00001.safetensors"
        data = bytearray(victim.read_bytes())
        data[-5] ^= 1  # one bit, in the last tensor's values
        victim.write_bytes(data)
        code, _, err = start().wait()
        assert code == 0, err
        assert f"resuming after step {before}" in err
        assert "rank-00001.safetensors" in err
        assert not half.exists()
        assert not no_manifest.exists()
        assert (checkpoints / f"step-{step:08d}.damaged").is_dir()
        assert_same_run(killed, whole[0], torn=True)
        shown = seatrial(killed, "watch", "small", "--once", "--json")
        assert shown.returncode == 0
        problems = json.loads(shown.stdout)["problems"]
        assert (problems[0]["file"], problems[0]["line"]) == ("metrics.jsonl", 1)

    def test_a_damaged_last_checkpoint_is_not_called_done(self, short: Path, start: Start) -> None:
        before, last = sorted((run_of(short) / "checkpoints").glob("step-*"))
        assert last.name == "step-00000004"
        os.truncate(last / "rank-00002.safetensors", 100)
        code, _, err = start("--set", "train.steps=4").wait()
        assert code == 0, err
        assert "rank-00002.safetensors has 100 bytes" in err
        assert f"resuming after step {int(before.name.removeprefix('step-'))}\n" in err

    @pytest.mark.ci
    def test_a_run_that_lost_its_checkpoints_does_not_start_over(self, short: Path, start: Start) -> None:
        (run_of(short) / "checkpoints").rename(short / "unmounted")
        code, _, err = start().wait()
        assert code == 1
        assert "has saved step 4" in err
        assert "--fresh" in err
        assert "step   1/12" not in err

    @pytest.mark.ci
    def test_other_text_behind_the_same_path_is_another_run(self, short: Path, start: Start) -> None:
        (short / "corpus/more.py").write_text("x = 1\n" * 200)
        code, _, err = start().wait()
        assert code == 2
        assert "data.tokens_sha256" in err

    @pytest.mark.ci
    def test_the_whole_project_in_another_place(self, short: Path, start: Start) -> None:
        moved = short / "moved"
        moved.mkdir()
        for name in ("job.toml", "corpus", "runs"):
            (short / name).rename(moved / name)
        done = seatrial(moved, "train", "job.toml", "--set", "train.steps=6", "--plain")
        assert done.returncode == 0, done.stderr
        assert "resuming after step 4" in done.stderr

    @pytest.mark.long  # that a writer notices it: tests/unit/record/test_jsonl.py
    def test_a_run_folder_that_is_moved_away_stops_the_run(self, one_node: Path, start: Start) -> None:
        run = start("--set", "train.steps=100000")
        run.wait_line("step      2/")
        run_of(one_node).rename(one_node / "elsewhere")
        code, _, err = run.wait()
        assert code == 1
        assert "moved" in err
        assert len(records(one_node / "elsewhere/metrics.jsonl")) >= 2

    def test_a_console_that_is_not_read(self, short_run: Path) -> None:
        assert list(losses(short_run)) == [1, 2, 3, 4]

    def test_fresh_keeps_the_old_run(self, short: Path, start: Start) -> None:
        code, _, err = start("--fresh", "--set", "train.steps=2").wait()
        assert code == 0
        assert "small.old-1" in err
        assert (short / "runs/small.old-1/checkpoints/step-00000004/manifest.json").is_file()
        assert len(records(run_of(short) / "metrics.jsonl")) == 2

    @pytest.mark.long  # test_fresh_keeps_the_old_run
    def test_fresh_does_not_go_on_from_checkpoints_elsewhere(self, one_node: Path, start: Start) -> None:
        words = ["--set", "train.steps=2", "--set", "checkpoint.folder=elsewhere"]
        assert start(*words).wait()[0] == 0
        code, _, err = start("--fresh", *words).wait()
        assert code == 0
        assert "step-00000002 belongs to the previous run; quarantined as step-00000002.damaged" in err
        assert len(records(run_of(one_node) / "metrics.jsonl")) == 2


class TestRefused:
    """Bad input: exit 2, a place or a name, a hint; nothing started and nothing lost."""

    @pytest.mark.parametrize(
        ("overrides", "message"),
        [
            (["parallel.tensor=3", "cluster.gpus_per_node=3", "parallel.pipeline=2"], "heads"),
            # Other rules: tests/unit/job/test_job_rules.py.
            pytest.param(["parallel.pipeline=4", "parallel.tensor=1"], "stages", marks=pytest.mark.long),
            pytest.param(["train.global_batch=7"], "batch", marks=pytest.mark.long),
            (["data.train=nowhere"], "nowhere"),
            (["data.train=empty"], "empty"),
            (["cluster.device=cuda"], "CUDA"),
            (["cluster.launcher=slurm"], "slurm"),
            pytest.param(
                ["parallel.schedule=zbv", "parallel.stages_per_rank=2"], "zbv", marks=pytest.mark.long
            ),
            (["data.train=corpus", "model.vocab_size=200"], "vocab"),
        ],
    )
    def test_before_anything_starts(self, overrides: list[str], message: str, folder: Path) -> None:
        (folder / "empty").mkdir()
        arguments = [a for o in overrides for a in ("--set", o)]
        done = seatrial(folder, "train", "job.toml", *arguments)
        assert done.returncode == 2, done.stderr
        assert message in done.stderr
        assert "hint:" in done.stderr
        assert not run_of(folder).exists()

    def test_a_token_beyond_the_vocabulary(self, folder: Path) -> None:
        """A store made with a larger tokenizer than the model has rows for."""
        from tokenizers import Tokenizer, models, pre_tokenizers

        words = {f"w{i}": i for i in range(400)}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="w399"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "words.txt").write_text(" ".join(f"w{i % 399}" for i in range(5000)))
        done = seatrial(
            folder, "data", "prepare", "words.txt", "--out", "store", "--tokenizer", "tokenizer.json"
        )
        assert done.returncode == 0, done.stderr
        done = seatrial(
            folder,
            *("train", "job.toml", "--set", "data.train=store", "--set", "data.tokenizer=tokenizer.json"),
        )
        assert done.returncode == 2
        assert "beyond the vocabulary of 264" in done.stderr
        assert not run_of(folder).exists()

    def test_a_run_folder_of_another_job(self, short: Path) -> None:
        before = sorted(p for p in run_of(short).rglob("*") if p.is_file())
        done = seatrial(short, "train", "job.toml", "--set", "optimizer.lr=0.5", "--set", "train.seed=9")
        assert done.returncode == 2
        assert "optimizer.lr" in done.stderr
        assert "train.seed" in done.stderr
        assert "--fresh" in done.stderr
        assert sorted(p for p in run_of(short).rglob("*") if p.is_file()) == before

    def test_a_port_in_use(self, folder: Path) -> None:
        import socket

        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            done = seatrial(folder, "train", "job.toml", "--set", f"cluster.port={port}")
        assert done.returncode == 2
        assert f"port {port} is in use" in done.stderr
        assert not run_of(folder).exists()

    def test_a_run_folder_that_cannot_be_written(self, folder: Path) -> None:
        """A file in its place and a mount that is read-only, since permissions do not bind a superuser."""
        (folder / "file").write_text("")
        done = seatrial(folder, "train", "job.toml", "--runs", "file")
        assert done.returncode == 2
        assert "file" in done.stderr
        done = seatrial(folder, "train", "job.toml", "--runs", "/proc/runs")
        assert done.returncode == 2
        assert "/proc/runs" in done.stderr
