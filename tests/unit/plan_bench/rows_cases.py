"""Made-up published results: the columns of such files, with invented sizes and figures."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

BENCH = Path(__file__).parents[3] / "bench"
if str(BENCH) not in sys.path:
    sys.path.insert(0, str(BENCH))

EXPECTED = Path(__file__).parent / "described_rows.jsonl"
HEADER = (
    "source,url_or_ref,model,params_b,layers,hidden,ffn_hidden,heads,kv_heads,vocab,seq_len,gpu,n_gpus,gpus_per_node,"
    "interconnect,tp,pp,vpp,dp,cp,ep,zero_or_fsdp,micro_batch,global_batch,precision,recompute,seq_parallel,"
    "tflops_per_gpu,mfu_pct,tokens_per_s_per_gpu,step_time_s,mem_gb_per_gpu,flops_formula_note,attn_flops_convention,"
    "tflops_model_causal,mfu_causal_pct,confidence,outcome,notes"
)
COLUMNS = next(csv.reader([HEADER]))
PLAIN = {
    "url_or_ref": "made up",
    "model": "Llama-made-up",
    "layers": "20",
    "hidden": "2048",
    "ffn_hidden": "5632",
    "heads": "16",
    "kv_heads": "8",
    "vocab": "32000",
    "seq_len": "4096",
    "gpu": "H100",
    "n_gpus": "16",
    "gpus_per_node": "8",
    "tp": "2",
    "pp": "2",
    "vpp": "1",
    "dp": "4",
    "cp": "1",
    "zero_or_fsdp": "ZeRO-1",
    "micro_batch": "1",
    "global_batch": "64",
    "precision": "bf16",
    "recompute": "none",
    "step_time_s": "1.5",
    "outcome": "ok",
}
SWITCH_GPT = {
    "model": "GPT-made-up",
    "ffn_hidden": "",
    "kv_heads": "",
    "gpu": "A100-80GB",
    "zero_or_fsdp": "",
}
# One or more of every source that is described, with the columns that its description looks at.
DESCRIBED: tuple[dict[str, str], ...] = (
    {"source": "vTrain made up", **SWITCH_GPT, "interconnect": "4x HDR200 IB (800Gbps/node)"},
    {
        "source": "BigScience tr11 chronicles-prequel made up",
        **SWITCH_GPT,
        "zero_or_fsdp": "ZeRO-1",
        "notes": "date 02-20",
        "mem_gb_per_gpu": "41",
        "interconnect": "Omni-Path 4x100Gb/s per node",
    },
    {"source": "BigScience tr11 chronicles-prequel made up", **SWITCH_GPT, "zero_or_fsdp": "ZeRO-0"}
    | {"notes": "date 02-28"},
    {"source": "BigScience made up", **SWITCH_GPT, "outcome": "OOM", "step_time_s": "", "recompute": "full"},
    {"source": "Narayanan made up", **SWITCH_GPT, "step_time_s": "", "tflops_per_gpu": "140"}
    | {"attn_flops_convention": "full+recompute(HFU)", "recompute": "full", "interconnect": "Selene"},
    {"source": "Megatron-LM README Jan-2021 made up", **SWITCH_GPT},
    {"source": "Megatron-LM images made up", **SWITCH_GPT, "gpu": "A100-40GB"},
    {"source": "MegaScale NSDI24 Table 2 (Megatron made up)", "gpu": "A100-80GB", "vpp": "6", "recompute": ""}
    | {"interconnect": "8x200Gb/s RoCE"},
    {
        "source": "MegaScale NSDI24 Table 2 (MegaScale made up)",
        "gpu": "A100-80GB",
        "vpp": "6",
        "recompute": "",
    },
    {"source": "Megatron-LM README model_table made up", "micro_batch": "", "recompute": "selective"},
    {"source": "GPT-NeoX made up", **SWITCH_GPT, "gpu": "A100-40GB", "vocab": "", "gpus_per_node": ""},
    {
        "source": "NVIDIA dgxc-benchmarking v25.04.02 (MaxText made up)",
        "zero_or_fsdp": "FSDP(8)",
        "recompute": "",
    }
    | {"interconnect": "8x400Gb/s IB NDR", "tp": "1", "pp": "1"},
    {"source": "NVIDIA made up", "precision": "fp8", "interconnect": "DGX H100", "vpp": "5"},
    {"source": "NVIDIA made up", "zero_or_fsdp": "DDP/dist-opt (FSDP=0)", "recompute": ""},
    {"source": "SimuMax made up", "gpu": "B200", "n_gpus": "8", "mem_gb_per_gpu": "71", "dp": "2"}
    | {"interconnect": "single node NVLink5"},
    {"source": "MosaicML llm-foundry benchmarking README [A100 made up", "model": "MPT-made-up", "tp": "1"}
    | {"pp": "1", "gpu": "A100-40GB", "precision": "bf16/PURE", "zero_or_fsdp": "FSDP FULL_SHARD"}
    | {"interconnect": "RoCE 1600Gbps/node", "ffn_hidden": "", "kv_heads": ""},
    {"source": "MosaicML made up", "model": "MPT-made-up", "tp": "1", "pp": "1", "ffn_hidden": ""}
    | {"zero_or_fsdp": "FSDP SHARD_GRAD_OP", "precision": "amp_bf16/DEFAULT"},
    {"source": "torchtitan benchmarks made up", "gpu": "H100-96GB(HBM2e,500W)", "tp": "1", "pp": "1"}
    | {"zero_or_fsdp": "FSDP2(16)", "precision": "bf16+compile", "mem_gb_per_gpu": "60"}
    | {"interconnect": "RDMA 400Gb/s per GPU", "step_time_s": "", "tokens_per_s_per_gpu": "5000"},
    {"source": "torchtitan benchmarks made up", "gpu": "H100-96GB(HBM2e,500W)", "pp": "8", "n_gpus": "64"}
    | {"zero_or_fsdp": "FSDP2(4)", "precision": "fp8+compile", "micro_batch": "", "vpp": ""}
    | {"global_batch": "256"},
    {
        "source": "torchtitan docs made up",
        "tp": "1",
        "pp": "1",
        "gpu": "H100-95GB(HBM2e)",
        "zero_or_fsdp": "FSDP2(16)",
    },
    {
        "source": "torchtitan docs made up",
        "tp": "1",
        "pp": "1",
        "gpu": "A100-80GB",
        "zero_or_fsdp": "FSDP2(16)",
    },
    {"source": "InternEvo made up", "model": "InternLM-made-up", "gpu": "A100-80GB", "tp": "1", "pp": "1"}
    | {"zero_or_fsdp": "ZeRO-1 in groups of 8", "interconnect": "4x100Gb RoCE/node"},
    {
        "source": "stas00 made up",
        "tp": "1",
        "pp": "1",
        "zero_or_fsdp": "ZeRO-2",
        "mem_gb_per_gpu": "60",
        "gpu": "H200",
    },
)


def written(path: Path, *rows: dict[str, str]) -> Path:
    """A file of `PLAIN` rows, each with its own differences."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows({**dict.fromkeys(COLUMNS, ""), **PLAIN, **row} for row in rows)
    return path
