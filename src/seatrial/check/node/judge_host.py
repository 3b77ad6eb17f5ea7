"""Verdicts on what a job may use on a node: limits, memory, clock, storage and network device. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from seatrial.base import units
from seatrial.check.judging.findings import Expected, Finding, Target, Verdict
from seatrial.check.node.node_storage import MEMORY_TYPES

Facts = Mapping[str, Any]

_MIB, _GIB = 1 << 20, 1 << 30
_MLOCK_DEFAULT = 8 * _MIB  # MLOCK_LIMIT, linux/resource.h: twice a buffer of NCCL (NCCL_BUFFSIZE, 4 MiB)
_NOFILE_DEFAULT = 1024  # INR_OPEN_CUR, linux/fs.h
_LEAST_PIDS = 1024  # chosen here: some hundred threads for each of eight ranks
_SHM_DOCKER, _SHM_NVIDIA = 64 * _MIB, _GIB
_LEAST_SHARE = 0.1  # of memory that must be free, chosen here
_LEAST_STORAGE = 0.05  # of storage, chosen here


def judge_limits(
    limits: Facts, node: str, *, rdma: bool, gpus: int, memory_bytes: int | None
) -> Iterator[Finding]:
    """Limits of user and container. `rdma`: the node has RDMA ports; `gpus`: its GPUs; `memory_bytes`: its memory."""
    target = Target(node=node)
    yield _memlock(limits, target, rdma)
    soft, hard = limits["limits"]["nofile"]
    few = soft is not None and soft < _NOFILE_DEFAULT
    text = f"{'any number of' if soft is None else soft} open files allowed"
    if few and (hard is None or hard > (soft or 0)):
        text += f"; this user may raise it to {'any number' if hard is None else hard}"
    expected = Expected(_NOFILE_DEFAULT, "files", "at least the kernel's default, INR_OPEN_CUR of linux/fs.h")
    yield Finding("NOD004", "WARN" if few else "PASS", target, text, soft, "files", expected)
    yield _shm(limits, target, gpus)
    yield _cpus(limits, target)
    yield from _memory(limits, target, memory_bytes)
    pids = [n for n in (limits["pids_limit"], limits["limits"]["nproc"][0]) if n is not None]
    few = bool(pids) and min(pids) < _LEAST_PIDS
    text = f"{min(pids) if pids else 'any number of'} processes and threads allowed"
    expected = Expected(_LEAST_PIDS, "processes", "at least; chosen here")
    verdict: Verdict = "WARN" if few else "PASS"
    yield Finding("NOD008", verdict, target, text, min(pids, default=None), "processes", expected)


def _memlock(limits: Facts, target: Target, rdma: bool) -> Finding:
    soft = limits["limits"]["memlock"][0]
    expected = Expected("unlimited", "", "NVIDIA's containers are started with --ulimit memlock=-1")
    if soft is None or limits["may_lock_all"]:
        text = "locked memory is unlimited" + (" (CAP_IPC_LOCK)" if soft is not None else "")
        return Finding("NOD003", "PASS", target, text, "unlimited", "", expected)
    text = f"{units.memory(soft)} of locked memory allowed"
    if not rdma:
        return Finding("NOD003", "PASS", target, f"{text}; sufficient without RDMA ports", soft, "bytes")
    if soft <= _MLOCK_DEFAULT:
        return Finding("NOD003", "FAIL", target, f"{text}: RDMA will not work", soft, "bytes", expected)
    return Finding("NOD003", "WARN", target, text, soft, "bytes", expected)


def _shm(limits: Facts, target: Target, gpus: int) -> Finding:
    shm = limits["shm"]
    source = "at least; NVIDIA's containers are started with --shm-size=1g"
    expected = Expected(_SHM_NVIDIA, "bytes", source)
    # A single rank per node exchanges no data through it.
    alone: Verdict = "FAIL" if gpus > 1 else "WARN"
    if shm is None:
        return Finding("NOD005", alone, target, "/dev/shm does not exist", expected=expected)
    text = f"/dev/shm: {units.memory(shm['free'])} free of {units.memory(shm['size'])}"
    low = min(shm["size"], shm["free"])
    verdict: Verdict = alone if low <= _SHM_DOCKER else "WARN" if low < _SHM_NVIDIA else "PASS"
    if shm["size"] == _SHM_DOCKER:
        text += ", Docker's default"
    return Finding("NOD005", verdict, target, text, low, "bytes", expected)


def _cpus(limits: Facts, target: Target) -> Finding:
    cpus, quota = limits["cpus"], limits["cpu_quota"]
    if quota is None or quota >= cpus:
        return Finding("NOD006", "PASS", target, f"{cpus} CPUs, no CPU quota", cpus, "CPUs")
    text = f"CPU quota of {quota:g} CPUs, {cpus} shown"
    expected = Expected(cpus, "CPUs", "CPUs that this process may run on")
    return Finding("NOD006", "WARN", target, text, quota, "CPUs", expected)


def _memory(limits: Facts, target: Target, whole: int | None) -> Iterator[Finding]:
    limit, used = limits["memory_limit_bytes"], limits["memory_used_bytes"]
    available = limits["memory_available_bytes"]
    if available is None:
        why = "/proc/meminfo does not show the available memory"
        yield Finding("NOD007", "UNJUDGED", target, why, why_unjudged=why)
        return
    text = f"{units.memory(available)} available"
    share = available / whole if whole else 1.0
    if limit is not None and used is not None:
        # `used` leaves out the page cache, which is reclaimable, as the node's available memory does.
        available = min(available, max(0, limit - used))
        text = f"{units.memory(available)} available, the container may use {units.memory(limit)}"
        share = available / min(limit, whole or limit) if limit else 0.0
    low = share < _LEAST_SHARE
    source = f"at least {_LEAST_SHARE:.0%} of the usable memory; chosen here"
    expected = Expected(f"{_LEAST_SHARE:.0%}", "", source)
    yield Finding("NOD007", "WARN" if low else "PASS", target, text, available, "bytes", expected)
    if limits["overcommit"] == 2:
        text = "vm.overcommit_memory is 2: CUDA reserves far more addresses than memory, and forks need twice theirs"
        yield Finding("NOD007", "WARN", target, text, 2, "", Expected(0, "", "the kernel's default"))


def judge_storage(storage: Facts, node: str) -> Iterator[Finding]:
    """The checkpoint folder: whether it is usable at all. Its speed is judged in judge_load.py."""
    target = Target(node=node)
    folder, problem, ended = storage["folder"], storage.get("problem"), storage.get("ended", "ok")
    if ended in ("hung", "stuck"):
        text = f"{folder}: the storage does not respond ({problem})"
        yield Finding("NOD002", "FAIL", target, text)
        return
    if "size_bytes" not in storage:
        yield Finding("NOD001", "UNJUDGED", target, f"{folder}: {problem}", why_unjudged=str(problem))
        return
    if (
        storage["read_only"]
        or not storage["writable"]
        or storage.get("errno") in ("EACCES", "EROFS", "EPERM")
    ):
        why = "mounted read-only" if storage["read_only"] else "not writable by this user"
        yield Finding("NOD012", "FAIL", target, f"{storage['at']}: {why}")
        return
    free, size = storage["free_bytes"], storage["size_bytes"]
    kind = f"{storage['type'] or 'unknown file system'} at {storage['at']}"
    text = f"{units.memory(free)} free of {units.memory(size)} ({kind})"
    expected = Expected(f"{_LEAST_STORAGE:.0%}", "", "free, at least; chosen here")
    low = free < _LEAST_STORAGE * size
    none = free == 0 or storage.get("errno") in ("ENOSPC", "EDQUOT")
    if storage["inodes"] and storage["free_inodes"] < _LEAST_STORAGE * storage["inodes"]:
        low, none = True, none or storage["free_inodes"] == 0
        text += f"; {storage['free_inodes']} of {storage['inodes']} files are left"
    if storage.get("errno") == "EDQUOT":
        text += "; the user's quota is exhausted"
    if storage["type"] in MEMORY_TYPES:
        low = True
        text += ": in memory, so checkpoints there are lost with the node"
    verdict: Verdict = "FAIL" if none else "WARN" if low else "PASS"
    yield Finding("NOD012", verdict, target, text, free, "bytes", expected)
    if storage.get("wrong_blocks"):
        text = f"{storage['wrong_blocks']} of the blocks read back differ from what was written"
        yield Finding(
            "NOD012", "FAIL", target, text, storage["wrong_blocks"], "blocks", Expected(0, "blocks")
        )
    if problem is not None and not none:
        yield Finding("NOD001", "UNJUDGED", target, f"{folder}: {problem}", why_unjudged=problem)


def judge_interface(interface: Facts, node: str, *, rdma: bool) -> Finding:
    """The network device. With RDMA ports it matters only for the start."""
    name, problem = interface["name"], interface.get("problem")
    target = Target(node=node, port=name)
    if problem is not None:
        if name is None:
            return Finding("NOD020", "UNJUDGED", target, problem, why_unjudged=problem)
        return Finding("NOD020", "FAIL", target, problem)
    state = interface["state"] or "unknown"
    rate = f", {interface['mbit_s'] / 1000:g} Gb/s" if interface["mbit_s"] else ""
    text = f"{name} is {state}{rate}, MTU {interface['mtu']}"
    if state in ("up", "unknown"):
        return Finding("NOD020", "PASS", target, text, state)
    return Finding("NOD020", "WARN" if rdma else "FAIL", target, text, state, "", Expected("up"))
