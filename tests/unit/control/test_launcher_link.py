"""Signs of life between an agent and its launcher on another machine."""

from __future__ import annotations

import pytest

from seatrial.base.lines import Channel
from seatrial.control.agent import launcher_link
from seatrial.control.agent.launcher_link import HEARTBEAT_S, SILENT_S, LauncherLink
from seatrial.record import messages as msg

SIGN = msg.encode(msg.LauncherAlive())


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    clock = [1000.0]
    monkeypatch.setattr(launcher_link.time, "monotonic", lambda: clock[0])
    return clock


def test_a_silent_launcher_counts_as_lost_after_a_heartbeat(now: list[float]) -> None:
    launcher, theirs = Channel.pair()
    agent = LauncherLink(theirs)
    now[0] += 10 * SILENT_S
    assert agent.tick(), "a launcher on the same machine gives no signs"
    assert agent.deadline is None
    launcher.send(SIGN)
    launcher.send(msg.encode(msg.EndRun("now")))
    assert agent.receive() == [msg.EndRun("now")]
    for _ in range(3):
        assert agent.tick()
        now[0] += HEARTBEAT_S / 2
    assert launcher.receive() == [msg.encode(msg.AgentAlive())] * 2, "every HEARTBEAT_S"
    now[0] += SILENT_S
    assert not agent.tick()
    launcher.send(SIGN)
    agent.receive()
    assert agent.tick()
    launcher.close()
    agent.receive()
    assert agent.closed
    agent.send(msg.AgentFinished())
    theirs.close()


@pytest.mark.parametrize("line", ['{"stop": "now"}', '{"stop": {"why": "later"}}', "no JSON"])
def test_a_launcher_with_a_protocol_error_counts_as_lost(
    line: str, capfd: pytest.CaptureFixture[str]
) -> None:
    launcher, theirs = Channel.pair()
    agent = LauncherLink(theirs)
    launcher.send(msg.encode(msg.EndRun("preempt")))
    launcher._socket.sendall(line.encode() + b"\n")
    agent.receive()
    assert agent.closed
    assert "protocol error from the launcher: " in capfd.readouterr().err
    launcher.close()
    theirs.close()
