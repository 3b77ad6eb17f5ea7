"""The alert rules: alert_rules.toml, with a job's own limits, validated when it is loaded."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from seatrial.base.errors import InternalError

Severity = Literal["warning", "error"]

_TEXTS = ("severity", "summary", "command", "source")
_TIMES = ("for_s", "clear_s")


@dataclass(frozen=True)
class Rule:
    """One rule; alert_rules.toml describes the fields."""

    name: str
    severity: Severity
    for_s: float
    clear_s: float
    summary: str
    command: str  # "": none
    source: str
    limits: Mapping[str, float]  # parameters of its condition

    @property
    def numbers(self) -> dict[str, float]:
        """Everything that a job may change."""
        return {"for_s": self.for_s, "clear_s": self.clear_s, **self.limits}

    def changed(self, own: Mapping[str, float]) -> Rule:
        """With a job's numbers instead of these."""
        numbers = {**self.numbers, **own}
        for_s, clear_s = (numbers.pop(name) for name in _TIMES)
        return replace(self, for_s=for_s, clear_s=clear_s, limits=numbers)


def rules_of(off: Collection[str], own: Mapping[str, Mapping[str, float]]) -> dict[str, Rule]:
    """The rules of a job: without those turned `off`, with its `own` numbers by rule."""
    return {name: rule.changed(own.get(name, {})) for name, rule in rules().items() if name not in off}


@cache
def rules() -> dict[str, Rule]:
    """alert_rules.toml, read and validated once."""
    return load(files("seatrial.job").joinpath("alert_rules.toml").read_text(encoding="utf-8"))


def load(text: str) -> dict[str, Rule]:
    """Parse the text of a alert_rules.toml. Raises InternalError that lists every fault in it."""
    faults: list[str] = []
    found = {}
    for name, entry in tomllib.loads(text).items():
        if _valid(name, entry, faults):
            limits = {k: float(v) for k, v in entry.items() if k not in (*_TEXTS, *_TIMES)}
            known = {key: entry[key] for key in (*_TEXTS, *_TIMES)}
            found[name] = Rule(name=name, limits=limits, **known)
    if faults:
        raise InternalError("alert_rules.toml: " + "; ".join(faults))
    return found


def _valid(name: str, entry: dict[str, Any], faults: list[str]) -> bool:
    before = len(faults)
    for key in (*_TEXTS, *_TIMES):
        if key not in entry or (entry[key] == "" and key != "command"):
            faults.append(f"{name}: `{key}` is missing")
    if entry.get("severity") not in ("warning", "error"):
        faults.append(f"{name}: `severity` is {entry.get('severity')!r}")
    for key, value in entry.items():
        if key not in _TEXTS and type(value) not in (int, float):
            faults.append(f"{name}: `{key}` is not a number")
    if "clear" in entry and "limit" not in entry:
        faults.append(f"{name}: `clear` without `limit`")
    return len(faults) == before
