"""The choice of `parallel = "auto"`: legal, the best known, with reasons; and located errors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from auto_cases import LINE, job, open_job
from hypothesis import given, settings
from hypothesis import strategies as st

from seatrial.base.errors import InputError, InternalError
from seatrial.job import job_from_text, preset_text
from seatrial.job.finding import Facts
from seatrial.job.job import Job
from seatrial.job.rules_layout import LAYOUT_RULES
from seatrial.job.settled import provisional
from seatrial.plan.cost.memory_fit import shipped_errors
from seatrial.plan.cost.predict import capacity
from seatrial.plan.model.hardware import hardware_of
from seatrial.plan.search.auto import Chosen, _doubt, _safest, choose
from seatrial.plan.search.search import TIE_MARGIN, Choice, search


def chosen(j: Job) -> Chosen:
    return choose(j, hardware_of(j))


def holds(j: Job) -> None:
    facts = Facts(j.file, j.architecture, j.layout)
    assert [f for rule in LAYOUT_RULES for f in rule(facts)] == []
    assert j.layout.world_size == j.cluster.nodes * j.cluster.gpus_per_node


def test_layout_of_an_open_job_raises() -> None:
    j = open_job("llama3-8b-h100")
    assert j.is_open
    with pytest.raises(InternalError, match="before it was chosen"):
        _ = j.layout.tensor
    with pytest.raises(InternalError, match="before it was chosen"):
        _ = j.parallel
    assert job_from_text(j.to_toml(), name="x", base_folder=Path("/")).is_open


@pytest.mark.cluster  # slow
def test_the_fastest_layout_is_chosen_if_speeds_are_known() -> None:
    j = open_job("llama3-8b-h100", "cluster.nodes=2", drop=("microbatch", "activation_checkpointing"))
    found = chosen(j)
    settled = found.settle(j)
    holds(settled)
    assert found.basis == "speed"
    place = hardware_of(j)
    assert place.cluster is not None
    best = search(settled, place.cluster, own=True)
    assert best.own is not None
    assert best.own_costs is not None
    assert (
        best.own_costs < TIE_MARGIN
    )  # what the job has now is the best of all, or cannot be determined from it
    assert settled.train.microbatch == found.best.recipe.microbatch
    assert settled.chosen is not None
    assert len(found.runners_up) == 4
    slower = [r["slower"] for r in settled.chosen["runners_up"]]
    assert slower == sorted(slower)
    assert slower[0] > -TIE_MARGIN
    assert any("network: assumed" in reason for reason in found.reasons)
    assert "limited by" in " ".join(found.reasons)


@pytest.mark.cluster  # slow
def test_sure_fit_is_preferred_among_equally_fast_layouts() -> None:
    """Predictions of memory have been wrong: a tight layout is taken only where it is faster than every one that fits with margin."""
    j = open_job("llama3-8b-h100", "cluster.nodes=2")
    place = hardware_of(j)
    assert place.cluster is not None
    some = search(provisional(j), place.cluster, own=False).choices[0]
    full = shipped_errors().full

    def one(step_s: float, share: float, tensor: int) -> Choice:
        p = some.prediction
        available = p.memory.reserved / share
        recipe = replace(some.recipe, layout=replace(some.recipe.layout, tensor=tensor))
        return replace(some, recipe=recipe, prediction=replace(p, step_s=step_s, available=available))

    tight, near, far = one(10.0, 0.97, 1), one(10.3, 0.5, 2), one(11.0, 0.3, 4)
    ranked, why = _safest((tight, near, far), (near, far))
    assert ranked == [near, tight, far]
    assert "may run out of memory" in why
    assert "releases of one stack differ by" in why
    # One with the same sizes stands for both, so that no pair of sizes is listed twice.
    slower = one(10.2, 0.5, 1)
    assert _safest((tight, near, far), (slower, near, far))[0] == [slower, near, far]
    ranked, why = _safest((tight, far), (far,))
    assert ranked == [tight, far]
    assert "shortest" in why
    assert "+10.0%" in _doubt(tight, (far,))
    assert "no layout fits with margin" in _doubt(tight, ())
    assert _safest((tight,), ())[0] == [tight]
    for share, sure in ((full * 0.999, True), (full * 1.001, False)):
        fastest = one(10.0, share, 1)
        assert fastest.prediction.verdict.sure == sure
        assert (_safest((fastest, near), (near,))[0] == [fastest, near]) == sure
        assert (_doubt(fastest, (near,)) == "") == sure


def test_tight_fastest_layout_is_replaced_or_reported() -> None:
    """Llama-3 8B on 8 A100 of 40 GB: memory is scarce."""
    j = open_job(
        "llama3-8b-h100",
        "cluster.nodes=1",
        "cluster.gpu=A100-40GB SXM",
        drop=("microbatch", "activation_checkpointing"),
    )
    found = chosen(j)
    verdict = found.best.verdict
    assert verdict is not None
    document = found.document()
    assert document["memory_verdict"] == verdict.document()
    said = [r for r in found.reasons if "tight" in r]
    assert bool(said) == (verdict.word == "tight")
    sure = search(provisional(j), found.place.cluster, own=False).sure  # type: ignore[arg-type]
    if not verdict.sure and sure:
        best = found.best.choice
        assert best is not None
        assert sure[0].prediction.step_s >= (1 + TIE_MARGIN) * best.prediction.step_s


def test_settings_of_the_job_are_kept() -> None:
    j = open_job("llama3-8b-h100", "train.microbatch=2", "train.activation_checkpointing=full")
    settled = chosen(j).settle(j)
    assert (settled.train.microbatch, settled.train.activation_checkpointing) == (2, "full")
    assert settled.chosen is not None
    assert (
        "set in [train], so not chosen: microbatch = 2, activation_checkpointing = full"
        in settled.chosen["reasons"]
    )
    holds(settled)


def test_the_choice_is_json_serialisable() -> None:
    for preset, more in (
        ("llama3-8b-h100", ()),
        ("first-voyage", ()),
        ("qwen2.5-7b-h200", ("train.precision=fp32",)),
    ):
        j = open_job(preset, *more)
        document = chosen(j).document()
        assert json.loads(json.dumps(document, allow_nan=False)) == document
        assert document["layout"]["world_size"] == j.cluster.nodes * j.cluster.gpus_per_node


def test_cpu_ranks_have_no_speed() -> None:
    j = open_job("first-voyage", "cluster.device=cpu")
    found = chosen(j)
    assert found.basis == "memory and traffic"
    assert "no speed is known: ranks are CPU processes" in found.reasons[0]
    document = found.document()
    assert "step_s" not in document
    assert document["cluster"] == {"nodes": 2, "gpus_per_node": 4, "gpu": None, "network": None}
    settled = found.settle(j)
    holds(settled)
    assert settled.layout.pipeline == 1  # no schedule leaves less idle than none
    scores = [c.held_bytes * c.sent_bytes for c in found.candidates]
    assert scores == sorted(scores)


def test_large_states_are_sharded_and_small_ones_replicated() -> None:
    """Nothing is known but bytes: whole copies of a 7B on each of 8 ranks would be the least traffic, and 120 GB a rank."""
    large = open_job("qwen2.5-7b-h200", "cluster.device=cpu", "train.global_batch=8", "train.microbatch=1")
    best = chosen(large).best.recipe
    assert best.layout.tensor * best.layout.shard == 8
    small = open_job("first-voyage", "cluster.device=cpu", "cluster.nodes=2", "cluster.gpus_per_node=1")
    assert chosen(small).best.recipe.layout.replicate == 2


def test_without_speeds_known_memory_still_limits() -> None:
    j = open_job("qwen2.5-7b-h200", "train.precision=fp32", drop=("microbatch", "activation_checkpointing"))
    found = chosen(j)
    assert found.basis == "memory and traffic"
    assert "no peak is known for fp32" in found.reasons[0]
    place = hardware_of(j)
    assert place.cluster is not None
    assert all(c.held_bytes <= capacity(place.cluster) for c in found.candidates)


def test_a_pipeline_if_the_batch_has_too_few_sequences() -> None:
    """4 sequences for 8 ranks: some must share a sample, and one key-value head a rank bounds tensor parallel."""
    j = open_job("first-voyage", "cluster.device=cpu", "train.global_batch=4", "train.microbatch=1")
    settled = chosen(j).settle(j)
    holds(settled)
    assert settled.layout.data_parallel <= 4


def test_one_rank_has_nothing_to_choose() -> None:
    j = open_job("first-voyage", "cluster.nodes=1", "cluster.gpus_per_node=1")
    settled = chosen(j).settle(j)
    assert settled.layout.world_size == 1
    holds(settled)


def test_no_legal_layout_is_an_error_at_parallel() -> None:
    j = open_job("first-voyage", "train.global_batch=3", "train.microbatch=1")
    with pytest.raises(InputError) as caught:
        chosen(j)
    (problem,) = caught.value.diagnostics
    assert (problem.file, problem.line, problem.column) == ("job.toml", 1, 12)
    assert "no layout is legal for these 8 ranks" in problem.message
    assert "global_batch 3 is not divisible" in problem.message
    assert problem.hint == "use global_batch = 8"


def test_error_states_the_least_memory_if_nothing_fits() -> None:
    j = open_job("qwen2.5-72b-b300", "cluster.nodes=1", "cluster.gpu=A100-40GB SXM")
    with pytest.raises(InputError) as caught:
        chosen(j)
    (problem,) = caught.value.diagnostics
    assert "none of" in problem.message
    assert "A100-40GB SXM" in problem.message
    assert (problem.line, problem.column) == (1, 12)
    assert "leave microbatch and activation_checkpointing out" in (problem.hint or "")


def test_an_unknown_network_name_is_an_error_at_its_key() -> None:
    text = LINE + preset_text("qwen2.5-72b-b300").replace("InfiniBand NDR 8x400", "InfiniBand NDR 8x40")
    begin, end = text.index("[parallel]"), text.index("[train]")
    j = job_from_text(text[:begin] + text[end:], name="job.toml", base_folder=Path("/jobs"))
    with pytest.raises(InputError) as caught:
        hardware_of(j)
    (problem,) = caught.value.diagnostics
    assert (problem.source_line or "").startswith("network =")
    assert 'did you mean "InfiniBand NDR 8x400"?' in (problem.hint or "")


def test_an_unknown_network_with_a_known_gpu_falls_back_to_bytes() -> None:
    """H100 PCIe: no reference node is known, so two nodes of it have no network."""
    j = open_job("llama3-8b-h100", "cluster.gpu=H100 PCIe", "cluster.nodes=2")
    found = chosen(j)
    assert found.basis == "memory and traffic"
    assert "not given" in found.reasons[0]
    holds(found.settle(j))


@pytest.mark.cluster  # slow
@settings(max_examples=60, deadline=None)
@given(
    nodes=st.integers(1, 6),
    per_node=st.sampled_from([1, 2, 3, 4, 6, 8]),
    batch=st.integers(1, 96),
    layers=st.integers(1, 9),
    device=st.sampled_from(["cpu", "auto"]),
    micro=st.sampled_from([None, 1, 2]),
)
def test_every_choice_is_legal(
    nodes: int, per_node: int, batch: int, layers: int, device: str, micro: int | None
) -> None:
    overrides = [
        *(f"cluster.nodes={nodes}", f"cluster.gpus_per_node={per_node}", f"train.global_batch={batch}"),
        *(f"model.num_hidden_layers={layers}", f"cluster.device={device}", "train.precision=bf16"),
        *("cluster.gpu=H100 SXM", "cluster.network=RoCE 4x100"),
        *([] if micro is None else [f"train.microbatch={micro}"]),
    ]
    j = open_job("first-voyage", *overrides, drop=("microbatch",))
    try:
        settled = chosen(j).settle(j)
    except InputError as error:
        refused = error.diagnostics[0]
    else:
        refused = None
    if refused is not None:
        assert "no layout" in refused.message
        assert refused.hint
        return
    holds(settled)
    assert micro is None or settled.train.microbatch == micro
    again = job_from_text(settled.to_toml(), name="job.toml", base_folder=Path("/"))
    assert (again.layout, again.parallel.reshards) == (settled.layout, settled.parallel.reshards)


@pytest.mark.cluster  # slow
def test_the_choice_is_not_slower_than_the_jobs_layout() -> None:
    """By the same prediction."""
    mine = job()
    place = hardware_of(mine)
    assert place.cluster is not None
    found = search(mine, place.cluster)
    j = open_job("llama3-8b-h100", "cluster.nodes=2", "cluster.network=InfiniBand NDR 8x400")
    best = chosen(j).best.choice
    assert found.own is not None
    assert best is not None
    assert best.prediction.step_s <= (1 + TIE_MARGIN) * found.own.prediction.step_s
