"""A job written out is the same job when read again; identity; the presets that ship."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import GOOD, load

from seatrial.base.errors import InputError
from seatrial.job import Job, job_from_text, preset_summary, preset_text, presets


def again(job: Job) -> Job:
    return job_from_text(job.to_toml(), name="job.toml", base_folder=Path("/elsewhere"))


def assert_same(one: Job, other: Job) -> None:
    assert (one.architecture, one.layout, one.identity()) == (
        other.architecture,
        other.layout,
        other.identity(),
    )
    ours, theirs = (
        one.file.model_dump(exclude={"model", "parallel"}),
        other.file.model_dump(exclude={"model", "parallel"}),
    )
    assert ours == theirs


@pytest.mark.parametrize("name", presets())
def test_presets_are_valid_and_survive_the_round_trip(name: str) -> None:
    job = job_from_text(preset_text(name), name=name, base_folder=Path("/jobs"))
    assert job.name == name
    assert_same(job, again(job))


@pytest.mark.parametrize("name", presets())
def test_presets_explain_themselves(name: str) -> None:
    lines = preset_text(name).split("\n")
    assert preset_summary(name).endswith(".")
    assert all(len(line) <= 130 for line in lines)
    verb = (
        "train" if 'launcher = "local"' in preset_text(name) else "plan"
    )  # what can be done with it in this version
    assert f"#   seatrial {verb} {name}.toml" in preset_text(name)
    keys = [line for line in lines if " = " in line.split("#")[0]]
    assert [line for line in keys if "#" not in line] == []


def test_the_reference_voyage() -> None:
    job = job_from_text(preset_text("qwen2.5-72b-b300"), name="x", base_folder=Path("/jobs"))
    assert (job.layout.world_size, job.layout.tensor, job.layout.pipeline, job.layout.shard) == (128, 8, 2, 8)
    assert job.checkpoint.every_steps == 500
    tokens = job.train.global_batch * job.train.sequence_length
    assert 5 < tokens / (2500 * 128) < 30  # seconds a step at 2,500 tokens/s/GPU


def test_the_first_voyage_is_the_contract() -> None:
    values = tomllib.loads(preset_text("first-voyage"))
    assert values == {
        "name": "first-voyage",
        "model": {"preset": "qwen2.5-tiny"},
        "data": {"train": "builtin:python-library", "tokenizer": "bytes"},
        "cluster": {"launcher": "local", "nodes": 2, "gpus_per_node": 4},
        "parallel": {"tensor": 2, "pipeline": 2, "shard": 2, "schedule": "1f1b", "stages_per_rank": 1},
        "train": {
            "steps": 200, "sequence_length": 256, "global_batch": 32, "microbatch": 4, "precision": "fp32",
            "activation_checkpointing": "none", "seed": 1234,
        },
        "optimizer": {"lr": 3e-3, "warmup_steps": 20, "decay": "cosine", "weight_decay": 0.1, "clip_norm": 1.0},
        "checkpoint": {"every_steps": 50, "keep": 3},
        "resilience": {"snapshot_every_steps": 10},
    }  # fmt: skip


def test_unknown_preset() -> None:
    with pytest.raises(InputError, match='no preset "first-voyag"') as caught:
        preset_text("first-voyag")
    assert (caught.value.diagnostics[0].hint or "").startswith("did you mean first-voyage?")


def test_every_key_is_written() -> None:
    values = tomllib.loads(load(GOOD).to_toml())
    assert values["parallel"] == {
        "tensor": 2, "pipeline": 2, "context": 1, "expert": 1, "replicate": 1, "shard": 2, "schedule": "1f1b",
        "stages_per_rank": 1, "reshard_after_forward": False, "async_tensor": False,
    }  # fmt: skip
    assert values["model"]["hidden_size"] == 128
    assert "preset" not in values["model"]
    assert values["train"]["precision"] == "bf16"
    assert set(values) == {
        "name",
        "model",
        "data",
        "cluster",
        "parallel",
        "train",
        "optimizer",
        "checkpoint",
        "resilience",
        "watch",
    }


def test_rope_scaling_is_written() -> None:
    job = load(GOOD, "model.preset=llama3.1-8b")
    assert_same(job, again(job))
    assert again(job).architecture.rope_scaling is not None


@pytest.mark.cluster  # slow
@settings(deadline=None)
@given(st.text(st.characters(codec="utf-8", exclude_categories=("Cs",))))
def test_any_text_survives(prompt: str) -> None:
    job = load(GOOD)
    train = job.train.model_copy(update={"sample_prompt": prompt})
    job = dataclasses.replace(job, file=job.file.model_copy(update={"train": train}))
    assert again(job).train.sample_prompt == prompt


@pytest.mark.cluster  # slow
@settings(deadline=None)
@given(st.floats(min_value=1e-12, max_value=1))
def test_any_number_survives(lr: float) -> None:
    job = load(GOOD, f"optimizer.lr={lr!r}")
    assert again(job).optimizer.lr == lr


class TestIdentity:
    @pytest.mark.parametrize(
        "override",
        ["train.seed=1", "train.sequence_length=128", "train.global_batch=64", "optimizer.lr=1e-3",
         "optimizer.decay=wsd", "model.rope_theta=1e4"],
    )  # fmt: skip
    def test_another_run(self, override: str) -> None:
        one, other = load(GOOD).identity(), load(GOOD, override).identity()
        differing = [key for key in one if one[key] != other[key]]
        assert differing == [override.split("=")[0]]

    @pytest.mark.parametrize(
        "override",
        ["train.steps=400", "train.microbatch=2", "parallel.tensor=1", "cluster.nodes=4", "checkpoint.keep=9",
         "train.precision=fp32", "name=other", "parallel.schedule=gpipe", "data.train=other"],
    )  # fmt: skip
    def test_the_same_run(self, override: str) -> None:
        assert load(GOOD).identity() == load(GOOD, override).identity()

    def test_what_a_blend_is_made_of(self) -> None:
        def of(*more: str) -> dict[str, object]:
            return load(GOOD, 'data.train=["a", "b"]', *more).identity()

        blend = of("data.weights=[0.7, 0.3]")
        assert blend["data.weights"] == "7/10, 3/10"
        assert blend == of("data.weights=[7, 3]") == of("data.weights=[2.1, 0.9]", "data.cache_gb=1")
        assert blend != of("data.weights=[3, 7]")
        assert of("data.weights=[1, 2]")["data.weights"] == "1/3, 2/3"

    def test_attention_inside_documents_is_another_run(self) -> None:
        inside = load(GOOD, "data.attend_across_documents=false").identity()
        # A run from before this key was there has nothing under it, and goes on.
        assert "data.attend_across_documents" not in load(GOOD).identity()
        assert inside == {**load(GOOD).identity(), "data.attend_across_documents": False}

    def test_a_loss_over_all_tokens_is_another_run(self) -> None:
        assert "data.loss" not in load(GOOD).identity()
        assert load(GOOD, "data.loss=all").identity() == {**load(GOOD).identity(), "data.loss": "all"}

    def test_a_blend_is_written(self) -> None:
        job = load(
            GOOD, """data.train=["/a \\"b\\" c", 'd']""", "data.weights=[0.1, 7e2]", "data.cache_gb=0.5"
        )
        assert_same(job, again(job))
        assert again(job).data == job.data

    def test_an_interval_that_is_chosen_is_written(self) -> None:
        job = load(GOOD, "checkpoint.every_steps=auto", "checkpoint.folder=s3://bucket/x")
        assert job.checkpoint.every_steps == "auto"
        assert_same(job, again(job))
        assert again(job).checkpoint == job.checkpoint

    def test_it_is_flat_and_plain(self) -> None:
        identity = load(GOOD, "model.preset=llama3.1-8b").identity()
        assert identity["model.rope_scaling.factor"] == 8.0
        assert all(isinstance(value, str | int | float | bool | None) for value in identity.values())
