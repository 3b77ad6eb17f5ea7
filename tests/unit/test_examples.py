"""The package under examples/, installed beside Seatrial: what a job file may then name, and how it is refused else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.pipelining.schedules import ScheduleLoopedBFS

from installed import install, install_examples
from seatrial.base.box import Box
from seatrial.base.errors import InputError
from seatrial.cli.main import main
from seatrial.job.huggingface import architecture_from_config, config_from_architecture
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
EXPLICIT = """family = "mistral"
vocab_size = 264
hidden_size = 64
intermediate_size = 96
num_hidden_layers = 2
num_attention_heads = 4"""
LAYERS = ["parallel.stages_per_rank=2", "parallel.reshard_after_forward=false"]


@pytest.fixture(autouse=True)
def first_voyage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
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


def model_from(config: str) -> None:
    """Let the job file take its model from a config.json."""
    Path("config.json").write_text(config)
    path = Path("first-voyage.toml")
    path.write_text(path.read_text().replace('preset = "qwen2.5-tiny"', 'hf = "config.json"'))


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
        assert (
            'schedule "breadth-first" needs 2 or more stages on each rank, not 1' in capsys.readouterr().err
        )

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
        assert (
            'first-voyage.toml:40:8: error: optimizer.name: expected "adamw", "adamw_bf16", "lion", "muon" or "momentum"'
            in said
        )
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
        s = Shard("w", w, w.detach(), Box.whole((2, 3)), (2, 3), 1, first=True, owner=True, counted=True)
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

    def test_a_missing_class_is_named(self) -> None:
        OPTIMIZERS.imported("momentum", optimizer_named("momentum").implementation)
        with pytest.raises(InputError, match='the optimizer "momentum" of seatrial_examples:No cannot be'):
            OPTIMIZERS.imported("momentum", "seatrial_examples:No")


@pytest.mark.usefixtures("examples")
class TestFamily:
    def test_a_job_names_it_and_it_brings_its_switches_and_defaults(self) -> None:
        sizes = [f"model.{n}=64" for n in ("hidden_size", "intermediate_size", "max_position_embeddings")]
        job = load_job(
            Path("first-voyage.toml"), ["model.family=mistral", *sizes, "train.sequence_length=64"]
        )
        a = job.architecture
        assert (a.family, a.qkv_bias, a.qk_norm, a.tie_word_embeddings) == ("mistral", False, False, True)
        again = job_from_text(job.to_toml(), name="job.toml", base_folder=Path.cwd())
        assert again.architecture == a

        text = Path("first-voyage.toml").read_text().replace('preset = "qwen2.5-tiny"', EXPLICIT)
        a = job_from_text(text, name="job.toml", base_folder=Path.cwd()).architecture
        assert (a.family, a.rms_norm_eps, a.rope_theta, a.qkv_bias) == ("mistral", 1e-5, 1e6, False)

    def test_the_rules_and_the_planner_ask_it(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert validate("model.family=mistral", "model.qkv_bias=true") == 2
        said = capsys.readouterr().err
        assert 'qkv_bias = true with family "mistral"' in said
        assert 'hint: remove qkv_bias, or set family = "qwen2"' in said
        assert main(["plan", "first-voyage.toml", "--set", "model.family=mistral"]) == 0
        assert "mistral, " in capsys.readouterr().out

    def test_a_config_json_whose_window_is_on_is_refused(self) -> None:
        a = load_job(Path("first-voyage.toml"), ["model.family=mistral"]).architecture
        config = config_from_architecture(a)
        assert (config["architectures"], config["model_type"]) == (["MistralForCausalLM"], "mistral")
        assert architecture_from_config(config) == a
        del config["sliding_window"]
        with pytest.raises(InputError, match="sliding_window = 4096 is used"):
            architecture_from_config(config)

    def test_another_name_is_refused(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert validate("model.family=mistrall") == 2
        said = capsys.readouterr().err
        assert 'expected "qwen2", "llama", "qwen3", "qwen3_moe", "glm4_moe", "exaone" or "mistral"' in said
        assert 'hint: did you mean "mistral"?' in said
        model_from('{"model_type": "mixtral"}')
        assert validate() == 2
        assert (
            "supported are qwen2, llama, qwen3, qwen3_moe, glm4_moe, exaone, mistral: text decoders"
            in capsys.readouterr().err
        )


def test_a_family_whose_package_is_gone_or_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    a = replace(load_job(Path("first-voyage.toml"), []).architecture, family="gone")
    with pytest.raises(InputError, match='there is no model family "gone"'):
        config_from_architecture(a)
    install({"seatrial.model_families": {"torn": "not_there:TORN"}}, tmp_path / "broken", monkeypatch)
    model_from('{"model_type": "torn"}')
    assert validate() == 2
    said = capsys.readouterr().err
    assert 'config.json: the model family "torn" of not_there:TORN cannot be imported' in said


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
def test_a_misspelt_metric(capsys: pytest.CaptureFixture[str]) -> None:
    assert validate('train.metrics=["perplexity"]') == 0
    assert validate('train.metrics=["perplexty"]') == 2
    assert 'train.metrics[0]: expected "perplexity", found the string' in capsys.readouterr().err


@pytest.mark.usefixtures("examples")
def test_a_misspelt_callback(capsys: pytest.CaptureFixture[str]) -> None:
    assert validate('train.callbacks=["losses"]') == 0
    assert validate('train.callbacks=["loses"]') == 2
    assert 'train.callbacks[0]: expected "losses", found the string "loses"' in capsys.readouterr().err
