"""The table of scenarios: complete, runnable as jobs, and what a job cannot have is said."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from drill_jobs import copy, job

from seatrial.base.errors import InputError
from seatrial.drill import storm
from seatrial.drill.copies import Cadence, Plan
from seatrial.drill.scenarios import SCENARIOS, chosen, returns_of
from seatrial.drill.worker import _SEAMS

PLAN = Plan(Cadence(16), 16)
ROOT = Path(__file__).parents[3]


def test_everything_that_must_be_drilled_is() -> None:
    assert [s.name for s in SCENARIOS] == [
        "kill_rank",
        "kill_agent",
        "kill_agent_without_spare",
        "kill_coordinator_node",
        "kill_two_nodes",
        "kill_two_ranks",
        "kill_rank_in_recovery",
        "kill_rank_in_save",
        "kill_fork_server",
        "freeze_fork_server",
        "pause_agent_at_start",
        "pause_coordinator_at_start",
        "edited_job",
        "remade_data",
        "freeze_rank",
        "hang_in_collective",
        "hold_gil",
        "slow_rank",
        "cut_network",
        "slow_network",
        "xid_79",
        "xid_74",
        "xid_94",
        "disk_full",
        "damaged_checkpoint",
        "nan_gradient",
        "flipped_bit",
        "wrong_update",
        "preemption",
        "storm",
    ]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.name)
def test_the_first_voyage_can_have_it(scenario) -> None:  # type: ignore[no-untyped-def]
    original = job()
    assert scenario.missing(original) is None
    found = copy(original, replicas=scenario.replicas, spares=scenario.spares).job
    for fault in scenario.planted(found, PLAN):
        assert fault.kind in _SEAMS
        assert 0 <= fault.rank < found.layout.world_size
        assert PLAN.cadence.snapshot < fault.step < PLAN.steps
    assert len(returns_of(scenario, found)) == (found.cluster.nodes + scenario.spares) * scenario.returns


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.name)
def test_it_is_documented(scenario) -> None:  # type: ignore[no-untyped-def]
    text = (ROOT / "docs" / "drill.md").read_text(encoding="utf-8")
    assert re.search(rf"^\| `{scenario.name}` \|", text, re.MULTILINE)


def test_scenarios_that_a_job_cannot_have_give_the_reason() -> None:
    def reasons(*overrides: str) -> dict[str, str]:
        of = job(*overrides)
        return {s.name: r for s in SCENARIOS if (r := s.missing(of)) is not None}

    one_node = ("cluster.nodes=1", "parallel.shard=1")
    assert reasons(*one_node).keys() == {
        "kill_agent_without_spare",
        "kill_two_nodes",
        "pause_agent_at_start",
        "pause_coordinator_at_start",
        "cut_network",
        "slow_network",
    }
    assert (
        "one rank"
        in reasons(*one_node, "cluster.gpus_per_node=1", "parallel.tensor=1", "parallel.pipeline=1")[
            "kill_two_ranks"
        ]
    )
    assert "shrink" in reasons("resilience.shrink=false")["kill_agent_without_spare"]
    assert (
        "no smaller layout"
        in reasons("cluster.gpus_per_node=2", "parallel.shard=1")["kill_agent_without_spare"]
    )
    assert "verify_every_steps" in reasons("resilience.verify_every_steps=0")["flipped_bit"]


def test_scenarios_are_chosen_by_name_in_the_order_given() -> None:
    assert [s.name for s in chosen("storm, kill_rank,storm")] == ["storm", "kill_rank"]
    assert chosen(None) == list(SCENARIOS)
    with pytest.raises(InputError, match="there is no scenario kil_rank"):
        chosen("kil_rank")
    with pytest.raises(InputError):
        chosen(",")


def test_a_storm_follows_from_its_seed() -> None:
    found = [storm.planted(job(), Plan(Cadence(16), 100, seed=seed)) for seed in (1, 1, 2)]
    assert found[0] == found[1] != found[2]
    assert len(found[0]) == 5
