"""Which device the ranks of this host compute on. Determined before anything starts, without loading torch."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from seatrial.base.errors import InputError

if TYPE_CHECKING:
    from seatrial.job.schema import ClusterSection

Device = Literal["cpu", "cuda"]


def visible_devices(
    environment: Mapping[str, str] | None = None, *, dev: Path = Path("/dev"), proc: Path = Path("/proc")
) -> list[str]:
    """The CUDA devices that a process started now would see, named as CUDA_VISIBLE_DEVICES names them."""
    environment = os.environ if environment is None else environment
    # In a container the kernel lists every GPU of the host below /proc, but only ours have a file in /dev.
    nodes = [p for p in dev.glob("nvidia[0-9]*") if p.name[6:].isdigit()] if dev.is_dir() else []
    folder = proc / "driver/nvidia/gpus"
    count = len(nodes)
    if folder.is_dir():
        count = min(count, len(list(folder.iterdir())))
    if environment.get("NVIDIA_VISIBLE_DEVICES") in ("none", "void"):
        count = 0
    wanted = environment.get("CUDA_VISIBLE_DEVICES")
    if wanted is None or count == 0:
        return [str(i) for i in range(count)]
    chosen: list[str] = []
    for entry in (e.strip() for e in wanted.split(",")):
        # CUDA stops at the first entry that names no device: "0,-1,1" is one device, "" is none.
        named = int(entry) < count if entry.isdigit() else entry.startswith(("GPU-", "MIG-"))
        if not named or entry in chosen:
            break
        chosen.append(entry)
    return chosen


def cuda_device_count() -> int:
    """Number of CUDA devices that a process started now would see."""
    return len(visible_devices())


def driver_names(proc: Path = Path("/proc")) -> list[str]:
    """The NVIDIA driver's name of each GPU of this host ("NVIDIA H200"); empty if it reports none."""
    names = []
    for file in sorted((proc / "driver/nvidia/gpus").glob("*/information")):
        try:
            found = re.search(r"^Model:\s*(.+?)\s*$", file.read_text(errors="replace"), re.MULTILINE)
        except OSError:
            continue
        if found is not None:
            names.append(found[1])
    return names


def torch_has_cuda() -> bool:
    """Whether the installed PyTorch was built with CUDA; read from its version file, without loading it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    try:
        text = Path(spec.origin).with_name("version.py").read_text()
    except OSError:
        return True  # an unusual build: let torch itself decide
    return re.search(r"^cuda\b[^=\n]*=\s*None", text, re.MULTILINE) is None


def choose_device(cluster: ClusterSection) -> tuple[Device, str]:
    """The device for the ranks of this host, and the reason in words.

    Raises InputError if `device = "cuda"` is requested and a rank would have no GPU of its own.
    """
    if cluster.device == "cpu":
        return "cpu", 'device = "cpu" in the job file'
    ranks = cluster.gpus_per_node * (cluster.nodes if cluster.launcher == "local" else 1)
    count = cuda_device_count()
    if count >= ranks and torch_has_cuda():
        return "cuda", f"{_gpus(count)} on this host for {ranks} {'ranks' if ranks > 1 else 'rank'}"
    if count == 0:
        reason = "no CUDA device on this host"
    elif count < ranks:
        reason = f"{ranks} ranks on this host but {_gpus(count)}"
    else:
        reason = "the installed PyTorch has no CUDA"
    if cluster.device == "cuda":
        raise InputError(
            f'device = "cuda" is not available: {reason}',
            hint='make cluster.nodes x cluster.gpus_per_node fit, or set device = "auto" to use the CPU here',
        )
    return "cpu", reason


def _gpus(count: int) -> str:
    return f"{count} GPU" if count == 1 else f"{count} GPUs"
