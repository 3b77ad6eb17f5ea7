"""`seatrial train` with `parallel = "auto"`: the layout is chosen, trained with, kept on resume, and chosen anew on other nodes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conftest import JOB, Run, records, write_corpus

pytestmark = [pytest.mark.cluster, pytest.mark.ci]

_PARALLEL = "[parallel]\ntensor = 2\npipeline = 2\n"


def test_it_is_chosen_kept_and_chosen_anew(tmp_path: Path) -> None:
    assert _PARALLEL in JOB
    text = 'parallel = "auto"\n' + JOB.replace(_PARALLEL, "")
    (tmp_path / "job.toml").write_text(text)
    write_corpus(tmp_path)
    folder = tmp_path / "runs" / "small"

    def start(*overrides: str) -> tuple[dict[str, object], str]:
        run = Run(tmp_path, "--set", "train.sample_tokens=0", *(w for o in overrides for w in ("--set", o)))
        code, _, err = run.wait()
        assert code == 0, err
        assert not run.processes()
        return json.loads((folder / "plan.json").read_text()), err

    plan, err = start("train.steps=6")
    chosen = plan["chosen"]
    assert isinstance(chosen, dict)
    assert chosen["layout"] == plan["layout"]
    assert chosen["layout"]["world_size"] == 4
    assert chosen["basis"] == "memory and traffic"
    assert "CPU processes" in chosen["reasons"][0]
    assert chosen["runners_up"]
    assert 'parallel = "auto"' in err

    plan, err = start("train.steps=8")
    assert plan["chosen"] == chosen
    assert "as chosen by an earlier start of this run" in err

    plan, err = start("train.steps=10", "cluster.nodes=1")
    anew = plan["chosen"]
    assert isinstance(anew, dict)
    assert anew["layout"]["world_size"] == 2
    assert anew["why_now"] == "the cluster changed: nodes 2 -> 1"
    told = [e for e in records(folder / "events.jsonl") if e["kind"] == "layout_chosen"]
    assert [e["data"]["layout"]["world_size"] for e in told] == [4, 2]

    # One run from the first step to the last, whatever its layout.
    losses = [m["loss"] for m in records(folder / "metrics.jsonl")]
    assert len(losses) == 10
    assert losses[-1] < losses[0]
    ledger = records(folder / "ledger.jsonl")
    assert [(r["first_sample"], r["end_sample"]) for r in ledger] == [(8 * i, 8 * i + 8) for i in range(10)]
