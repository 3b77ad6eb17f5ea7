"""Delivery of alerts: to whom, how often, what of it is secret, and that nothing is delivered twice."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from alert_cases import NOW, alert

from alertmanager_server import Receiver
from seatrial.job.schema import WatchSection
from seatrial.record import messages as msg
from seatrial.record.alerting import Alert
from seatrial.watch.alerts import delivery, notice, receivers
from seatrial.watch.alerts.delivery import Delivery
from seatrial.watch.alerts.receivers import Undelivered

SECRET = "T0SECRETPATH"
HOT = alert("gpu_hot", nodes=[3], message="GPU hot: node 3: 91 °C", command="nvidia-smi -q")


def wait(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.005)


@pytest.fixture
def hook() -> Iterator[Receiver]:
    found = Receiver()
    yield found
    found.close()


class Sent:
    """A receiver in the test's hands."""

    def __init__(self, refresh_s: float | None = None) -> None:
        self.name, self.refresh_s = "webhook", refresh_s
        self.got: list[Alert] = []
        self.attempts = 0
        self.fails = False

    def send(self, alert: Alert, now: float) -> None:
        self.attempts += 1
        if self.fails:
            raise Undelivered("down")
        self.got.append(alert)


class Deliveries:
    def __init__(self, file: Path) -> None:
        self.file, self.sent, self.open = file, list[msg.FromMonitor](), list[Delivery]()

    def start(self, receiver: Sent, known: list[Alert] | None = None) -> Delivery:
        self.open.append(Delivery([receiver], self.file, self.sent.append))
        self.open[-1].start(known or [])
        return self.open[-1]


@pytest.fixture
def deliveries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Deliveries]:
    monkeypatch.setattr(delivery, "_RETRIES_S", (0.01, 0.01, 0.01))
    found = Deliveries(tmp_path / "delivered.json")
    yield found
    for each in found.open:
        each.close(time.monotonic() + 5)


def test_firing_and_resolution_are_delivered_once(deliveries: Deliveries) -> None:
    to = Sent()
    line = deliveries.start(to)
    line.add(HOT)
    wait(lambda: to.got)
    line.add(HOT.resolved("over", NOW))
    wait(lambda: len(to.got) == 2)
    assert [a.state for a in to.got] == ["firing", "resolved"]
    wait(lambda: json.loads(deliveries.file.read_text()) == {"webhook": {}})


def test_a_restarted_monitor_delivers_what_is_missing(deliveries: Deliveries) -> None:
    to = Sent()
    first = deliveries.start(to)
    first.add(HOT)
    wait(lambda: to.got)
    first.close(time.monotonic() + 5)
    again = Sent()
    other = alert("straggler")
    deliveries.start(again, [HOT, other, alert("no_progress").resolved("never heard of", NOW)]).close(
        time.monotonic() + 5
    )
    assert [a.rule for a in again.got] == ["straggler"]
    last = Sent()
    deliveries.start(last, [HOT.resolved("over", NOW), other]).close(time.monotonic() + 5)
    assert [(a.rule, a.state) for a in last.got] == [("gpu_hot", "resolved")]


def test_failed_deliveries_are_reported_once_and_retried(deliveries: Deliveries) -> None:
    to = Sent()
    to.fails = True
    line = deliveries.start(to)
    line.add(HOT)
    wait(lambda: to.attempts == 3)
    to.fails = False
    wait(lambda: to.got)
    (sent,) = deliveries.sent
    assert isinstance(sent, msg.MonitorFailed)
    assert (sent.kind, sent.data) == ("alert_delivery_failed", {"to": "webhook", "error": "down"})


def test_after_giving_up_the_next_alert_is_tried(deliveries: Deliveries) -> None:
    to = Sent()
    to.fails = True
    line = deliveries.start(to)
    line.add(HOT)
    wait(lambda: to.attempts == 4)
    to.fails = False
    line.add(alert("straggler"))
    wait(lambda: to.got)
    assert [a.rule for a in to.got] == ["straggler"]
    assert len(deliveries.sent) == 1


def test_alerts_resolved_before_delivery_are_dropped(deliveries: Deliveries) -> None:
    to = Sent()
    to.fails = True
    line = deliveries.start(to)
    line.add(HOT)
    wait(lambda: to.attempts)
    line.add(HOT.resolved("over", NOW))
    to.fails = False
    line.close(time.monotonic() + 5)
    assert to.got == []


def test_firing_alerts_are_refreshed_until_resolved(deliveries: Deliveries) -> None:
    to = Sent(refresh_s=0.01)
    line = deliveries.start(to)
    line.add(HOT)
    wait(lambda: len(to.got) > 3)
    line.add(HOT.resolved("over", NOW))
    wait(lambda: to.got[-1].state == "resolved")
    line.close(time.monotonic() + 5)
    assert to.got[-1].state == "resolved"
    assert [a.state for a in to.got].count("resolved") == 1


def test_a_full_disk_does_not_stop_delivery(deliveries: Deliveries) -> None:
    deliveries.file = Path("/dev/full/nowhere")
    to = Sent()
    deliveries.start(to).add(HOT)
    wait(lambda: to.got)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"webhook": 3}', '{"webhook": {"gpu_hot": 7}}'])
def test_a_damaged_delivery_file_is_ignored(deliveries: Deliveries, content: str) -> None:
    deliveries.file.write_text(content)
    to = Sent()
    deliveries.start(to, [HOT])
    wait(lambda: to.got)


def test_a_webhook_gets_text_and_fields(hook: Receiver, tmp_path: Path) -> None:
    file = tmp_path / "address"
    file.write_text(f"{hook.address}/{SECRET}\n")
    (to,) = receivers.receivers(WatchSection(alert_webhook_file=str(file)), "a-run", {})
    to.send(HOT, NOW)
    (got,) = hook.got
    assert got["text"] == "[WARNING] a-run: GPU hot: node 3: 91 °C\nnext: nvidia-smi -q"
    assert (got["alert"]["rule"], got["alert"]["nodes"], got["alert"]["run"]) == ("gpu_hot", [3], "a-run")
    (same,) = receivers.receivers(WatchSection(alert_webhook_env="HOOK"), "a-run", {"HOOK": hook.address})
    same.send(HOT.resolved("resolved: GPU hot", NOW), NOW)
    assert hook.got[-1]["text"] == "[RESOLVED] a-run: resolved: GPU hot"


@pytest.mark.parametrize("status", [302, 400, 404, 500])
def test_a_non_2xx_response_is_a_failure(hook: Receiver, status: int) -> None:
    hook.status = status
    with pytest.raises(Undelivered, match=f"HTTP status {status}") as caught:
        receivers.Webhook(lambda: f"{hook.address}/{SECRET}", "a-run").send(HOT, NOW)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "address",
    [
        f"http://127.0.0.1:1/{SECRET}",
        f"http://no-such-host.invalid/{SECRET}",
        f"http://127.0.0.1:port/{SECRET}",
        f"http://[::1/{SECRET}",
        f"http://127.0.0.1/{SECRET} with space\n",
        f"ftp://127.0.0.1/{SECRET}",
        f"file:///{SECRET}",
        SECRET,
    ],
)
def test_webhook_address_is_never_in_an_error(address: str) -> None:
    with pytest.raises(Undelivered) as caught:
        receivers.Webhook(lambda: address, "a-run").send(HOT, NOW)
    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_a_missing_address_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    for section in (
        {"alert_webhook_file": str(tmp_path / "none")},
        {"alert_webhook_file": str(tmp_path / "empty")},
        {"alert_webhook_env": "HOOK"},
    ):
        (to,) = receivers.receivers(WatchSection(**section), "a-run", {})  # type: ignore[arg-type]
        with pytest.raises(Undelivered):
            to.send(HOT, NOW)


def test_a_command_gets_json_and_variables(tmp_path: Path) -> None:
    out = tmp_path / "out"
    script = f'cat > {out}; echo "$SEATRIAL_ALERT_STATE $SEATRIAL_ALERT_NODES $0" >> {out}'
    odd = replace(HOT, message="quote ' $(touch /tmp/x) \0")
    receivers.Command(["sh", "-c", script, "one argument"], "a-run").send(odd, NOW)
    document, rest = out.read_text().split("}", 1)[0], out.read_text().rsplit("}", 1)[1]
    assert '"rule": "gpu_hot"' in document
    assert rest.strip() == "firing 3 one argument"


def test_a_command_that_fails_or_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receivers, "_COMMAND_S", 0.1)
    for argv, reason in (
        (["sh", "-c", "exit 4"], "exit code 4"),
        (["/no/such/program"], "No such file"),
        (["sh", "-c", "sleep 60 & sleep 60"], "took longer than"),
    ):
        with pytest.raises(Undelivered, match=reason):
            receivers.Command(argv, "a-run").send(HOT, NOW)


def test_alertmanager_labels_do_not_change_while_it_fires() -> None:
    later = replace(HOT, nodes=[3, 4], message="GPU hot: nodes 3-4")
    bodies = [
        json.loads(notice.alertmanager_body(a, "a-run", NOW, 240.0))
        for a in (HOT, later, HOT.resolved("over", NOW))
    ]
    labels = [body[0]["labels"] for body in bodies]
    assert labels[0] == labels[1] == labels[2]
    assert labels[0] == {
        "alertname": "SeatrialGpuHot",
        "rule": "gpu_hot",
        "run": "a-run",
        "source": "seatrial",
        "severity": "warning",
    }
    assert [body[0]["endsAt"] for body in bodies] == ["2027-01-15T08:04:00.000Z"] * 2 + [
        "2027-01-15T08:00:00.000Z"
    ]
