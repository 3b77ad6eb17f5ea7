"""For all tests: how long an example takes says nothing on a machine that does other things too.

And an S3-compatible service for those that want one; they carry the mark `cluster`.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
from hypothesis import settings

from moto_server import MotoServer

settings.register_profile("seatrial", deadline=None)
settings.load_profile("seatrial")


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
