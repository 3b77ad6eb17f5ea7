"""A worker's environment variables and the classification of errors."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from seatrial.base.errors import InputError
from seatrial.checkpoint.write import PeerSaveFailed, SaveFailed
from seatrial.train.rank import RankEnvironment
from seatrial.train.worker import is_consequence, main

GONE = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:5555"


def wrapped() -> BaseException:
    """As the pipeline wraps it."""
    try:
        try:
            raise RuntimeError(GONE)
        except RuntimeError as inner:
            raise RuntimeError("[Stage 0] failed to run forward") from inner
    except RuntimeError as outer:
        return outer


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (RuntimeError(GONE), True),
        (wrapped(), True),
        (dist.DistBackendError("NCCL error: remote process exited or there was a network error"), True),
        (ConnectionResetError("Connection reset by peer"), True),
        (PeerSaveFailed("another rank could not write its part"), True),
        (SaveFailed("No space left on device"), False),
        (RuntimeError("CUDA out of memory"), False),
        (ValueError(GONE), False),
        (InputError("the port is in use"), False),
    ],
)
def test_errors_that_follow_from_a_lost_peer(error: BaseException, wanted: bool) -> None:
    assert is_consequence(error) is wanted


def test_every_missing_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(InputError, match="no LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT"):
        RankEnvironment.from_environment()


def test_a_worker_without_environment_names_the_command(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert main(["nowhere"]) == 2
    assert "seatrial train JOB" in capfd.readouterr().err
