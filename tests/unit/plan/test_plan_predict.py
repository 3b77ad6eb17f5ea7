"""Predictions: parts add up, and properties that hold for any numbers."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields, replace
from itertools import pairwise, product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from seatrial.hardware.catalogue import Gpu, find_gpu, gpus
from seatrial.hardware.networks import find_network
from seatrial.job.architecture import Architecture
from seatrial.job.layout import Layout
from seatrial.job.models import model_presets
from seatrial.plan.cost.calibration import Calibration, Entry, shipped
from seatrial.plan.cost.collectives import UnknownNetworkError
from seatrial.plan.cost.kernels import Kernels, UnknownSpeedError
from seatrial.plan.cost.memory import memory
from seatrial.plan.cost.predict import Prediction, capacity, predict
from seatrial.plan.cost.stacks import stacks
from seatrial.plan.model.cluster import Cluster
from seatrial.plan.model.recipe import Recipe

SIZES = {name: model_presets()[name] for name in ("qwen2.5-0.5b", "llama3-8b", "qwen2.5-72b")}
MODEL = SIZES["qwen2.5-72b"]
LLAMA_405B = replace(
    model_presets()["llama3.1-70b"],
    hidden_size=16384,
    intermediate_size=53248,
    num_hidden_layers=126,
    num_attention_heads=128,
)
NDR = find_network("InfiniBand NDR 8x400")
assert NDR is not None


def gpu(name: str) -> Gpu:
    found = find_gpu(name)
    assert found is not None
    return found


B300 = Cluster(gpu("B300 SXM"), 16, 8, NDR)
REFERENCE = Recipe(4096, 1024, layout=Layout(tensor=8, pipeline=2, shard=8), reshard=False, compiled=True)


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    tensor, pipeline = draw(st.sampled_from([1, 2, 4, 8])), draw(st.sampled_from([1, 2, 4]))
    shard, replicate = draw(st.sampled_from([1, 2, 8])), draw(st.sampled_from([1, 2]))
    per_rank = draw(st.sampled_from([1, 2])) if pipeline > 1 else 1
    micro = draw(st.sampled_from([1, 2, 4]))
    return Recipe(
        layout=Layout(
            tensor=tensor,
            pipeline=pipeline,
            shard=shard,
            replicate=replicate,
            stages_per_rank=per_rank,
            schedule="interleaved-1f1b" if per_rank > 1 else "1f1b",
        ),
        sequence=draw(st.sampled_from([1024, 4096, 16384])),
        global_batch=shard * replicate * micro * pipeline * draw(st.integers(1, 8)),
        microbatch=micro,
        sharding=draw(st.sampled_from(["none", "optimizer", "full"])),
        reshard=draw(st.booleans()),
        recompute=draw(st.sampled_from(["none", "attention", "operators", "full"])),
        sequence_parallel=draw(st.booleans()),
    )


def on(recipe: Recipe, name: str = "H100 SXM") -> Cluster:
    return Cluster(gpu(name), max(1, recipe.world // 8), 8, NDR)


MODELS = st.sampled_from(list(SIZES.values()))
STACKS = st.sampled_from(sorted(stacks()))


@pytest.mark.cluster  # slow
@given(model=MODELS, recipe=recipes(), stack=STACKS)
@settings(max_examples=100, deadline=None)
def test_parts_add_up_and_units_agree(model: Architecture, recipe: Recipe, stack: str) -> None:
    found = predict(model, recipe, on(recipe), stack=stack)
    assert found.step_s == pytest.approx(
        sum(getattr(found.parts, f.name) for f in fields(found.parts)), rel=1e-12
    )
    assert all(getattr(found.parts, f.name) >= 0 for f in fields(found.parts))
    assert sum(s.share for s in found.waterfall) == pytest.approx(1.0, rel=1e-9)
    assert sum(s.seconds for s in found.waterfall) == pytest.approx(found.step_s, rel=1e-9)
    assert found.mfu is not None
    assert found.waterfall[0].share == pytest.approx(found.mfu, rel=1e-9)
    assert 0 < found.mfu < 1
    assert found.low_s < found.step_s < found.high_s
    tokens = found.tokens_per_s_per_gpu * recipe.world * found.step_s
    assert tokens == pytest.approx(recipe.global_batch * recipe.sequence)


@pytest.mark.cluster  # slow
@given(model=MODELS, recipe=recipes(), faster=st.floats(1.0, 8.0))
@settings(max_examples=100, deadline=None)
def test_more_bandwidth_is_never_slower(model: Architecture, recipe: Recipe, faster: float) -> None:
    cluster = on(recipe)
    plain = predict(model, recipe, cluster).step_s
    slack = 1 + 1e-9
    for better in (
        replace(cluster, network=replace(NDR, gbps_per_nic=NDR.gbps_per_nic * faster)),
        replace(cluster, gpu=replace(cluster.gpu, link_gb_s=cluster.gpu.link_gb_s * faster)),
        replace(cluster, gpu=replace(cluster.gpu, hbm_tb_s=cluster.gpu.hbm_tb_s * faster)),
        replace(cluster, network=replace(NDR, hop_us=NDR.hop_us / faster)),
    ):
        assert predict(model, recipe, better).step_s <= plain * slack


@given(model=MODELS, recipe=recipes(), more=st.floats(1.0, 8.0))
@settings(max_examples=60, deadline=None)
def test_more_memory_never_fits_less(model: Architecture, recipe: Recipe, more: float) -> None:
    cluster = on(recipe)
    larger = replace(cluster, gpu=replace(cluster.gpu, hbm_gb=cluster.gpu.hbm_gb * more))
    assert predict(model, recipe, larger).fits >= predict(model, recipe, cluster).fits


@given(model=MODELS, recipe=recipes(), stack=STACKS, factor=st.sampled_from([2, 4]))
@settings(max_examples=100, deadline=None)
def test_more_gpus_never_need_more_memory_each(
    model: Architecture, recipe: Recipe, stack: str, factor: int
) -> None:
    before = memory(model, recipe, stacks()[stack]).allocated
    wider = replace(
        recipe,
        layout=replace(recipe.layout, shard=recipe.layout.shard * factor),
        global_batch=recipe.global_batch * factor,
    )
    # One rank that trains in fp32 needs no gathered copy; every other layout has one already.
    assume(recipe.precision != "fp32")
    assert memory(model, wider, stacks()[stack]).allocated <= before * (1 + 1e-12)


@given(recipe=recipes())
@settings(max_examples=40, deadline=None)
def test_recomputation_saves_memory_and_costs_time(recipe: Recipe) -> None:
    none, full = replace(recipe, recompute="none"), replace(recipe, recompute="full")
    assert predict(MODEL, full, on(recipe)).step_s > predict(MODEL, none, on(recipe)).step_s
    ours = stacks()["seatrial"]
    before, after = memory(MODEL, none, ours), memory(MODEL, full, ours)
    # Where gradients and not activations make the highest point, it stays as it is.
    assert after.allocated <= before.allocated
    offload = replace(full, offload=True)
    assert memory(MODEL, offload, ours).allocated <= after.allocated
    assert predict(MODEL, offload, on(recipe)).step_s >= predict(MODEL, full, on(recipe)).step_s


def reference(stack: str = "seatrial", **changes: object) -> Prediction:
    return predict(MODEL, replace(REFERENCE, **changes), B300, stack=stack)  # type: ignore[arg-type]


def test_the_reference_voyage() -> None:
    """Qwen2.5-72B, TP 8 x PP 2 x shard 8 on 128 B300: what limits it, for our trainer and for one that overlaps."""
    ours, overlapped = reference(), reference("nemo", microbatch=2, sharding="optimizer")
    assert ours.fits
    assert ours.pace.kind == "extrapolated"  # nobody published a run on B300
    shares = {s.name: s.share for s in ours.waterfall}
    # Nothing hides it without async_tensor: as large as all that matrix products lose, twice a stack that overlaps it.
    assert shares["tensor-parallel communication"] > 0.2
    theirs = {s.name: s.share for s in overlapped.waterfall}
    assert shares["tensor-parallel communication"] > 2 * theirs["tensor-parallel communication"]
    # 2,200 tokens/s/GPU is within reach of a stack that hides it.
    rate = 4096 * 1024 / 128
    assert rate / overlapped.high_s < 2200 < rate / overlapped.low_s
    assert overlapped.mfu is not None
    assert overlapped.mfu * overlapped.step_s / overlapped.low_s > 0.45 > overlapped.mfu
    assert rate / ours.low_s < 2200  # and out of reach of ours in this layout
    # 6.4 TB/s is there; a few per cent of it are needed.
    needed = ours.traffic.leaving.sent * 128 / ours.step_s
    assert needed < 0.05 * 128 * NDR.gb_s_per_gpu * 1e9


def test_unknown_speed_or_network_raises() -> None:
    with pytest.raises(UnknownNetworkError):
        predict(MODEL, REFERENCE, replace(B300, network=None))
    with pytest.raises(UnknownSpeedError, match="fp32"):
        reference(precision="fp32")
    with pytest.raises(ValueError, match="128 ranks"):
        predict(MODEL, REFERENCE, replace(B300, nodes=8))
    told = "\n".join(reference().provenance)
    assert "extrapolated" in told
    assert "InfiniBand" in told
    assert "assumption" in told  # the latency of a hop


def test_every_stack_and_preset_can_be_predicted() -> None:
    for stack in stacks():
        assert stacks()[stack].source
        assert reference(stack).step_s > 0


def test_capacity_matches_nvidia_smi() -> None:
    for name, mib in (
        ("H100 SXM", 81559),
        ("H200 SXM", 143771),
        ("B200 SXM", 183359),
        ("A100-80GB SXM", 81920),
    ):
        shown = mib * 2**20
        assert 0.97 * shown < capacity(Cluster(gpu(name), 1)) <= shown


def test_kernel_times_depend_on_the_shape() -> None:
    kernels = Kernels(gpu("H100 SXM"), "bf16")
    large = 2.0 * 8192**3 / kernels.product(8192, 8192, 8192)
    assert 0.85 * kernels.best < large <= kernels.best
    assert 2.0 * 8192 * 8192 * 64 / kernels.product(8192, 8192, 64) < 0.6 * kernels.best  # short inner side
    speed, tiles = Kernels(gpu("A100-80GB SXM"), "bf16").heads(96)
    assert (tiles, Kernels(gpu("A100-80GB SXM"), "bf16").heads(128)) == (128 / 96, (speed, 1.0))
    assert (
        Kernels(gpu("A100-80GB SXM"), "bf16").heads(108)[0] < 0.1 * speed
    )  # no multiple of 8: no tensor cores
    assert Kernels(gpu("H100 SXM"), "fp8").product(8192, 8192, 8192) < kernels.product(8192, 8192, 8192)


def known_paces(*entries: Entry) -> Calibration:
    return Calibration(
        entries,
        family={"a": "f", "ours": "f", "other": "g"},
        families={"f": 1.1, "g": 0.9},
        operators_of={"f": 0.8},
        architectures={"Hopper": 0.9, "Blackwell": 1.2},
        typical=1.25,
        attention=1.05,
        power=0.5,
        fp8=1.1,
        away=0.04,
        unmeasured=0.03,
    )


HOPPER = Entry("a", "H100 SXM", 1.3, 10, "x", "Hopper", 3)


def test_a_pace_is_calibrated_borrowed_or_extrapolated() -> None:
    known = known_paces(HOPPER)
    own, ours, new = (
        known.pace("a", gpu("H100 SXM")),
        known.pace("ours", gpu("H100 SXM")),
        known.pace("ours", gpu("GB300")),
    )
    assert (own.value, own.kind) == (1.3, "calibrated")
    assert (ours.value, ours.kind) == (pytest.approx(1.25 * 1.1 * 0.9), "borrowed")
    assert new.kind == "extrapolated"
    assert new.value == pytest.approx(1.25 * 1.1 * 1.2 * (1400 / 1000) ** -0.5)
    assert known.pace("a", gpu("H100 SXM"), "fp8").value == pytest.approx(1.3 * 1.1)
    assert (own.factors.operators, own.factors.attention) == (0.8, 1.05)
    with pytest.raises(ValueError, match="nothing was measured"):
        known_paces().pace("a", gpu("H100 SXM"))


def test_intervals_are_wider_for_less_evidence() -> None:
    """Many sources, one, one row; its family alone, elsewhere, no stack on this GPU; another family, another architecture."""
    one = replace(HOPPER, sources=1)
    other = replace(HOPPER, stack="unheard", gpu="H200 SXM")
    h100 = gpu("H100 SXM")
    spreads = [
        known_paces(HOPPER).pace("a", h100).spread,
        known_paces(one).pace("a", h100).spread,
        known_paces(replace(one, rows=1)).pace("a", h100).spread,
        known_paces(HOPPER).pace("ours", h100).spread,
        known_paces(HOPPER, other).pace("ours", gpu("H200 SXM")).spread,
        known_paces(HOPPER).pace("ours", gpu("H200 SXM")).spread,
        known_paces(HOPPER).pace("unheard", h100).spread,
        known_paces(HOPPER).pace("unheard", gpu("A100-80GB SXM")).spread,
    ]
    assert spreads == sorted(set(spreads))
    for stack in ("a", "ours"):  # its own, and one that borrows from it
        assert "(1 row of 1 source)" in known_paces(replace(one, rows=1)).pace(stack, h100).source
        assert "of 3 sources" not in known_paces(HOPPER).pace(stack, h100).source


def test_shipped_intervals_are_wider_for_less_evidence() -> None:
    """For every stack on every GPU of the catalogue: calibrated, borrowed, extrapolated from this GPU and from others."""
    known = shipped()
    measured = {e.gpu for e in known.entries}
    spreads: list[set[float]] = [set() for _ in range(4)]
    for stack, chip in product(stacks(), gpus()):
        pace = known.pace(stack, chip)
        level = ("calibrated", "borrowed", "extrapolated").index(pace.kind)
        spreads[level + (level == 2 and chip.name not in measured)].add(pace.spread)
    for less, more in pairwise(spreads):
        assert max(less) < min(more)


def test_an_unknown_architecture_has_the_mean_weighted_by_rows() -> None:
    rare = Entry("other", "B200 SXM", 1.4, 1, "y", "Blackwell")
    chip = known_paces(HOPPER, rare).gpu_factor(gpu("A100-80GB SXM"))
    assert 0.9 < chip < (0.9 * 1.2) ** 0.5


def test_a_prediction_needs_no_torch() -> None:
    code = "import sys, seatrial.plan.cost.predict; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("sequence", "context", "shard", "published"),
    [(8192, 1, 64, 0.43), (8192, 1, 128, 0.41), (131072, 16, 8, 0.38)],
)
def test_llama_3_is_inside_the_interval(sequence: int, context: int, shard: int, published: float) -> None:
    """arXiv:2407.21783, table 4: no row of it is in the calibration. The first and the last stage have no layer.

    Its MFU is that of arXiv:2204.02311, appendix B, which counts attention over the whole sequence.
    """
    layout = Layout(16, 1, shard, 8, stages_per_rank=8, schedule="interleaved-1f1b")
    assert layout.layer_counts(126) == (0, *[1] * 126, 0)
    recipe = Recipe(sequence, 2**24 // sequence, layout=layout, context=context, reshard=False)
    p = predict(LLAMA_405B, recipe, Cluster(gpu("H100 SXM"), 16 * shard * context, 8, NDR), stack="llama-3")
    assert p.mfu_full_attention is not None
    assert p.mfu_full_attention * p.step_s / p.high_s < published < p.mfu_full_attention * p.step_s / p.low_s
