"""Our alert rules as rules of Prometheus, where they can be said in PromQL."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from importlib.resources import files

from seatrial.hardware.counters import WAIT_SHARE
from seatrial.job.alert_rules import Rule, rules
from seatrial.watch.alerts.notice import name_of, severity_of

_JOIN = "({}) * on (instance) group_left (run) max by (instance, run) (seatrial_run_info)"
_WHERE = {"run": "{{ $labels.run }}", "node": "{{ $labels.node }}", "job": "JOB"}


def expressions() -> dict[str, str]:
    """Rule -> its PromQL, with the numbers of the rule."""
    text = files("seatrial.watch.grafana").joinpath("rules.toml").read_text(encoding="utf-8")
    found = {}
    for name, entry in tomllib.loads(text).items():
        limits = {key: _number(value) for key, value in rules()[name].numbers.items()}
        expression = entry["expr"].format_map(limits | {"congested": _number(WAIT_SHARE)})
        found[name] = _JOIN.format(expression) if entry["of"] == "node" else expression
    return found


def rules_file() -> str:
    """A rule file of Prometheus. JSON strings are YAML strings, too."""
    lines = ["groups:", "  - name: seatrial", "    rules:"]
    for name, expression in expressions().items():
        lines += [f"      {line}" for line in _lines(rules()[name], expression)]
    return "\n".join(lines) + "\n"


def _lines(rule: Rule, expression: str) -> list[str]:
    command = rule.command if "$labels.node" in rule.command else rule.command.removesuffix(" --node {node}")
    annotations: Mapping[str, str] = {
        "summary": f"{{{{ $labels.run }}}}: {rule.summary}{{{{ with $labels.node }}}}, node {{{{ . }}}}{{{{ end }}}}",
        "value": "{{ $value }}",
        "command": command.format_map(_WHERE),
    }
    return [
        f"- alert: {name_of(rule.name)}",
        f"  expr: {json.dumps(expression)}",
        f"  for: {rule.for_s:.0f}s",
        f"  keep_firing_for: {rule.clear_s:.0f}s",
        "  labels:",
        f"    severity: {severity_of(rule)}",
        f"    rule: {rule.name}",
        "  annotations:",
        *(f"    {key}: {json.dumps(text, ensure_ascii=False)}" for key, text in annotations.items()),
    ]


def _number(value: float) -> str:
    return f"{value:g}"
