"""`seatrial scale` on four hosts over ssh: a gate fails, and the slow link or the slow rank is named."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from ssh_hosts import SSHD, SshHosts

from conftest import JOB, write_corpus
from seatrial.launch.netns import Hosts, Unavailable

pytestmark = [pytest.mark.cluster, pytest.mark.ci, pytest.mark.timed]

NODES = 4
SICK = 3  # the node with a fault; not in the smaller size
TIMEOUT_S = 240.0

Begin = Callable[..., SshHosts]


# Python executes this at its start where it is found, and the fault is planted once its module is imported.
_SLOWER = """
import importlib.abc, importlib.util, sys, time

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "{module}":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            call = module.{owner}.{method}

            def slower(*args, **kwargs):
                time.sleep({seconds})
                return call(*args, **kwargs)

            module.{owner}.{method} = slower

        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    if not os.path.exists(SSHD) or shutil.which("ssh") is None:
        pytest.skip("sshd (openssh-server) or ssh is not installed")
    write_corpus(tmp_path)
    text = JOB
    for old, new in {
        "nodes = 2\ngpus_per_node = 2": f'launcher = "ssh"\nnodes = {NODES}\ngpus_per_node = 1\ndevice = "cpu"',
        "tensor = 2\npipeline = 2": f"replicate = {NODES}",
        "hidden_size = 32\nintermediate_size = 64": "hidden_size = 128\nintermediate_size = 256",
    }.items():
        assert old in text
        text = text.replace(old, new)
    names = ", ".join(f'"n{n}"' for n in range(NODES))
    (tmp_path / "job.toml").write_text(f'{text}\n[ssh]\nhosts = [{names}]\nconfig = "config"\n')
    (tmp_path / "site").mkdir()
    with contextlib.ExitStack() as stack:

        def hosts(*, sick: Sequence[int] = (SICK,), **slower: object) -> SshHosts:
            """With a method that is slower on some nodes, where one is given."""
            exports = {}
            if slower:
                (tmp_path / "site/sitecustomize.py").write_text(_SLOWER.format(**slower))
                exports = dict.fromkeys(sick, f"PYTHONPATH={tmp_path}/site")
            try:
                made = stack.enter_context(Hosts(NODES + 1))
            except Unavailable as error:
                pytest.skip(str(error))
            found = SshHosts(made, tmp_path, exports)
            stack.callback(found.close)
            return found

        yield hosts


def measured(hosts: SshHosts, *more: str) -> dict[str, Any]:
    """What `scale` says of 2 and 4 nodes."""
    done = subprocess.run(
        [
            *hosts.prefix, sys.executable, "-m", "seatrial", "scale", "job.toml", "--nodes", f"{NODES // 2},{NODES}",
            "--steps", "12", "--repeats", "2", "--min-doubling", "--json", *more,
        ],
        cwd=hosts.folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    # The interval of two runs may be wide where other tests run: then the gate is not failed for certain.
    missed = found["sizes"][1]["efficiency"]["high"] < 0.8
    assert (found["gates"][0]["verdict"], done.returncode) == (("FAIL", 1) if missed else ("UNJUDGED", 0))
    return found


@pytest.mark.long  # planted in simulated records too: tests/sim/test_scaling_causes.py
def test_a_slow_link_is_the_network_of_its_node(begin: Begin) -> None:
    hosts = begin()
    hosts.hosts.slow(SICK, 20.0)
    size = measured(hosts)["sizes"][1]
    first = size["causes"][0]
    assert (first["kind"], first["nodes"]) == ("network", [SICK])
    assert first["remove_node"] == SICK
    assert first["share"] > 0.5
    # What these hosts have, and what they do not.
    assert [node["node"] for node in size["counters"]] == list(range(NODES))
    for node in size["counters"]:
        assert node["ports"] == "not available"
        assert node["tcp"]["sent_bytes"] > 1 << 20
        assert node["tcp"]["retransmitted"] >= 0


@pytest.mark.long  # one delayed rank: test_accounting
@pytest.mark.parametrize(
    ("kind", "module", "owner", "method"),
    [
        ("straggler", "seatrial.model.decoder", "Decoder", "forward"),
        # test_accounting has a slow source of data in real ranks too.
        ("data", "seatrial.data.loader", "BatchLoader", "_read"),
    ],
)
def test_a_slow_rank_and_slow_data_are_named(
    begin: Begin, kind: str, module: str, owner: str, method: str
) -> None:
    hosts = begin(module=module, owner=owner, method=method, seconds=0.3)
    found = measured(hosts, *["--trace"] * (kind == "straggler"))
    first = found["sizes"][1]["causes"][0]
    assert (first["kind"], first["ranks"], first["nodes"]) == (kind, [SICK], [SICK])
    assert first["share"] > 0.5
    if kind == "straggler":
        assert [Path(p).name for p in found["traces"]] == ["rank0.trace.json.gz", f"rank{SICK}.trace.json.gz"]
        assert found["discarded"][-1]["problem"] == "a traced run does not count"


@pytest.mark.long  # planted in the simulated frontiers too: tests/sim/test_scaling_causes.py
def test_few_microbatches_are_a_bubble(begin: Begin) -> None:
    """Two stages, whose work is waiting rather than computing: processors are few here. Four microbatches become two."""
    work = {"module": "seatrial.model.decoder", "owner": "Decoder", "method": "forward", "seconds": 0.2}
    hosts = begin(sick=range(NODES), **work)
    few = {
        "parallel.pipeline": 2,
        "parallel.replicate": NODES // 2,
        "train.global_batch": 4,
        "train.microbatch": 1,
    }
    found = measured(
        hosts,
        "--strong",
        *(word for k, v in few.items() for word in ("--set", f"{k}={v}")),
    )
    first = found["sizes"][1]["causes"][0]
    assert first["kind"] == "bubble"
    # (4 + 1) / 4 and (2 + 1) / 2 of the work of a microbatch, which takes 0.2 s on each stage
    assert first["seconds"] == pytest.approx(0.1, rel=0.3)


@pytest.mark.long  # groups are judged in tests/unit/scale, and a busy machine widens their intervals
def test_a_group_with_a_slow_rank_is_the_bad_one(begin: Begin) -> None:
    """Two groups of two hosts side by side."""
    hosts = begin(module="seatrial.model.decoder", owner="Decoder", method="forward", seconds=0.1)
    done = subprocess.run(
        [
            *hosts.prefix, sys.executable, "-m", "seatrial", "scale", "job.toml", "--nodes", f"{NODES // 2}", "--groups",
            "--steps", "12", "--repeats", "2", "--json",
        ],
        cwd=hosts.folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    (size,) = found["sizes"]
    assert [(g["hosts"], g["runs"], g["bad"]) for g in size["groups"]] == [
        (["n0", "n1"], 2, False),
        (["n2", "n3"], 2, True),
    ]
    judged = found["gates"][-1]
    assert (judged["verdict"], "bad group n2, n3" in judged["text"]) == ("FAIL", True)
