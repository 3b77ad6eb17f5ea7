"""A family whose Hugging Face files name keys and parameters in their own way: EXAONE of examples/, which computes what Llama does."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from model_cases import ARCHITECTURES, Oracle, random_tensors, same_bytes
from safetensors.torch import load_file, save_file

from seatrial.base.errors import InputError
from seatrial.cli.main import main
from seatrial.job.huggingface import architecture_from_config, read_config
from seatrial.job.loading import load_job
from seatrial.model.generate import load_whole
from seatrial.model.hf import EMBEDDING, INDEX, WEIGHTS, HuggingFaceWeights
from seatrial.model.hf_write import write_huggingface
from seatrial.train.rank import first_weights

LLAMA = replace(ARCHITECTURES["llama3-gqa2"], vocab_size=264, rms_norm_eps=1e-5, tie_word_embeddings=True)
EXAONE = replace(LLAMA, family="exaone")
# As the parts of LGAI-EXAONE/EXAONE-3.5-2.4B-Instruct are named; not taken from the code under test.
THEIRS = [
    ("model.embed_tokens", "transformer.wte"),
    ("model.norm", "transformer.ln_f"),
    ("model.layers", "transformer.h"),
    ("input_layernorm", "ln_1"),
    ("post_attention_layernorm", "ln_2"),
    ("self_attn", "attn.attention"),
    ("o_proj", "out_proj"),
    ("mlp.gate_proj", "mlp.c_fc_0"),
    ("mlp.up_proj", "mlp.c_fc_1"),
    ("mlp.down_proj", "mlp.c_proj"),
]
IDS = torch.arange(80).view(2, 40)


def config() -> dict[str, Any]:
    """A config.json with the keys of the published one."""
    return {
        "architectures": ["ExaoneForCausalLM"],
        "model_type": "exaone",
        "activation_function": "silu",
        "attention_dropout": 0.0,
        "embed_dropout": 0.0,
        "head_dim": EXAONE.head_dim,
        "hidden_size": EXAONE.hidden_size,
        "intermediate_size": EXAONE.intermediate_size,
        "layer_norm_epsilon": 1e-5,
        "max_position_embeddings": EXAONE.max_position_embeddings,
        "num_attention_heads": EXAONE.num_attention_heads,
        "num_key_value_heads": EXAONE.num_key_value_heads,
        "num_layers": EXAONE.num_hidden_layers,
        "rope_scaling": {**vars(EXAONE.rope_scaling), "rope_type": "llama3"},
        "rope_theta": EXAONE.rope_theta,
        "tie_word_embeddings": EXAONE.tie_word_embeddings,
        "torch_dtype": "float32",
        "vocab_size": EXAONE.vocab_size,
    }


def renamed(name: str) -> str:
    for ours, theirs in THEIRS:
        name = name.replace(ours, theirs)
    return name


@pytest.fixture
def published(tmp_path: Path) -> Path:
    folder = tmp_path / "published"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config()))
    save_file({renamed(n): t for n, t in random_tensors(EXAONE).items()}, folder / WEIGHTS)
    return folder


@pytest.fixture
def weights(published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HuggingFaceWeights:
    """As a rank opens them for a job that starts from the folder."""
    monkeypatch.chdir(tmp_path)
    assert main(["init", "--preset", "first-voyage"]) == 0
    path = Path("first-voyage.toml")
    path.write_text(path.read_text().replace('preset = "qwen2.5-tiny"', f'hf = "{published}"'))
    settings = ["train.sequence_length=64", f"model.init_from={published}"]
    job = load_job(path, settings)
    assert job.architecture == EXAONE
    found = first_weights(job)
    assert isinstance(found, HuggingFaceWeights)
    return found


def test_its_logits_match_transformers(weights: HuggingFaceWeights, oracle: Oracle) -> None:
    theirs = oracle.model(LLAMA, random_tensors(EXAONE))
    with torch.no_grad():
        assert torch.equal(load_whole(EXAONE, weights)(IDS), theirs(IDS).logits)


@pytest.mark.parametrize("limit", [10**9, 20_000])
def test_export_restores_its_own_names(
    limit: int, published: Path, weights: HuggingFaceWeights, tmp_path: Path
) -> None:
    written = write_huggingface(weights, EXAONE, tmp_path / "out", max_shard_bytes=limit)
    ours = {n: t for file in written.files for n, t in load_file(tmp_path / "out" / file).items()}
    theirs = load_file(published / WEIGHTS)
    assert ours.keys() == theirs.keys()
    assert all(same_bytes(ours[name], theirs[name]) for name in theirs)
    if len(written.files) > 1:
        assert json.loads((tmp_path / "out" / INDEX).read_text())["weight_map"].keys() == theirs.keys()
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {key: said.get(key) for key in config()} == config()
    assert not {"num_hidden_layers", "hidden_act", "rms_norm_eps"} & said.keys()
    assert read_config(tmp_path / "out") == EXAONE


def test_problems_use_the_names_in_the_files(published: Path, weights: HuggingFaceWeights) -> None:
    tensors = load_file(published / WEIGHTS)
    for layer in range(EXAONE.num_hidden_layers):
        del tensors[f"transformer.h.{layer}.ln_2.weight"]
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"] + 1
    save_file(tensors, published / WEIGHTS)
    with pytest.raises(InputError) as caught:
        HuggingFaceWeights(published, weights._stored).check(EXAONE)
    said = caught.value.render()
    assert "transformer.h.*.ln_2.weight (layers 0-1) is missing" in said
    assert "lm_head.weight differs from transformer.wte.weight, but the model ties them" in said
    assert "these are the names of a base model" not in said


def test_a_tied_pair_stored_under_the_heads_name(published: Path, weights: HuggingFaceWeights) -> None:
    tensors = load_file(published / WEIGHTS)
    expected = tensors["lm_head.weight"] = tensors.pop("transformer.wte.weight")
    save_file(tensors, published / WEIGHTS)
    again = HuggingFaceWeights(published, weights._stored)
    again.check(EXAONE)
    assert again.shape(EMBEDDING) == tuple(expected.shape)


def test_missing_keys_have_the_familys_defaults() -> None:
    small = {k: v for k, v in config().items() if k not in ("layer_norm_epsilon", "num_key_value_heads")}
    a = architecture_from_config(small)
    assert (a.rms_norm_eps, a.num_key_value_heads) == (1e-5, EXAONE.num_attention_heads)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"embed_dropout": 0.1}, "embed_dropout = 0.1 is not supported, only 0.0"),
        ({"activation_function": "gelu"}, 'hidden_act "gelu" is not supported'),
        ({"num_layers": None}, "missing keys: num_hidden_layers"),
    ],
)
def test_unsupported_config_values_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        architecture_from_config(config() | changes)
