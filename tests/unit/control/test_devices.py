"""The choice of the device, without any GPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from seatrial.base.errors import InputError
from seatrial.hardware import devices


@pytest.fixture
def host(tmp_path: Path) -> dict[str, Path]:
    """A container with four of its host's eight GPUs."""
    for i in range(8):
        (tmp_path / "proc/driver/nvidia/gpus" / f"0000:{i:02x}:00.0").mkdir(parents=True)
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    return {"dev": tmp_path / "dev", "proc": tmp_path / "proc"}


@pytest.mark.parametrize(
    ("environment", "seen"),
    [
        ({}, ["0", "1", "2", "3"]),
        ({"CUDA_VISIBLE_DEVICES": "3,1"}, ["3", "1"]),
        ({"CUDA_VISIBLE_DEVICES": ""}, []),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, []),
        ({"CUDA_VISIBLE_DEVICES": "0,-1,1"}, ["0"]),
        ({"CUDA_VISIBLE_DEVICES": "0,7,1"}, ["0"]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-8932f937,MIG-1c2"}, ["GPU-8932f937", "MIG-1c2"]),
        ({"NVIDIA_VISIBLE_DEVICES": "void"}, []),
        ({"NVIDIA_VISIBLE_DEVICES": "all"}, ["0", "1", "2", "3"]),
    ],
)
def test_visible_devices(host: dict[str, Path], environment: dict[str, str], seen: list[str]) -> None:
    assert devices.visible_devices(environment, **host) == seen


def test_no_driver_no_device(tmp_path: Path) -> None:
    assert devices.visible_devices({"CUDA_VISIBLE_DEVICES": "0"}, dev=tmp_path, proc=tmp_path) == []


def cluster(**changes: object) -> Any:
    return SimpleNamespace(
        **({"launcher": "local", "nodes": 2, "gpus_per_node": 2, "device": "auto"} | changes)
    )


@pytest.mark.parametrize(
    ("count", "built", "changes", "device", "reason"),
    [
        (4, True, {}, "cuda", "4 GPUs on this host for 4 ranks"),
        (3, True, {}, "cpu", "4 ranks on this host but 3 GPUs"),
        (3, True, {"launcher": "slurm"}, "cuda", "3 GPUs on this host for 2 ranks"),
        (0, True, {}, "cpu", "no CUDA device on this host"),
        (4, False, {}, "cpu", "the installed PyTorch has no CUDA"),
        (4, True, {"device": "cpu"}, "cpu", 'device = "cpu" in the job file'),
    ],
)
def test_choice(
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    built: bool,
    changes: dict[str, object],
    device: str,
    reason: str,
) -> None:
    monkeypatch.setattr(devices, "cuda_device_count", lambda: count)
    monkeypatch.setattr(devices, "torch_has_cuda", lambda: built)
    assert devices.choose_device(cluster(**changes)) == (device, reason)


def test_cuda_that_cannot_be_had_is_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "cuda_device_count", lambda: 1)
    with pytest.raises(InputError, match="4 ranks on this host but 1 GPU") as caught:
        devices.choose_device(cluster(device="cuda"))
    assert caught.value.diagnostics[0].hint is not None
