"""What memory a host still has, by the kernel and by control groups of both versions, nested as containers nest them."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.hardware.host_memory import HostMemory, host_memory

KIB, GIB = 1024, 1024**3
MEMINFO = (
    "MemTotal:       33554432 kB\nMemFree:         1000 kB\nMemAvailable:   25165824 kB\n"  # 32 and 24 GiB
)
NO_LIMIT_V1 = 9223372036854771712


def host(root: Path, files: dict[str, str | int], meminfo: str = MEMINFO) -> HostMemory | None:
    for name, content in {"proc/meminfo": meminfo, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return host_memory(root)


def test_without_cgroups_the_kernels_available_memory_counts(tmp_path: Path) -> None:
    found = host(tmp_path, {})
    assert found == HostMemory(24 * GIB, "24.00 GiB of the host's 32.00 GiB are available")
    assert host(tmp_path, {}, "MemTotal: 1000 kB\n") is None, "it does not say"


def test_the_least_of_all_groups_above_counts(tmp_path: Path) -> None:
    """Kubernetes nests them: the pod's limit is below the container's own, and files in the cache do not count as used."""
    v2 = "sys/fs/cgroup"
    found = host(
        tmp_path,
        {
            "proc/self/cgroup": "0::/kubepods/pod1/c1",
            f"{v2}/kubepods/memory.max": "max",
            f"{v2}/kubepods/memory.current": 30 * GIB,
            f"{v2}/kubepods/pod1/memory.max": 8 * GIB,
            f"{v2}/kubepods/pod1/memory.current": 5 * GIB,
            f"{v2}/kubepods/pod1/memory.stat": f"anon 1000\ninactive_file {GIB}\nactive_file {GIB}\nshmem {GIB}",
            f"{v2}/kubepods/pod1/c1/memory.max": 16 * GIB,
            f"{v2}/kubepods/pod1/c1/memory.current": 0,
        },
    )
    assert found is not None
    assert found.bytes == (8 - 5 + 2) * GIB
    assert found.source.endswith("kubepods/pod1: 8.00 GiB, of which 3.00 GiB are in use")


def test_a_group_that_is_slowed_down_is_as_good_as_limited(tmp_path: Path) -> None:
    v2 = "sys/fs/cgroup"
    found = host(
        tmp_path, {"proc/self/cgroup": "0::/a", f"{v2}/a/memory.max": "max", f"{v2}/a/memory.high": 4 * GIB}
    )
    assert found is not None
    assert found.bytes == 4 * GIB


@pytest.mark.parametrize("path", ["/docker/0123abc", "/"], ids=["the host's path", "a namespace's"])
def test_in_a_container_the_groups_own_files_are_at_the_top(tmp_path: Path, path: str) -> None:
    v1 = "sys/fs/cgroup/memory"
    found = host(
        tmp_path,
        {
            "proc/self/cgroup": f"9:name=systemd:/\n4:memory:{path}\n0::/",
            f"{v1}/memory.limit_in_bytes": 6 * GIB,
            f"{v1}/memory.usage_in_bytes": 2 * GIB,
            f"{v1}/memory.stat": f"inactive_file 5\ntotal_inactive_file {GIB}\ntotal_active_file 0",
        },
    )
    assert found is not None
    assert found.bytes == 5 * GIB


def test_version_one_nested_and_without_a_limit(tmp_path: Path) -> None:
    v1 = "sys/fs/cgroup/memory"
    files: dict[str, str | int] = {
        "proc/self/cgroup": "4:memory:/slurm/job_7/step_0",
        f"{v1}/memory.limit_in_bytes": NO_LIMIT_V1,
        f"{v1}/slurm/job_7/memory.limit_in_bytes": 10 * GIB,
        f"{v1}/slurm/job_7/memory.usage_in_bytes": 12 * GIB,
        f"{v1}/slurm/job_7/step_0/memory.limit_in_bytes": NO_LIMIT_V1,
    }
    found = host(tmp_path, files)
    assert found is not None
    assert (found.bytes, "job_7" in found.source) == (0, True), "never less than nothing"
    found = host(tmp_path, files | {f"{v1}/slurm/job_7/memory.limit_in_bytes": NO_LIMIT_V1})
    assert found is not None
    assert found.bytes == 24 * GIB


def test_damaged_files_and_odd_names_set_no_limit(tmp_path: Path) -> None:
    name = b"gr\xff\xc3\xbcppe".decode("utf-8", "surrogateescape")
    found = host(
        tmp_path, {"proc/self/cgroup": "4:memory\nnonsense\n::\n0::/none", "sys/fs/cgroup/memory.max": "²"}
    )
    assert found is not None
    assert found.bytes == 24 * GIB
    (tmp_path / "sys/fs/cgroup" / name).mkdir()
    (tmp_path / "sys/fs/cgroup" / name / "memory.max").write_text(str(GIB))
    (tmp_path / "proc/self/cgroup").write_bytes(b"0::/gr\xff\xc3\xbcppe\n")
    found = host_memory(tmp_path)
    assert found is not None
    assert found.bytes == GIB
    found.source.encode("utf-8", "backslashreplace")
