"""Published results in the planner's terms: described sources unchanged, others by the text of their rows."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from rows_cases import COLUMNS, DESCRIBED, EXPECTED, written

import plan_accuracy
from plan_memory import errors_toml, held, memory_errors, memory_scores, ratio
from plan_rows import COLUMNS as NEEDED
from plan_rows import FACTS, Guessed, Row, read
from plan_words import STACKS, network_of, stack_of
from seatrial.hardware.networks import find_network
from seatrial.plan.cost.memory_fit import errors_from, judge, shipped_errors
from seatrial.plan.cost.predict import capacity
from seatrial.plan.cost.stacks import stacks

UNSEEN = {
    "source": "A cluster of ours, Megatron-Core 0.12 made up",
    "interconnect": "InfiniBand NDR 8x400Gb/s",
}


def told(row: Row) -> dict[str, Any]:
    network = row.cluster.network
    return {
        "source": row.source,
        "name": row.name,
        "gpu": row.gpu,
        "stack": row.stack,
        "network": None if network is None else network.name,
        "nodes": row.cluster.nodes,
        "gpus_per_node": row.cluster.gpus_per_node,
        "model": asdict(row.model),
        "recipe": asdict(row.recipe),
        "free_microbatch": row.free_microbatch,
        "free_recompute": row.free_recompute,
        "step_s": row.step_s,
        "memory_bytes": row.memory_bytes,
        "memory_kind": row.memory_kind,
        "fits": row.fits,
    }


def one(tmp_path: Path, **row: str) -> Row:
    rows, left = read(written(tmp_path / "one.csv", UNSEEN | row))
    assert left == {}
    return rows[0]


def why(tmp_path: Path, **row: str) -> str:
    rows, left = read(written(tmp_path / "one.csv", UNSEEN | row))
    assert rows == []
    assert list(left.values()) == [1]
    return next(iter(left))


def within(expected: Any, found: Any) -> bool:
    """Every value that was written down; a recipe may have got more keys since."""
    if isinstance(expected, dict):
        return all(k in found and within(v, found[k]) for k, v in expected.items())
    return bool(expected == found)


def test_described_sources_are_read_unchanged(tmp_path: Path) -> None:
    """The expected rows were written by the reader that knew described sources alone."""
    rows, left = read(written(tmp_path / "rows.csv", *DESCRIBED))
    assert left == {}
    expected = [json.loads(line) for line in EXPECTED.read_text(encoding="utf-8").splitlines()]
    assert len(rows) == len(expected) == len(DESCRIBED)
    for row, wanted in zip(rows, expected, strict=True):
        assert type(row) is Row
        assert within(wanted, told(row)), row.source
    assert all(any(r.source.startswith(f["source"]) for r in rows) for f in FACTS)


@pytest.mark.parametrize(
    ("words", "stack"),
    [
        ("Megatron-Core 0.12", "megatron"),
        ("Megatron-LM v3, 2022", "megatron-2021"),
        ("Megatron-LM, arXiv:2006.09503", "megatron-2020"),
        ("Megatron-LM, arXiv 2305.13245", "megatron-2023"),
        ("Megatron-LM of 2025", "megatron"),
        ("NeMo 25.07", "nemo"),
        ("Megatron-Bridge 0.2", "nemo"),
        ("Nemotron report", None),
        ("torchtitan v0.2", "torchtitan"),
        ("DeepSpeed 0.17", "deepspeed"),
        ("Megatron-DeepSpeed fork", "megatron-deepspeed"),
        ("BigScience BLOOM", "megatron-deepspeed-bf16"),
        ("GPT-NeoX 2.0", "megatron-2021"),
        ("llm-foundry v0.20", "llm-foundry"),
        ("MaxText", "maxtext"),
        ("InternEvo", "internevo"),
        ("vTrain again", "megatron-deepspeed"),
        ("MegaScale on Megatron-LM", "megascale"),
        ("Colossal-AI", "deepspeed"),
        ("PyTorch FSDP2", "torchtitan"),
        ("somebody's blog", None),
    ],
)
def test_a_description_names_a_stack(words: str, stack: str | None) -> None:
    row = dict.fromkeys(COLUMNS, "")
    for field in ("source", "notes", "precision"):
        assert stack_of(row | {field: words}) == stack, field
    # The source goes before what its notes compare it with.
    if stack is not None:
        assert stack_of(row | {"source": words, "notes": "compared with MaxText"}) == stack


def test_every_stack_that_a_description_can_name_exists() -> None:
    assert {s for _, s in STACKS} - {"megatron of its year"} <= set(stacks())


@pytest.mark.parametrize(
    ("words", "gpu", "name", "gb_s"),
    [
        ("8x400Gb/s IB NDR", "H100 SXM", "InfiniBand NDR 8x400", 50),
        ("InfiniBand 8 x NDR400", "H100 SXM", "InfiniBand NDR 8x400", 50),
        ("8xHDR", "A100-80GB SXM", "InfiniBand HDR 8x200", 25),
        ("4 x HDR InfiniBand", "A100-80GB SXM", "InfiniBand HDR 4x200", 12.5),
        ("InfiniBand 1.6 Tb/s per node", "A100-80GB SXM", "InfiniBand HDR 8x200", 25),
        ("50 GB/s per GPU InfiniBand", "H100 SXM", "InfiniBand NDR 8x400", 50),
        ("XDR 8x800", "B300 SXM", "DGX B300 XDR", 100),
        ("RoCE 1600Gbps/node", "A100-80GB SXM", "RoCE 8x200", 25),
        ("8 NICs 400G RoCEv2", "H100 SXM", "roce 8x400", 50),
        ("4x Slingshot-11 (200 Gb/s each)", "A100-80GB SXM", "slingshot 4x200", 12.5),
        ("Omni-Path 4x100Gb/s per node", "A100-80GB SXM", "Omni-Path 4x100", 6.25),
        ("2x100 Omni-Path", "A100-80GB SXM", "omni-path 2x100", 3.125),
        ("EFA 3200 Gbps", "H100 SXM", "AWS P5 EFAv2", 50),
        ("EFA 3200 Gbps", "H200 SXM", "AWS P5en EFAv3", 50),
        ("p5.48xlarge", "H100 SXM", "AWS P5 EFAv2", 50),
        ("GCP A3 Mega", "H100 SXM", "GCP A3 Mega", 25),
        ("DGX H100", "H100 SXM", "InfiniBand NDR 8x400", 50),
        ("InfiniBand NDR", "H100 SXM", "InfiniBand NDR 8x400", 50),
        ("", "H100 SXM", "InfiniBand NDR 8x400", 50),
        ("IB HDR 200 Gb/s", "H100 SXM", None, None),  # one port, or eight?
        ("100 GbE", "H100 SXM", None, None),
        ("RDMA", "H100 SXM", None, None),
        ("fast", "A100-80GB SXM", None, None),
        ("", "GB200", None, None),
    ],
)
def test_a_description_names_a_network(words: str, gpu: str, name: str | None, gb_s: float | None) -> None:
    found = network_of(words, gpu, 8)
    assert (None if found is None else found.name) == name
    if found is not None:
        assert found.gb_s_per_gpu == gb_s


def test_network_measurements_apply_at_other_link_rates() -> None:
    opa, found = find_network("Omni-Path 4x100"), network_of("2x100 Omni-Path", "A100-80GB SXM", 8)
    assert opa is not None
    assert found is not None
    assert (found.reached, found.hop_us) == (opa.reached, opa.hop_us)
    assert found.source == "2x100 Omni-Path"


def test_row_that_states_only_a_rate_keeps_the_source_network() -> None:
    usual = find_network("RoCE 8x200")
    assert network_of("RDMA 200Gb/s per GPU", "A100-80GB SXM", 8, usual) == usual
    assert network_of("8x200Gb/s InfiniBand", "A100-80GB SXM", 8, usual) == find_network(
        "InfiniBand HDR 8x200"
    )


def test_a_column_takes_precedence_over_the_source(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.csv", {"source": "vTrain made up", "interconnect": "8xHDR InfiniBand"})
    (row,), _ = read(path)
    assert row.cluster.network == find_network("InfiniBand HDR 8x200")
    assert type(row) is Row


def test_undescribed_source_is_guessed_and_marked_as_guessed(tmp_path: Path) -> None:
    row = one(tmp_path, mem_gb_per_gpu="60", notes="nvidia-smi")
    assert type(row) is Guessed
    assert (row.stack, row.cluster.network) == ("megatron", find_network("InfiniBand NDR 8x400"))
    assert (row.recipe.sharding, row.recipe.sequence_parallel, row.memory_kind) == (
        "optimizer",
        True,
        "device",
    )
    assert type(replace(row, fits=False)) is Guessed
    old = one(tmp_path, source="Megatron-LM of 2021", zero_or_fsdp="", mem_gb_per_gpu="60", interconnect="")
    assert (old.recipe.sharding, old.recipe.sequence_parallel, old.memory_kind) == (
        "none",
        False,
        "allocated",
    )
    cut = one(
        tmp_path, source="DeepSpeed, ours", zero_or_fsdp="ZeRO-3", seq_parallel="no", mem_gb_per_gpu="60"
    )
    assert (cut.recipe.sharding, cut.recipe.sequence_parallel, cut.memory_kind) == ("full", False, "reserved")
    whole = one(tmp_path, source="ours with torchtitan", zero_or_fsdp="", precision="bf16+compile")
    assert (whole.recipe.sharding, whole.stack) == ("full", "torchtitan-compiled")
    alone = one(tmp_path, n_gpus="8", dp="2", interconnect="who knows")
    assert (alone.cluster.nodes, alone.cluster.network) == (1, None)
    assert one(tmp_path, tp="", pp="", dp="16").recipe.layout.tensor == 1


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"source": "somebody's blog"}, "stack not known from the words of its source: somebody's blog"),
        ({"interconnect": "fast"}, "network not known: fast"),
        ({"gpu": "GB200", "interconnect": ""}, "network not known: none named, and no usual one of GB200"),
        ({"gpu": "Gaudi3"}, "GPU Gaudi3 is not in the catalogue"),
        ({"model": "Mixtral-8x7B"}, "experts"),
        ({"ep": "8"}, "experts"),
        ({"gpu": "A100-80GB", "precision": "fp8"}, "no peak is known for fp8 on A100-80GB SXM"),
        ({"global_batch": "62"}, "the batch is no multiple of microbatch and data parallel"),
        ({"layers": "many"}, "layers is no number above 0: many"),
        ({"tp": "0"}, "tp is no number above 0: 0"),
        ({"step_time_s": "nan"}, "step_time_s is no number above 0: nan"),
        ({"ffn_hidden": ""}, "no ffn_hidden"),
        ({"zero_or_fsdp": "ZeRO-3 + CPU AdamW offload"}, "optimizer on the CPU"),
    ],
)
def test_unknown_rows_are_excluded_with_a_reason(tmp_path: Path, row: dict[str, str], reason: str) -> None:
    assert why(tmp_path, **row) == reason


def test_a_file_without_these_columns_is_refused(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    path = tmp_path / "other.csv"
    path.write_text("source,model\na,b\n", encoding="utf-8")
    with pytest.raises(ValueError, match="no column url_or_ref, layers"):
        read(path)
    assert set(NEEDED) <= set(COLUMNS)
    monkeypatch.setattr("sys.argv", ["plan_accuracy.py", str(path)])
    assert plan_accuracy.main() == 2
    assert "no column url_or_ref" in capsys.readouterr().err


# ---- memory: what came of rows, and what was said of them ----


def rows_with_memory(tmp_path: Path, shares: dict[str, list[float]]) -> list[Row]:
    """For each described source a row for each of these ratios of measured to predicted memory."""
    path = tmp_path / "memory.csv"
    rows = []
    for source, ratios in shares.items():
        plain = {"source": source, "gpu": "H200", "mem_gb_per_gpu": "1", "zero_or_fsdp": "ZeRO-2"}
        found, left = read(written(path, plain))
        assert left == {}
        predicted = 1 / memory_ratio(found[0])
        rows += [replace(found[0], memory_bytes=predicted * found[0].memory_bytes * r) for r in ratios]  # type: ignore[operator]
    return rows


def memory_ratio(row: Row) -> float:
    found = ratio(row)
    assert found is not None
    return found


def test_errors_use_only_fully_described_rows(tmp_path: Path) -> None:
    rows = rows_with_memory(tmp_path, {"SimuMax a": [1.3, 0.9], "torchtitan benchmarks b": [1.1]})
    known = memory_errors(rows)
    assert [(s.name, s.figures, s.above) for s in known.sources] == [
        ("SimuMax a", 2, (1.3,)),
        ("torchtitan benchmarks b", 1, (1.1,)),
    ]
    guessed = Guessed(**{k: getattr(rows[0], k) for k in rows[0].__dataclass_fields__})
    others = [replace(rows[0], free_microbatch=True), replace(rows[0], free_recompute=True), guessed]
    assert memory_errors([*rows, *others]) == known


def lost(row: Row, share: float) -> Row:
    """One that ran out of memory, on a GPU with `share` of what it needs."""
    gpu = row.cluster.gpu
    small = replace(gpu, hbm_gb=gpu.hbm_gb * share * held(row).reserved / capacity(row.cluster))
    return replace(row, fits=False, memory_bytes=None, cluster=replace(row.cluster, gpu=small))


def test_running_out_of_memory_is_an_error_of_what_should_fit(tmp_path: Path) -> None:
    (row,) = rows_with_memory(tmp_path, {"SimuMax a": [0.9]})
    (found,) = memory_errors([row, lost(row, 1.5), lost(row, 0.8)]).sources
    assert found.figures == 2, "that it needs more than there was is all that is known, and was predicted"
    assert found.above == (1.5001,)


def test_memory_limit_excludes_errors_of_the_same_source(tmp_path: Path) -> None:
    rows = rows_with_memory(tmp_path, {"SimuMax a": [2.0], "torchtitan benchmarks b": [1.001]})
    # Half as much again as it needs: by its own error of 2.0 it would be tight, by the other's 1.001 it fits, and so it was missed.
    full = lost(rows[0], 1.5)
    scores = memory_scores([*rows, full])
    assert judge(held(full).reserved, capacity(full.cluster), memory_errors(rows)).word == "tight"
    assert scores["answers"]["out_of_memory"] == {"rows": 1, "does not fit": 0, "tight": 0, "fits": 1}
    assert scores["answers"]["ran"]["rows"] == 2
    assert scores["above_the_limit_of_other_sources"] == {"figures": 2, "above": 1}


def test_rows_without_memory_figures_use_the_shipped_errors(tmp_path: Path) -> None:
    rows = [replace(r, memory_bytes=None) for r in rows_with_memory(tmp_path, {"SimuMax a": [1.0]})]
    gpu, needs = rows[0].cluster.gpu, held(rows[0]).reserved / capacity(rows[0].cluster)
    for full, word in ((0.5, "fits"), (0.9, "tight"), (1.1, "does not fit")):
        at = replace(rows[0].cluster, gpu=replace(gpu, hbm_gb=gpu.hbm_gb * needs / full))
        lost = replace(rows[0], fits=False, cluster=at)
        assert memory_scores([lost])["answers"]["out_of_memory"][word] == 1


def test_a_file_without_rows_has_no_scores(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("sys.argv", ["plan_accuracy.py", str(written(tmp_path / "none.csv"))])
    assert plan_accuracy.main() == 0
    assert "in sample          None {}" in capsys.readouterr().out


def test_errors_survive_a_round_trip() -> None:
    known = shipped_errors()
    assert errors_from(errors_toml(known)) == known


def test_guessed_rows_are_separate_and_not_fitted(tmp_path: Path, monkeypatch: Any) -> None:
    def scored(*rows: dict[str, str]) -> tuple[dict[str, Any], str, str]:
        out, paces = tmp_path / "scores.json", tmp_path / "calibration.toml"
        argv = [
            "x",
            str(written(tmp_path / "rows.csv", *rows)),
            "--write",
            str(out),
            "--calibration",
            str(paces),
        ]
        monkeypatch.setattr("sys.argv", argv)
        assert plan_accuracy.main() == 0
        doubt = (tmp_path / "memory_error.toml").read_text(encoding="utf-8")
        return json.loads(out.read_text(encoding="utf-8")), paces.read_text(encoding="utf-8"), doubt

    described = [
        {"source": "NVIDIA a", "step_time_s": "1.2"},
        {"source": "NVIDIA b", "step_time_s": "1.3"},
        {"source": "SimuMax c", "gpu": "B200", "n_gpus": "8", "mem_gb_per_gpu": "70", "dp": "2"},
    ]
    unseen = [
        UNSEEN | {"step_time_s": "9", "mem_gb_per_gpu": "79"},
        UNSEEN | {"outcome": "OOM", "step_time_s": ""},
    ]
    without, paces, doubt = scored(*described)
    scores, paces_too, doubt_too = scored(*described, *unseen)
    assert (paces_too, doubt_too) == (paces, doubt)
    guessed = scores.pop("guessed")
    assert without.pop("guessed")["rows"] == 0
    assert scores == without
    assert (guessed["rows"], guessed["timed"], guessed["all"]["rows"]) == (2, 1, 1)
    assert list(guessed["by_source"]) == [UNSEEN["source"]]
    assert list(guessed["by_stack"]) == ["megatron on H100 SXM"]
    assert guessed["memory"]["answers"]["out_of_memory"]["rows"] == 1
    assert guessed["memory"]["all"]["rows"] == 1
