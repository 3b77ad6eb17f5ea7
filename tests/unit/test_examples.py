"""The package under examples/, installed beside Seatrial: what a job file may then name, and how it is refused else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.pipelining.schedules import ScheduleLoopedBFS

from installed import install, install_examples
from seatrial.base.box import Box
from seatrial.base.errors import InputError
from seatrial.cli.main import main
from seatrial.job.loading import job_from_text, load_job
from seatrial.job.optimizers import OPTIMIZERS, Optimizer, optimizer_named
from seatrial.job.schedules import schedule_named
from seatrial.job.schema import OptimizerSection
from seatrial.parallel.build import Shard
from seatrial.plan.cost.memory import memory
from seatrial.plan.cost.predict import stack_for
from seatrial.plan.model.recipe import Recipe
from seatrial.plan.search.fit import account
from seatrial.train.optimizer import build_optimizer

ADAM, MOMENTUM = "optimizer.name=adamw", "optimizer.name=momentum"
LAYERS = ["parallel.stages_per_rank=2", "parallel.reshard_after_forward=false"]


@pytest.fixture(autouse=True)
def voyage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "--preset", "first-voyage"]) == 0
    capsys.readouterr()


def validate(*settings: str) -> int:
    return main(["validate", "first-voyage.toml", *(word for s in settings for word in ("--set", s))])


def write(key: str, value: str) -> None:
    """Set a key of the job file itself, so that a refusal has a line to point at."""
    path = Path("first-voyage.toml")
    lines = [
        f'{key} = "{value}"' if line.startswith(f"{key} =") else line
        for line in path.read_text().splitlines()
    ]
    path.write_text("\n".join(lines))


@pytest.fixture
def examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_examples(tmp_path / "site", monkeypatch)


@pytest.mark.usefixtures("examples")
class TestSchedule:
    def test_the_planner_predicts_it(self, capsys: pytest.CaptureFixture[str]) -> None:
        settings = [word for s in ("parallel.schedule=breadth-first", *LAYERS) for word in ("--set", s)]
        assert main(["plan", "first-voyage.toml", *settings, "--json"]) == 0
        assert "breadth-first" in capsys.readouterr().out

    @pytest.mark.parametrize(("ranks", "per_rank", "m"), [(2, 2, 4), (4, 2, 8), (2, 3, 2)])
    def test_its_order_is_the_one_of_torch(self, ranks: int, per_rank: int, m: int) -> None:
        torchs = object.__new__(ScheduleLoopedBFS)  # its constructor wants stages and process groups
        torchs.pp_group_size, torchs._stages, torchs._n_microbatches = ranks, [None] * per_rank, m  # type: ignore[list-item]
        names = {"FORWARD": "F", "FULL_BACKWARD": "B"}
        for rank in range(ranks):
            theirs = [
                (names[a.computation_type.name], a.stage_index, a.microbatch_index)
                for a in torchs._calculate_single_rank_operations(rank)
                if a is not None
            ]
            schedule = schedule_named("breadth-first")
            assert [tuple(p) for p in schedule.order(ranks, per_rank, m, rank)] == theirs
            assert schedule.in_flight(ranks, per_rank, m, rank) == per_rank * m

    def test_the_rules_ask_it(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert validate("parallel.schedule=breadth-first") == 2
        assert 'schedule "breadth-first" needs several stages on each rank, not 1' in capsys.readouterr().err

    def test_another_name_is_refused(self, capsys: pytest.CaptureFixture[str]) -> None:
        write("schedule", "breadth-last")
        assert validate() == 2
        said = capsys.readouterr().err
        assert said.startswith("first-voyage.toml:27:12: error: parallel.schedule: expected ")
        assert '"zero-bubble"' in said
        assert '"breadth-first"' in said
        assert 'hint: did you mean "breadth-first"?' in said

    def test_editors_know_it(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["schema"]) == 0
        section = json.loads(capsys.readouterr().out)["$defs"]["ParallelSection"]
        assert section["properties"]["schedule"]["enum"][-1] == "breadth-first"


@pytest.mark.usefixtures("examples")
class TestOptimizer:
    def test_another_name_is_refused(self, capsys: pytest.CaptureFixture[str]) -> None:
        path = Path("first-voyage.toml")
        path.write_text(path.read_text().replace("lr = 3e-3", 'name = "momentun"\nlr = 3e-3'))
        assert validate() == 2
        said = capsys.readouterr().err
        assert 'first-voyage.toml:40:8: error: optimizer.name: expected "adamw" or "momentum"' in said
        assert 'hint: did you mean "momentum"?' in said

    def test_its_name_makes_another_run_and_the_default_none(self) -> None:
        adamw, named, other = (load_job(Path("first-voyage.toml"), s) for s in ([], [ADAM], [MOMENTUM]))
        assert adamw.identity() == named.identity()
        assert adamw.to_toml() == named.to_toml()
        assert "optimizer.name" not in adamw.identity()
        assert other.identity() == adamw.identity() | {"optimizer.name": "momentum"}
        again = job_from_text(other.to_toml(), name="job.toml", base_folder=Path.cwd())
        assert again.optimizer == other.optimizer

    def test_the_planner_counts_its_state(self) -> None:
        job, other = (load_job(Path("first-voyage.toml"), s) for s in ([], [MOMENTUM]))
        held = [memory(job.architecture, r, stack_for(r)) for r in (Recipe.of(job), Recipe.of(other))]
        assert held[1].optimizer == held[0].optimizer / 2
        assert held[1].parameters == held[0].parameters
        lines = {line.name: line for line in account(job.architecture, Recipe.of(other)).lines}
        assert (lines["moments"].per_parameter, lines["moments"].note) == (4, "velocity: fp32")

    def test_it_refuses_updates_as_adamw_does(self) -> None:
        w = nn.Parameter(torch.ones(2, 3))
        s = Shard("w", w, w.detach(), Box.whole((2, 3)), (2, 3), 1, owner=True, counted=True)
        settings = OptimizerSection(name="momentum", lr=0.1, beta1=0.5, weight_decay=1.0)
        optimizer = build_optimizer([s], settings)

        def update(gradient: float) -> tuple[float, float, float]:
            w.grad = torch.full((2, 3), gradient)
            optimizer.update(0.1, None)
            ((kind, _, velocity),) = optimizer.state()
            assert kind == "velocity"
            return w[0, 0].item(), velocity[0, 0].item(), optimizer.counts()[0].item()

        first = update(2.0)
        assert first == pytest.approx((0.9 - 0.2, 2.0, 1))
        optimizer.refuse_if(torch.tensor(True))
        assert update(float("nan")) == first
        optimizer.allow()
        assert update(1.0) == pytest.approx((0.7 * 0.9 - 0.2, 2.0, 2))

    def test_a_class_that_is_not_there_is_named(self) -> None:
        OPTIMIZERS.imported("momentum", optimizer_named("momentum").implementation)
        with pytest.raises(InputError, match='the optimizer "momentum" of seatrial_examples:No cannot be'):
            OPTIMIZERS.imported("momentum", "seatrial_examples:No")


def test_an_optimizer_cannot_take_a_name_of_checkpoints() -> None:
    with pytest.raises(ValueError, match="cannot be named model"):
        Optimizer("odd", ("velocity", "model"), "odd:Odd")


def test_a_broken_package_is_named_if_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    groups = {"seatrial.schedules": {"slow": "not_there:SLOW", "odd": "json:dumps"}}
    install(groups, tmp_path / "broken", monkeypatch)
    assert validate() == 0
    write("schedule", "slow")
    capsys.readouterr()
    assert validate() == 2
    said = capsys.readouterr().err
    assert said.startswith(
        'first-voyage.toml:27:12: error: parallel.schedule: the pipeline schedule "slow" of not_there:SLOW cannot be '
        "imported: ModuleNotFoundError: No module named 'not_there'"
    )
    assert "hint: repair or reinstall the package" in said
    write("schedule", "odd")
    assert validate() == 2
    assert "of json:dumps is not a PipelineSchedule" in capsys.readouterr().err


def test_a_callback_by_another_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert validate('train.callbacks=["losses"]') == 2
    said = capsys.readouterr().err
    assert 'error: train.callbacks[0]: there is no callback "losses"' in said
    assert "hint: no installed package adds one" in said


@pytest.mark.usefixtures("examples")
def test_a_misspelt_callback(capsys: pytest.CaptureFixture[str]) -> None:
    assert validate('train.callbacks=["losses"]') == 0
    assert validate('train.callbacks=["loses"]') == 2
    assert 'train.callbacks[0]: expected "losses", found the string "loses"' in capsys.readouterr().err
