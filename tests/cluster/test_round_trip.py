"""A Hugging Face checkpoint through four ranks and back: every tensor equal to the last byte."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch
from parity_ranks import DEEPSEEK, EXPERTS

from conftest import run_cases
from seatrial.checkpoint.manifest import complete
from seatrial.checkpoint.read import CheckpointWeights
from seatrial.checkpoint.verified import verify
from seatrial.model.hf_write import write_huggingface

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize(
    ("dtype", "tied", "family"),
    [
        pytest.param("float32", False, "qwen2", marks=pytest.mark.long, id="float32-untied"),
        pytest.param("float32", True, "qwen2", id="float32-tied"),
        pytest.param("bfloat16", False, "qwen2", id="bfloat16-untied"),
        pytest.param("bfloat16", True, "qwen2", marks=pytest.mark.long, id="bfloat16-tied"),
        pytest.param("bfloat16", False, "qwen3_moe", id="bfloat16-experts"),
        pytest.param("bfloat16", False, "glm4_moe", id="bfloat16-shared-experts"),
    ],
)
def test_every_byte_comes_back(tied: bool, dtype: str, family: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    config_class, model_class = transformers.Qwen2Config, transformers.Qwen2ForCausalLM
    mixture = {}
    if family == "qwen3_moe":
        config_class, model_class = transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM
        mixture = {"head_dim": 16, **EXPERTS}
    if family == "glm4_moe":
        config_class, model_class = transformers.Glm4MoeConfig, transformers.Glm4MoeForCausalLM
        mixture = {"head_dim": 16, "attention_bias": True, "use_qk_norm": True, "first_k_dense_replace": 0}
        mixture |= {"num_nextn_predict_layers": 0, "n_routed_experts": EXPERTS["num_experts"]}
        mixture |= {key: value for key, value in (EXPERTS | DEEPSEEK).items() if key != "num_experts"}
    partial = {"partial_rotary_factor": 0.5} if family == "glm4_moe" else {}
    config = config_class(
        **mixture,
        vocab_size=264,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, **partial},
        tie_word_embeddings=tied,
    )
    model = model_class(config).to(getattr(torch, dtype))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    for module in model.modules():
        if hasattr(module, "e_score_correction_bias"):  # `from_pretrained` keeps it in fp32
            module.e_score_correction_bias = torch.randn(EXPERTS["num_experts"])
    theirs = tmp_path / "theirs"
    # Several files and an index, as every large model has.
    model.save_pretrained(theirs, max_shard_size="150KB")
    assert (theirs / "model.safetensors.index.json").is_file()

    case = {
        "name": "convert",
        "layout": {"shard": 4, "expert": 2} if mixture else {"tensor": 2, "pipeline": 2},
        "tied": tied,
        "family": family,
        "from": str(theirs),
        "to": str(tmp_path / "checkpoints"),
    }
    done = run_cases([case], tmp_path, timeout_s=120)
    assert done.returncode == 0, done.stderr[-4000:]
    (checkpoint,) = complete(tmp_path / "checkpoints")
    assert len(verify(checkpoint).files) == 4

    source = CheckpointWeights(checkpoint)
    ours = tmp_path / "ours"
    write_huggingface(source, source.arch, ours, dtype=dtype, max_shard_bytes=150_000)
    before, after = _tensors(theirs), _tensors(ours)
    assert after.keys() == before.keys()
    for name, values in before.items():
        assert after[name].dtype == values.dtype, name
        assert torch.equal(after[name].view(torch.uint8), values.view(torch.uint8)), name
    again = transformers.AutoModelForCausalLM.from_pretrained(ours, dtype=getattr(torch, dtype))
    theirs_again = again.state_dict()
    assert all(torch.equal(theirs_again[name], values) for name, values in model.state_dict().items())


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= safetensors.torch.load_file(file)
    return found
