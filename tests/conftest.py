"""For all tests: how long an example takes says nothing on a machine that does other things too.

And an S3-compatible service for those that want one; they carry the mark `cluster`.
"""

from __future__ import annotations

import signal
import uuid
from collections.abc import Iterator

import pytest
from hypothesis import settings

from moto_server import MotoServer

settings.register_profile("seatrial", deadline=None)
settings.load_profile("seatrial")
# A shell script's background jobs ignore it, and so would the commands that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Files are handed to test processes in this order, then all others: one that begins late alone makes the others wait.
_FIRST = (
    "test_slurm_train.py",
    "test_ssh.py",
    "test_recovery.py",
    "test_check_live.py",
    "test_train.py",
    "test_parity.py",
    "test_reshard.py",
    "test_checkpoint_kill.py",
    "test_check_localisation.py",
    "test_dryrun.py",
    "test_dryrun_carried.py",
    "test_machine_histories.py",
    "test_prepare_kill.py",
    "test_s3_run.py",
    "test_data_runs.py",
    "test_plan_agrees.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take longest begin first (with `--no-loadscope-reorder`: by default those with most tests do)."""
    place = {name: n for n, name in enumerate(_FIRST)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))


@pytest.fixture(scope="session")
def s3_server() -> Iterator[MotoServer]:
    """The service. A test that stops it lets it go on; one that kills it starts its own."""
    server = MotoServer()
    yield server
    server.close()


@pytest.fixture
def s3_url(s3_server: MotoServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of an empty bucket. This process, and those it starts, find the service by their environment."""
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    bucket = f"bucket-{uuid.uuid4().hex[:12]}"
    s3_server.make_bucket(bucket)
    return f"s3://{bucket}"


@pytest.fixture(params=[False, True], ids=["at once", "a step late"])
def late(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a rank is on the test device, whose results come a step late, or on the CPU."""
    if request.param:
        import late_device  # it loads torch

        late_device.install(monkeypatch.setattr)
    return bool(request.param)
