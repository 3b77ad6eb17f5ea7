"""The node stage on a machine with CUDA devices: what NVML, nvidia-smi and the rates say fits together, within a minute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from seatrial.check.blame.nodes import judge_nodes
from seatrial.check.judging.floors import find_sku
from seatrial.check.node.columns import columns
from seatrial.check.node.judge_node import judge_stage
from seatrial.check.node.node_stage import NodeOptions, measure
from seatrial.hardware.catalogue import find_gpu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no CUDA device (torch.cuda.is_available() is false)"
    ),
]


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return measure(NodeOptions(storage=str(tmp_path_factory.mktemp("storage")), device="cuda"))


def test_it_takes_a_minute_at_most(facts: dict[str, Any]) -> None:
    print(json.dumps({"seconds": facts["seconds"], "parts": facts["parts"], "rates": facts["rates"]}))
    assert facts["seconds"] <= 60


def test_every_device_is_measured(facts: dict[str, Any]) -> None:
    rates = facts["rates"]
    assert (rates["ended"], rates["whole"], rates["failed"], rates["skipped"]) == ("ok", True, [], [])
    assert len(rates["gpus"]) == torch.cuda.device_count()
    assert len(rates["pairs"]) == len(rates["gpus"]) * (len(rates["gpus"]) - 1) // 2
    for gpu in rates["gpus"].values():
        assert gpu["problem"] is None
        known = find_gpu(gpu["name"])
        for name in ("gemm_tflop_s", "sustained_tflop_s", "hbm_gb_s", "h2d_gb_s", "d2h_gb_s"):
            assert gpu[name] > 0
        if known is not None:
            # No reading above the data sheet: a wrong unit or a clock that was read too early would show here.
            assert gpu["gemm_tflop_s"] < known.bf16_tflops
            assert gpu["hbm_gb_s"] < known.hbm_tb_s * 1e3
        assert gpu["sustained_tflop_s"] <= gpu["gemm_tflop_s"] * 1.05
        load = gpu["load"]
        assert load is not None, gpu["load_problem"]
        assert load["samples"] >= 3
        assert load["sm_mhz"] <= load["limits"]["sm_mhz"]


def test_nvml_and_cuda_mean_the_same_devices(facts: dict[str, Any]) -> None:
    gpus = facts["gpus"]
    if gpus["problem"] is not None:
        pytest.skip(f"no NVML: {gpus['problem']}")
    shown = {g["pci"]: g["name"] for g in gpus["gpus"]}
    assert set(facts["rates"]["gpus"]) <= set(shown)
    for pci, rates in facts["rates"]["gpus"].items():
        assert shown[pci] == rates["name"]


def test_its_facts_are_judged(facts: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "facts.json").write_text(json.dumps(facts))
    back = json.loads((tmp_path / "facts.json").read_text())
    report = judge_stage({"node": back})
    for finding in report.findings:
        print(finding.code, finding.verdict, finding.target, finding.message)
    assert {f.code for f in report.findings} >= {"GPU007", "GPU008", "NOD003", "NOD012"}
    # Damage is what a reader says of an output that it does not understand: real ones must not lead to it.
    assert not [
        f for f in report.findings if f.code in ("FILE001", "FILE003", "GPU011") and f.verdict != "PASS"
    ]
    stage = columns({"node": back})
    assert stage.present.shape == (1, len(back["rates"]["gpus"]))
    found = judge_nodes(stage)
    for finding in found:
        print(finding.code, finding.verdict, finding.target, finding.message)
    if find_sku(stage.gpu) is not None and find_sku(stage.gpu).floor("gemm_bf16") is not None:  # type: ignore[union-attr]
        assert next(f for f in found if f.code == "MSR001").verdict != "UNJUDGED"
