"""Model presets against published totals, and the ways a [model] section names a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jobs import GOOD, load, only_problem, problems

from seatrial.base.errors import Diagnostic
from seatrial.job import model_presets
from seatrial.job.huggingface import config_from_architecture
from seatrial.job.loading import judged
from seatrial.job.rules import HERE_RULES

# Totals as the model cards and the safetensors headers on huggingface.co give them, in billions.
PUBLISHED = {
    "qwen2.5-0.5b": 0.494,
    "qwen2.5-1.5b": 1.54,
    "qwen2.5-3b": 3.09,
    "qwen2.5-7b": 7.62,
    "qwen2.5-14b": 14.8,
    "qwen2.5-32b": 32.8,
    "qwen2.5-72b": 72.7,
    "llama3-8b": 8.03,
    "llama3.1-8b": 8.03,
    "llama3-70b": 70.6,
    "llama3.1-70b": 70.6,
    "llama3.2-1b": 1.24,
    "qwen3-0.6b": 0.596,
    "qwen3-1.7b": 1.72,
    "qwen3-4b": 4.02,
    "qwen3-8b": 8.19,
    "qwen3-14b": 14.8,
    "qwen3-32b": 32.8,
    "qwen3-30b-a3b": 30.5,
    "qwen3-235b-a22b": 235.0,
    "glm-4.5-air": 106.0,
    # 355 (arXiv:2508.06471, table 1) with the layer that predicts a token further ahead, and without embedding and head.
    "glm-4.5": 355 - 3.87 + 1.55,
}


def test_every_published_model_is_compared() -> None:
    assert set(model_presets()) == {*PUBLISHED, "qwen2.5-tiny"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_total(name: str) -> None:
    assert model_presets()[name].parameters() == pytest.approx(PUBLISHED[name] * 1e9, rel=0.01)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("qwen3-30b-a3b", 3.3), ("qwen3-235b-a22b", 22.0), ("glm-4.5-air", 12 + 1.24), ("glm-4.5", 32 + 1.55)],
)
def test_active_parameters_are_the_published_ones(name: str, billions: float) -> None:
    assert model_presets()[name].active_parameters() == pytest.approx(billions * 1e9, rel=0.02)


@pytest.mark.parametrize("name", list(model_presets()))
def test_every_preset_is_a_valid_model(name: str) -> None:
    assert load(GOOD, f"model.preset={name}").architecture == model_presets()[name]


def sized(**sizes: object) -> str:
    """The good job with explicit sizes instead of the preset."""
    lines = "\n".join(f"{key} = {json.dumps(value)}" for key, value in sizes.items())
    return GOOD.replace('preset = "qwen2.5-tiny"', lines)


SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


@pytest.mark.parametrize(
    ("family", "theta", "eps", "qkv_bias", "qk_norm"),
    [
        ("qwen2", 1e6, 1e-6, True, False),
        ("llama", 5e5, 1e-5, False, False),
        ("qwen3", 1e6, 1e-6, False, True),
    ],
)
def test_explicit_sizes_have_the_familys_defaults(
    family: str, theta: float, eps: float, qkv_bias: bool, qk_norm: bool
) -> None:
    a = load(sized(**SIZES, family=family)).architecture
    assert (a.rope_theta, a.rms_norm_eps, a.qkv_bias, a.qk_norm) == (theta, eps, qkv_bias, qk_norm)
    assert (a.head_dim, a.num_key_value_heads, a.max_position_embeddings) == (16, 4, 32768)
    assert not a.tie_word_embeddings


def test_missing_sizes_are_listed() -> None:
    given = {key: SIZES[key] for key in ("hidden_size", "num_hidden_layers")}
    problem = only_problem(text=sized(**given))
    assert problem.message == "missing in [model]: vocab_size, intermediate_size, num_attention_heads"
    assert (problem.line, problem.column) == (3, 2)


def test_a_model_must_be_named() -> None:
    assert only_problem(text=sized()).message == "[model] does not specify a model"
    folder = problems(sized(init_from="/models/x"))
    assert any('hf = "/models/x"' in (p.hint or "") for p in folder)


def test_heads_must_divide_hidden_size_unless_head_dim_is_set() -> None:
    problem = only_problem(text=sized(**{**SIZES, "hidden_size": 66}))
    assert "hidden_size 66 is not divisible by num_attention_heads 4" in problem.message
    assert "68" in (problem.hint or "")
    load(sized(**{**SIZES, "hidden_size": 66, "head_dim": 16}))


def test_explicit_sizes_replace_those_of_a_preset() -> None:
    a = load(GOOD, "model.num_hidden_layers=8", "model.rope_scaling={factor=8.0, low_freq_factor=1, "
             "high_freq_factor=4.0, original_max_position_embeddings=512}").architecture  # fmt: skip
    assert (a.num_hidden_layers, a.hidden_size) == (8, 128)
    assert a.rope_scaling is not None
    assert a.rope_scaling.low_freq_factor == 1


def test_another_family_brings_its_own_biases_and_norms() -> None:
    a = load(GOOD, "model.family=qwen3").architecture
    assert (a.qkv_bias, a.qk_norm) == (False, True)


def test_rope_scaling_is_checked() -> None:
    problem = only_problem("model.rope_scaling={factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0}")
    assert problem.message == "[model.rope_scaling] is missing the key `original_max_position_embeddings`"


def test_unknown_preset() -> None:
    problem = only_problem("model.preset=qwen2.5-7B")
    assert problem.message == 'no built-in model "qwen2.5-7B"'
    assert (problem.hint or "").startswith('did you mean "qwen2.5-7b"?')


def test_preset_and_hf_exclude_each_other() -> None:
    assert only_problem("model.hf=/models/x").message == "[model] has both `preset` and `hf`"


def write_checkpoint(folder: Path, preset: str = "qwen2.5-tiny") -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_from_architecture(model_presets()[preset])))
    (folder / "model.safetensors").write_bytes(b"")


def test_a_model_from_a_config_json(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "hf")
    for path in ("hf", "hf/config.json"):
        job = load(sized(hf=path), folder=tmp_path)
        assert job.architecture == model_presets()["qwen2.5-tiny"]
        assert job.model.hf == str(tmp_path / path)


def test_a_config_json_that_cannot_be_used(tmp_path: Path) -> None:
    assert "no such file" in only_problem(text=sized(hf="none"), folder=tmp_path).message
    for content in ("{", "[" * 100_000, '{"vocab_size": ' + "1" * 5000 + "}"):
        (tmp_path / "config.json").write_text(content)
        assert "not valid JSON" in only_problem(text=sized(hf="."), folder=tmp_path).message
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    problem = only_problem(text=sized(hf="config.json"), folder=tmp_path)
    assert 'model_type "gpt2" is not supported' in problem.message
    assert (problem.line, problem.column) == (4, 6)


def here(*overrides: str) -> list[Diagnostic]:
    """What the machine that a job starts on says of it."""
    _, found = judged(
        GOOD, name="job.toml", base_folder=Path("/nowhere"), overrides=overrides, more_rules=HERE_RULES
    )
    return found


def test_init_from_must_be_the_same_model(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "same")
    job = load(GOOD, f"model.init_from={tmp_path}/same")
    assert job.model.init_from == f"{tmp_path}/same"
    assert here(f"model.init_from={tmp_path}/same") == []

    (problem,) = here(f"model.init_from={tmp_path}/same", "model.num_hidden_layers=8")
    assert "num_hidden_layers is 4 in the checkpoint and 8 in [model]" in problem.message

    (problem,) = here(f"model.init_from={tmp_path}/none")
    assert "no folder" in problem.message
    load(GOOD, f"model.init_from={tmp_path}/none")  # may be planned without
    (tmp_path / "empty").mkdir()
    found = [p.message for p in here(f"model.init_from={tmp_path}/empty")]
    assert len(found) == 2
    assert "no *.safetensors" in found[0]
    assert "no config.json" in found[1]
