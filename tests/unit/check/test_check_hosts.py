"""Which hosts a check goes to: hostfiles of all kinds, Slurm's lists, a job's virtual cluster, and what is refused."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seatrial.base.errors import InputError
from seatrial.check.live.hosts import SRUN, SSH, Host, hosts_of, read_hostfile, remote
from seatrial.job import Job, job_from_text

JOB = """
name = "here"
[model]
preset = "qwen2.5-tiny"
[data]
train = "corpus"
[cluster]
nodes = {nodes}
spares = {spares}
launcher = "{launcher}"
[train]
steps = 1
sequence_length = 32
global_batch = 8
[optimizer]
lr = 1e-3
[checkpoint]
every_steps = 1
"""


def written(folder: Path, text: str | bytes) -> Path:
    path = folder / "hosts"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def problems(folder: Path, text: str | bytes) -> list[tuple[int | None, int | None, str]]:
    with pytest.raises(InputError) as caught:
        read_hostfile(written(folder, text))
    return [(d.line, d.column, d.message) for d in caught.value.diagnostics]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a\nb\n", ["a", "b"]),
        ("a slots=8\nb slots=8 max_slots=16\n", ["a", "b"]),
        ("# all of rack 3\n\n  a:8  # the first\nb:8\r\n", ["a", "b"]),
        ("node[01-03,7] slots=4\nlogin\n", ["node01", "node02", "node03", "node7", "login"]),
        ("10.0.0.1\n10.0.0.2 slots=8", ["10.0.0.1", "10.0.0.2"]),
        ("\ufeffa.example.com\nb_1\n", ["a.example.com", "b_1"]),
        ("a[1-2]b[1-2]\n", ["a1b1", "a1b2", "a2b1", "a2b2"]),
    ],
)
def test_hostfiles_as_they_are_written(tmp_path: Path, text: str, names: list[str]) -> None:
    assert read_hostfile(written(tmp_path, text)) == names


def test_all_hostfile_problems_are_reported_with_line_and_column(tmp_path: Path) -> None:
    text = "node1 slots=8\nnode2 slots=eight\n-oProxyCommand=x\nnode[3-1]\n  NODE1 slots=0 gpus=8\nuser@node5\n::1\n"
    found = problems(tmp_path, text)
    assert [(line, column) for line, column, _ in found] == [
        (2, 7),
        (3, 1),
        (4, 1),
        (5, 9),
        (5, 17),
        (5, 3),
        (6, 1),
        (7, 1),
    ]
    assert "is already in line 1" in found[5][2]
    assert "'-oProxyCommand=x' is not a host name" in found[1][2]


@pytest.mark.parametrize("text", ["", "\n# nothing\n", b"\xff\xfe\x00a", "slots=8\n"])
def test_a_file_without_hosts_is_bad_input(tmp_path: Path, text: str | bytes) -> None:
    assert problems(tmp_path, text)


def test_a_missing_hostfile_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read the hostfile"):
        read_hostfile(tmp_path / "none")


@settings(max_examples=60)
@given(st.text(max_size=60))
def test_no_text_is_more_than_bad_input(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "any"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    names: list[str] = []
    with contextlib.suppress(InputError):
        names = read_hostfile(path)
        assert names
    # What goes into a command line is a name, whatever stood in the file.
    assert all(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name) for name in names)


def _job(**cluster: object) -> Job:
    values: dict[str, object] = {"nodes": 2, "spares": 0, "launcher": "local"}
    text = JOB.format(**values | cluster)
    return job_from_text(text, name="job.toml", base_folder=Path("."))


def test_a_local_job_is_its_virtual_cluster() -> None:
    hosts = hosts_of(_job(nodes=2, spares=1), environment={"SLURM_JOB_NODELIST": "n[1-9]"})
    assert [(h.name, h.address, h.prefix) for h in hosts] == [(f"node{n}", "127.0.0.1", ()) for n in range(3)]


def test_without_arguments_only_this_node_is_checked() -> None:
    (host,) = hosts_of(environment={})
    assert host.prefix == ()


def test_in_a_slurm_job_its_nodes_are_started_on_by_srun() -> None:
    hosts = hosts_of(environment={"SLURM_JOB_NODELIST": "n[1-2]"})
    assert [h.prefix for h in hosts] == [(*SRUN, "--nodelist=n1"), (*SRUN, "--nodelist=n2")]
    assert [h.address for h in hosts] == ["n1", "n2"]


def test_named_hosts_go_by_ssh_and_need_no_job(tmp_path: Path) -> None:
    assert hosts_of(hostfile=written(tmp_path, "a\n"), environment={})[0].prefix == (*SSH, "a")
    by_list = hosts_of(nodes="gpu[8-9]", environment={"SLURM_JOB_NODELIST": "gpu9"})
    assert [h.prefix[0] for h in by_list] == ["ssh", "srun"]


@pytest.mark.parametrize("nodes", ["", "a,a", "a[", "a;b", "a b"])
def test_a_bad_list_of_nodes_is_bad_input(nodes: str) -> None:
    with pytest.raises(InputError):
        hosts_of(nodes=nodes or ",", environment={})


def test_a_job_for_other_machines_asks_for_their_names() -> None:
    with pytest.raises(InputError, match="so the hosts are unknown"):
        hosts_of(_job(launcher="ssh"), environment={})


def test_local_host_among_others_gets_a_non_loopback_address() -> None:
    (alone,) = remote(["localhost"], {})
    assert alone.address == "localhost"
    assert remote(["localhost", "b"], {})[0].address not in ("localhost", "127.0.0.1")


def test_what_goes_through_a_shell_is_quoted_for_it() -> None:
    host = Host("a", "a", (*SSH, "a"), environment={"X": "1 2"})
    assert (
        host.command("python", "-c", "print('$HOME')")[-1]
        == "exec env 'X=1 2' python -c 'print('\"'\"'$HOME'\"'\"')'"
    )
    here = Host("a", "a")
    assert here.command("python", "-V") == ["python", "-V"]
    assert here.command("python", environment={"M": "x"}) == ["env", "M=x", "python"]
