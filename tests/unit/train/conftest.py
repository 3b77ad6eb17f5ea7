"""What the tests of training share."""

from __future__ import annotations

import pytest

import late_device


@pytest.fixture(params=[False, True], ids=["at once", "a step late"])
def late(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a `Run` is on the test device, whose results come a step late, or on the CPU."""
    if request.param:
        late_device.install(monkeypatch.setattr)
    return bool(request.param)
