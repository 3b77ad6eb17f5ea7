"""`seatrial check --apply` against a real Slurm: nodes that failed are drained, with the reason, and no others."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import slurm_cluster

from seatrial.cli.main import main

pytestmark = [
    pytest.mark.ci,
    pytest.mark.cluster,
    pytest.mark.skipif(bool(slurm_cluster.missing()), reason=slurm_cluster.missing() or "-"),
]
FIXTURES = Path(__file__).parents[1] / "fixtures" / "check"
NODES = ("n1", "n2", "n3", "n4", "n5")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm_cluster.Slurm]:
    with slurm_cluster.slurm(tmp_path_factory.mktemp("slurm") / "s", NODES) as cluster:
        yield cluster


@pytest.fixture
def cluster(
    slurm: slurm_cluster.Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[slurm_cluster.Slurm]:
    """The same daemons, every node idle before and after."""
    monkeypatch.chdir(tmp_path)
    for name in ("PATH", "SLURM_CONF"):
        monkeypatch.setenv(name, slurm.environment[name])
    yield slurm
    for node in NODES:
        if "DRAIN" in slurm.show(node)["state"]:
            slurm.run("scontrol", "update", f"nodename={node}", "state=resume")


def outputs(ill: tuple[str, ...], nodes: tuple[str, ...] = NODES) -> None:
    for node in nodes:
        name = "ibstat_one_down.txt" if node in ill else "ibstat_four_ndr.txt"
        Path("out", node).mkdir(parents=True)
        shutil.copy(FIXTURES / name, Path("out", node, "ibstat.txt"))


def drained(cluster: slurm_cluster.Slurm) -> list[str]:
    return [node for node in NODES if "DRAIN" in cluster.show(node)["state"]]


APPLY = ["check", "--from", "out", "--scheduler", "slurm", "--apply"]


def test_without_apply_nothing_is_drained(
    cluster: slurm_cluster.Slurm, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs(("n2",))
    assert main(APPLY[:-1]) == 1
    assert "scontrol update nodename=n2 state=drain reason=" in capsys.readouterr().out
    assert drained(cluster) == []


def test_the_failed_nodes_are_drained_with_code_and_reason(
    cluster: slurm_cluster.Slurm, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs(("n2", "n5"))
    assert main([*APPLY, "--json"]) == 1
    out, err = capsys.readouterr()
    assert drained(cluster) == ["n2", "n5"]
    assert cluster.show("n2")["reason"] == "seatrial NET001 mlx5_2/1: Down, physical state Polling"
    orders = json.loads(out)["orders"]
    assert [(o["node"], o["done"], o["why"]) for o in orders] == [("n2", True, ""), ("n5", True, "")]
    assert err.count("done: scontrol update nodename=") == 2
    for order in orders:  # what brings it back does
        cluster.run(*order["undo"])
    assert drained(cluster) == []


def test_what_is_printed_does_in_a_shell_what_apply_does(
    cluster: slurm_cluster.Slurm, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs(("n4",))
    main(APPLY[:-1])
    (line,) = [x for x in capsys.readouterr().out.splitlines() if "scontrol update" in x]
    cluster.run("sh", "-c", line)
    assert cluster.show("n4")["reason"] == "seatrial NET001 mlx5_2/1: Down, physical state Polling"


def test_a_node_drained_by_a_user_keeps_its_reason(
    cluster: slurm_cluster.Slurm, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.run("scontrol", "update", "nodename=n3", "state=drain", "reason=new fan on Monday")
    outputs(("n3",))
    assert main(APPLY) == 1
    assert cluster.show("n3")["reason"] == "new fan on Monday"
    assert "already drained (IDLE+DRAIN: new fan on Monday)" in capsys.readouterr().err


def test_node_unknown_to_slurm_fails_without_blocking_others(
    cluster: slurm_cluster.Slurm, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs(("other7", "n1"), ("other7", *NODES))
    assert main(APPLY) == 1
    assert drained(cluster) == ["n1"]
    err = capsys.readouterr().err
    assert "failed: scontrol update nodename=other7" in err
    assert "Invalid node name specified" in err


def test_more_than_half_go_only_with_force(
    cluster: slurm_cluster.Slurm, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs(("n1", "n2", "n3"))
    assert main(APPLY) == 1
    assert "not applied: 3 of 5 nodes would be removed, more than half" in capsys.readouterr().err
    assert drained(cluster) == []
    assert main([*APPLY, "--force"]) == 1
    assert drained(cluster) == ["n1", "n2", "n3"]


def test_a_controller_that_is_gone_fails_within_the_limit(
    cluster: slurm_cluster.Slurm,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    conf = Path(cluster.environment["SLURM_CONF"]).read_text()
    port = next(line for line in conf.splitlines() if line.startswith("SlurmctldPort="))
    (tmp_path / "gone.conf").write_text(conf.replace(port, "SlurmctldPort=1\nMessageTimeout=2"))
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "gone.conf"))
    outputs(("n1",))
    assert main(APPLY) == 1
    assert "failed: scontrol update nodename=n1" in capsys.readouterr().err
    monkeypatch.setenv("SLURM_CONF", os.fspath(cluster.environment["SLURM_CONF"]))
    assert drained(cluster) == []
