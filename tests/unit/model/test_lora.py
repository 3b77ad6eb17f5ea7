"""Low-rank adapters against plain algebra, transformers and, where it is installed, PEFT."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from model_cases import ARCHITECTURES, GROUPED, DictWeights, Oracle, random_tensors
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from seatrial.base.box import Box
from seatrial.job.architecture import Architecture
from seatrial.job.lora import LORA_TARGETS, Lora
from seatrial.job.parameters import is_router_bias
from seatrial.model.decoder import Decoder, whole_shapes
from seatrial.model.generate import load_whole
from seatrial.model.hf import HuggingFaceWeights
from seatrial.model.hf_write import write_huggingface
from seatrial.model.initialise import FreshAdapters
from seatrial.model.lora import MergedWeights, freeze_base, is_adapter
from seatrial.model.lora_write import write_adapter

ATTENTION: Any = ("q_proj", "v_proj")
DENSE = {name: ARCHITECTURES[name] for name in ("qwen2-gqa2-tied", "llama3-gqa2", "qwen3-gqa4")}
EXPERTS = {name: arch for name, arch in ARCHITECTURES.items() if arch.num_experts}
CASES = DENSE | EXPERTS
TARGETS = [(name, targets) for name in DENSE for targets in (LORA_TARGETS, ATTENTION)]
TARGETS += [(name, targets) for name in EXPERTS for targets in (LORA_TARGETS[:4], ATTENTION)]


def _with(arch: Architecture, targets: Any = LORA_TARGETS, rank: int = 3) -> Architecture:
    return replace(arch, lora=Lora(rank, 1.5, targets))


def _tokens(arch: Architecture) -> Tensor:
    return torch.randint(0, arch.vocab_size, (2, 33), generator=torch.Generator().manual_seed(5))


def _loss(logits: Tensor, ids: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@pytest.mark.parametrize(("name", "targets"), TARGETS)
def test_merged_weights_give_the_logits_of_the_adapters(
    name: str, targets: Any, oracle: Oracle, tmp_path: Path
) -> None:
    """Merged, in Hugging Face's format, read by transformers; to 1e-5 of the largest logit."""
    arch = _with(CASES[name], targets)
    source = DictWeights(random_tensors(arch))
    ids = _tokens(arch)
    with torch.no_grad():
        ours = load_whole(arch, source)(ids)
        base = load_whole(arch.base, source)(ids)
        write_huggingface(MergedWeights(source, arch), arch.base, tmp_path / "merged")
        theirs = oracle.auto.from_pretrained(tmp_path / "merged", dtype=torch.float32)(ids).logits
    assert (ours - base).abs().max() > 0.1 * base.abs().max(), (
        "adapters that change nothing would hide everything"
    )
    assert (ours - theirs).abs().max() < 1e-5 * theirs.abs().max()
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert "lora" not in config
    HuggingFaceWeights(tmp_path / "merged").check(arch.base)


def test_any_block_of_rows_is_merged_alike() -> None:
    arch = _with(CASES["qwen2-gqa2-tied"])
    tensors = random_tensors(arch)
    merged = MergedWeights(DictWeights(tensors), arch)
    name = "model.layers.1.mlp.down_proj.weight"
    layer = name.removesuffix(".weight")
    rows, columns = tensors[name].shape
    expected = tensors[name] + 0.5 * tensors[f"{layer}.lora_B.weight"] @ tensors[f"{layer}.lora_A.weight"]
    whole = merged.read(name, Box.whole((rows, columns)), torch.float32)
    part = merged.read(name, Box((5, 7), (11, 20)), torch.float32)
    torch.testing.assert_close(whole, expected)
    torch.testing.assert_close(part, expected[5:16, 7:27])


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft's, of transformers
@pytest.mark.parametrize("name", CASES)
def test_peft_reads_the_adapter_and_trains_it_alike(name: str, oracle: Oracle, tmp_path: Path) -> None:
    import peft  # takes seconds, and transformers with it

    arch = _with(CASES[name], LORA_TARGETS if name in DENSE else LORA_TARGETS[:4])
    source = DictWeights(random_tensors(arch))
    write_huggingface(source, arch.base, tmp_path / "base")
    write_adapter(source, arch, tmp_path / "adapter")
    base = oracle.auto.from_pretrained(tmp_path / "base", dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter", is_trainable=True)
    ours = load_whole(arch, source)
    freeze_base(ours)
    ids = _tokens(arch)
    _loss(ours(ids), ids).backward()
    _loss(theirs(ids).logits, ids).backward()
    found = {n: p.grad for n, p in ours.named_parameters() if p.grad is not None}
    expected = {
        n.removeprefix("base_model.model.").replace(".default", ""): p.grad
        for n, p in theirs.named_parameters()
        if p.grad is not None
    }
    assert found.keys() == expected.keys()
    for n, grad in expected.items():
        torch.testing.assert_close(found[n], grad, rtol=0, atol=1e-5 * float(grad.abs().max()))


def test_an_adapter_alone_has_the_names_of_peft(tmp_path: Path) -> None:
    arch = _with(CASES["llama3-gqa2"], ATTENTION)
    tensors = random_tensors(arch)
    written = write_adapter(DictWeights(tensors), arch, tmp_path / "adapter", notes={"README.md": "x"})
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert stored.keys() == {
        f"base_model.model.model.layers.{i}.self_attn.{t}.lora_{m}.weight"
        for i in range(2)
        for t in ATTENTION
        for m in "AB"
    }
    for name, values in stored.items():
        assert torch.equal(values, tensors[name.removeprefix("base_model.model.")])
    assert written.bytes == sum(t.nbytes for t in stored.values())
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 3, 1.5)
    assert config["target_modules"] == sorted(ATTENTION)
    assert sorted(p.name for p in (tmp_path / "adapter").iterdir()) == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


def test_training_starts_from_the_base_model() -> None:
    arch = _with(CASES["qwen3-gqa4"], rank=8)
    tensors = random_tensors(arch.base)
    source = FreshAdapters(DictWeights(tensors), arch, seed=7)
    ids = _tokens(arch)
    with torch.no_grad():
        assert torch.equal(load_whole(arch, source)(ids), load_whole(arch.base, DictWeights(tensors))(ids))
    for name, shape in whole_shapes(arch).items():
        values = source.read(name, Box.whole(shape), torch.float32)
        if name.endswith("lora_A.weight"):
            bound = 1 / math.sqrt(shape[1])  # Kaiming uniform with a = sqrt(5)
            assert 0.9 * bound < values.abs().max() <= bound
            assert abs(float(values.mean())) < 0.2 * bound
        elif name.endswith("lora_B.weight"):
            assert not values.any()
        else:
            assert torch.equal(values, tensors[name])


@pytest.mark.parametrize(
    ("name", "targets"), [*TARGETS, *((n, t) for n in DENSE for t in (None, *((t,) for t in LORA_TARGETS)))]
)
def test_parameters_and_flops_are_those_of_the_model(name: str, targets: Any) -> None:
    """FLOPs of matrix products as torch counts them: no weight gradient of a frozen layer, no gradient that nothing needs."""
    arch = CASES[name] if targets is None else _with(CASES[name], targets)
    model = Decoder(arch)
    if targets is not None:
        freeze_base(model)
    counted = [p for name, p in model.named_parameters() if not is_router_bias(name)]
    counts = [sum(p.numel() for p in counted if p.requires_grad or every) for every in (0, 1)]
    assert counts == [arch.trained_parameters(), arch.parameters()]
    ids = _tokens(arch)
    with FlopCounterMode(display=False, custom_mapping=GROUPED) as counter:
        out = model(ids)
        (out[0] if isinstance(out, tuple) else out).sum().backward()
    products = sum(n for op, n in counter.get_flop_counts()["Global"].items() if "mm" in str(op))
    # Causal and full attention differ by half of the whole score matrix: what remains without either are the products.
    causal, full = (arch.flops_per_token(33, full_attention=f) for f in (False, True))
    assert products == (2 * causal - full) * ids.numel()


def test_recorded_architectures_come_back() -> None:
    arch = _with(CASES["llama3-gqa2"], ("down_proj", "q_proj"))
    again = Architecture.from_dict(json.loads(json.dumps(arch.as_dict())))
    assert again.lora == Lora(3, 1.5, ("q_proj", "down_proj"))
    assert "lora" not in arch.base.as_dict(), "as recorded before there were adapters"
    assert all(not is_adapter(name) for name in whole_shapes(arch.base))
