"""The action for each signal, looked up in policy.toml, which is validated when it is loaded.

A signal is a name ("hang"), a name with a detail ("cuda_error:ecc"), or a driver message ("xid:79", "xid:145:fatal").
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any, Literal, get_args

from seatrial.base.errors import InternalError
from seatrial.hardware.xid import XidMessage, catalogue

Action = Literal["ignore", "record", "tolerate", "restart", "reset", "evict", "stop"]
_ACTIONS: tuple[str, ...] = get_args(Action)  # from the mildest to the strongest

# Memory errors that require a GPU reset even if a contained error (94) was reported with them.
_NOT_CONTAINED = frozenset({64, 95, 140})


@dataclass(frozen=True)
class Rule:
    """The policy for one signal. policy.toml describes the fields."""

    signal: str
    cls: str
    action: Action
    repeat: Action | None
    source: str
    hint: str | None = None
    note: str | None = None


@dataclass(frozen=True)
class Command:
    """A command with effects outside the run, to be executed verbatim, without a shell."""

    argv: tuple[str, ...]
    timeout_s: float
    source: str


@dataclass(frozen=True)
class _Pattern:
    signal: str
    types: frozenset[str] | None
    text: re.Pattern[str] | None


@dataclass(frozen=True)
class Policy:
    """All of policy.toml."""

    rules: dict[str, Rule]
    patterns: tuple[_Pattern, ...]
    commands: dict[str, Command]


def rule_for(signal: str) -> Rule:
    """Return the rule for a signal. A detail without a rule of its own gets the rule of the name before it.

    A signal without any rule is recorded as unknown, never guessed.
    """
    rules, name = policy().rules, signal
    while name not in rules:
        name, colon, _ = name.rpartition(":")
        if not colon:
            name = "unknown"
        elif name == "xid":
            name = "xid:unknown"
    return replace(rules[name], signal=signal)


def signal_of_exception(kind: str, message: str) -> str:
    """The signal for an exception of class name `kind`; "app_error" if nothing else fits."""
    for pattern in policy().patterns:
        if (pattern.types is None or kind in pattern.types) and (
            pattern.text is None or pattern.text.search(message)
        ):
            return pattern.signal
    return "app_error"


def signal_of_xid(message: XidMessage, other_codes: Collection[int] = ()) -> str:
    """The signal for a driver message; `other_codes` are those from the same GPU at about the same time."""
    if message.kind == "sxid":
        return "sxid" if message.severity is None else f"sxid:{message.severity}"
    name = f"xid:{message.code}"
    if message.benign:
        return f"{name}:benign"
    detail: str | None = message.severity or message.recovery
    if message.code == 48 and 94 in other_codes and _NOT_CONTAINED.isdisjoint(other_codes):
        detail = "contained"
    return f"{name}:{detail}" if detail else name


_GPU = re.compile(
    r"[0-9]{1,3}|GPU-[0-9a-fA-F-]{1,40}|[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(\.[0-9])?"
)
# Slurm would expand brackets, commas and the word ALL to many nodes.
_NODE = re.compile(r"(?!(?i:all)$)[A-Za-z0-9][A-Za-z0-9._-]{0,252}")


def reset_command(gpu: str) -> Command:
    """The command that resets one GPU, given as index, UUID or PCI address. Raises ValueError for anything else."""
    if not _GPU.fullmatch(gpu):
        raise ValueError(f"{gpu!r} is not the index, UUID or PCI address of a GPU")
    # nvidia-smi requires the PCI function too.
    return _filled("reset", gpu=f"{gpu}.0" if ":" in gpu and "." not in gpu else gpu)


def drain_command(node: str, reason: str) -> Command:
    """The command that drains one node, given by its scheduler name. Raises ValueError if `node` is not one name."""
    if not _NODE.fullmatch(node):
        raise ValueError(f"{node!r} is not the name of one node")
    return _filled("drain", node=node, reason=" ".join(reason.split())[:200] or "no reason given")


def _filled(name: str, **values: str) -> Command:
    command = policy().commands[name]
    return replace(command, argv=tuple(part.format_map(values) for part in command.argv))


@cache
def policy() -> Policy:
    """policy.toml, read and validated once."""
    return load(files("seatrial.control.machine").joinpath("policy.toml").read_text(encoding="utf-8"))


def load(text: str) -> Policy:
    """Parse the text of a policy.toml. Raises InternalError that lists every fault in it."""
    table = tomllib.loads(text)
    faults: list[str] = []
    rules = {name: _rule(name, entry, faults) for name, entry in table["signal"].items()}
    rules |= _xid_rules(table, faults)
    faults += [f"there is no rule for `{name}`" for name in ("unknown", "xid:unknown") if name not in rules]
    faults += [f"`{n}` has no rule for `{n.split(':')[0]}`" for n in rules if _orphan(n, rules)]
    patterns = []
    for number, entry in enumerate(table["exceptions"]["order"], 1):
        place = f"exception {number}"
        _keys(place, entry, {"signal"}, {"types", "text"}, faults)
        if entry.get("signal") not in rules:
            faults.append(f"{place}: there is no rule for `{entry.get('signal')}`")
        types, expression = entry.get("types"), entry.get("text")
        patterns.append(
            _Pattern(
                entry.get("signal", ""),
                None if types is None else frozenset(types),
                None if expression is None else re.compile(expression, re.IGNORECASE),
            )
        )
    commands = {}
    for name, entry in table["command"].items():
        if _keys(f"command {name}", entry, {"argv", "timeout_s", "source"}, set(), faults):
            commands[name] = Command(tuple(entry["argv"]), float(entry["timeout_s"]), entry["source"])
    if faults:
        raise InternalError("policy.toml: " + "; ".join(faults))
    return Policy(rules, tuple(patterns), commands)


def _xid_rules(table: dict[str, Any], faults: list[str]) -> dict[str, Rule]:
    """A rule for every code of the catalogue: its own entry, or that of NVIDIA's bucket."""
    own = dict(table["xid"])
    severities = table["nvlink5"]["severity"]
    for code in table["nvlink5"]["codes"]:
        own |= {f"{code}" if key == "undecoded" else f"{code}:{key}": e for key, e in severities.items()}
    rules = {}
    for code, xid in catalogue().items():
        if str(code) in own:
            continue
        bucket = table["bucket"].get(xid.bucket)
        if bucket is None:
            faults.append(f"xid {code}: no entry, and none for its bucket {xid.bucket}")
            continue
        entry = {"source": f"Xid catalog: {xid.bucket}"} | bucket
        if xid.gpud is not None:
            entry["note"] = "; ".join(filter(None, (bucket.get("note"), f"leptonai/gpud: {xid.gpud}")))
        own[str(code)] = entry
    for key, entry in own.items():
        number, _, _ = key.partition(":")
        known = catalogue().get(int(number)) if number.isdigit() else None
        if number.isdigit() and known is None:
            faults.append(f"xid {key}: not in the catalogue")
        rules[f"xid:{key}"] = _rule(f"xid:{key}", ({"class": known.cls} if known else {}) | entry, faults)
    return rules


def _rule(name: str, entry: dict[str, Any], faults: list[str]) -> Rule:
    required, optional = {"class", "action", "source"}, {"repeat", "hint", "note"}
    if not _keys(name, entry, required, optional, faults):
        return Rule(name, "unknown", "record", None, "")
    for key in ("action", "repeat"):
        if entry.get(key) not in (*_ACTIONS, None if key == "repeat" else ""):
            faults.append(f"{name}: `{key}` is {entry.get(key)!r}, not one of {', '.join(_ACTIONS)}")
            return Rule(name, "unknown", "record", None, "")
    if "repeat" in entry and _ACTIONS.index(entry["repeat"]) <= _ACTIONS.index(entry["action"]):
        faults.append(f"{name}: `repeat` is not stronger than `action`")
    return Rule(
        name,
        entry["class"],
        entry["action"],
        entry.get("repeat"),
        entry["source"],
        entry.get("hint"),
        entry.get("note"),
    )


def _keys(
    place: str, entry: dict[str, Any], required: set[str], optional: set[str], faults: list[str]
) -> bool:
    missing = {key for key in required if not entry.get(key)}
    stray = entry.keys() - required - optional
    faults += [f"{place}: `{key}` is missing" for key in sorted(missing)]
    faults += [f"{place}: there is no `{key}`" for key in sorted(stray)]
    return not missing and not stray


def _orphan(name: str, rules: dict[str, Rule]) -> bool:
    parent, colon, _ = name.rpartition(":")
    return bool(colon) and parent != "xid" and parent not in rules
