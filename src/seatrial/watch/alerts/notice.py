"""Renders an alert for each kind of receiver. Pure."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from seatrial.base.atomic import finite
from seatrial.job.alert_rules import Rule, rules
from seatrial.record.alerting import Alert

_LONGEST_TEXT = 2000  # characters; Slack shows 4,000


def name_of(rule: str) -> str:
    """The alert name in Prometheus and Alertmanager, such as "SeatrialGpuHot"."""
    return "Seatrial" + "".join(word.capitalize() for word in rule.split("_"))


def severity_of(rule: Rule) -> str:
    """The severity label that Prometheus users route by."""
    return "critical" if rule.severity == "error" else rule.severity


def document(alert: Alert, run: str) -> dict[str, Any]:
    """The whole alert as a JSON document. `run`: the name of the run."""
    found: dict[str, Any] = finite({"run": run, **vars(alert)})
    return found


def text(alert: Alert, run: str) -> str:
    """The alert as a few lines of text."""
    mark = "RESOLVED" if alert.state == "resolved" else alert.severity.upper()
    lines = [f"[{mark}] {run}: {alert.message}"[:_LONGEST_TEXT]]
    if alert.state == "firing" and alert.command is not None:
        lines.append(f"next: {alert.command}")
    return "\n".join(lines)


def webhook_body(alert: Alert, run: str) -> bytes:
    """The body for a webhook; Slack and similar services show `text`."""
    return json.dumps({"text": text(alert, run), "alert": document(alert, run)}).encode()


def environment(alert: Alert, run: str) -> dict[str, str]:
    """Environment variables for a command receiver."""
    values = {
        "RUN": run,
        "RULE": alert.rule,
        "STATE": alert.state,
        "SEVERITY": alert.severity,
        "MESSAGE": alert.message,
        "NODES": ",".join(map(str, alert.nodes)),
        "COMMAND": alert.command or "",
    }
    # Environment variables cannot contain NUL.
    return {f"SEATRIAL_ALERT_{key}": value.replace("\0", "") for key, value in values.items()}


def alertmanager_body(alert: Alert, run: str, now: float, lasts_s: float) -> bytes:
    """The body for POST /api/v2/alerts. A firing alert expires `lasts_s` after `now` unless it is sent again.

    Labels are its identity, so nothing that changes while it fires may be a label.
    """
    firing = alert.state == "firing"
    annotations = {
        "summary": alert.message[:_LONGEST_TEXT],
        "nodes": ",".join(map(str, alert.nodes)),
        "command": alert.command or "",
        "evidence": json.dumps(finite(alert.evidence))[:_LONGEST_TEXT],
    }
    labels = {"alertname": name_of(alert.rule), "rule": alert.rule, "run": run, "source": "seatrial"}
    if alert.rule in rules():  # older versions had other rules
        labels["severity"] = severity_of(rules()[alert.rule])
    body = {
        "labels": labels,
        "annotations": {key: value for key, value in annotations.items() if value},
        "startsAt": _rfc3339(alert.since),
        "endsAt": _rfc3339(now + lasts_s if firing else max(now, alert.since + 0.001)),
    }
    return json.dumps([body]).encode()


def _rfc3339(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
