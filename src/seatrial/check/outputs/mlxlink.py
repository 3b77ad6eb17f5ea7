"""Output of mlxlink (NVIDIA Firmware Tools), text and --json: one port's physical layer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from seatrial.check.judging.findings import Expected, Finding, Target, Verdict
from seatrial.check.outputs.finding_collector import FindingCollector
from seatrial.check.outputs.network import damaged
from seatrial.check.outputs.tool import Context, Lines, ParseError, Tool, read_json
from seatrial.check.outputs.topology import IB_SPEEDS

_PAIR = re.compile(r"^(?P<name>\S[^:]*?)\s*:\s?(?P<value>.*?)\s*$")
_LONGEST = 45  # characters of a name; longer text is a sentence
_RULE = re.compile(r"-{3,}\s*")
_SECTIONS = ("Operational Info", "Supported Info", "Troubleshooting Info")
_COUNTERS = "Physical Counters and BER Info"
_NO_ISSUE = re.compile(r"No issue was observed\.?")
_NEEDED = ("State", "Physical state", "Speed", "Width")
_DOWN = ("Disable", "Disabled", "Polling", "Down", "Close port", "Port PLL Down")
_UP = ("LinkUp", "ETH_AN_FSM_ENABLE", "Phy Test Up", "ETH_FORCE_FSM")
# "IB-": InfiniBand Architecture Specification; Ethernet as mlxlink prints it.
_SPEED = re.compile(
    r"^(?:IB-(?P<ib>[A-Z0-9]+)|(?:BaseTx\d*|Base\w*)?(?P<eth>\d+(?:\.\d+)?)(?P<unit>[GM])\w*)$"
)
_LISTED = re.compile(r"\((?P<speeds>[^)]*)\)")
# The specification's bit error rate, an upper limit after error correction. mlxlink prints 15E-255 for zero.
_BIT_ERRORS = 1e-12


@dataclass(frozen=True)
class LinkFacts:
    """The fields of all sections: name -> value and line."""

    file: str
    fields: Mapping[str, tuple[str, int | None]]
    damage: tuple[tuple[str, int | None], ...] = field(default=())

    def text(self, name: str) -> str | None:
        """A field's value; None if it is absent."""
        found = self.fields.get(name)
        return None if found is None else found[0]

    def line(self, name: str) -> int | None:
        return self.fields[name][1] if name in self.fields else None


def matches(text: str) -> bool:
    """Whether the section titles of mlxlink are there, as text or in JSON."""
    return "Operational Info" in text and (
        "Troubleshooting Info" in text or "Supported Info" in text or "Physical state" in text
    )


def parse(lines: Lines, file: str) -> LinkFacts:
    """Parse all fields. Raises ParseError if there is none. Damage is recorded in `damage`."""
    fields: dict[str, tuple[str, int | None]] = {}
    damage: list[tuple[str, int | None]] = []
    if lines.text.lstrip().startswith("{"):
        sections = _from_json(lines, file, fields)
    else:
        sections = _from_text(lines, fields)
    if not fields:
        raise ParseError("no mlxlink field in the output", file=file)
    damage += [(f"the section `{name}` is missing", None) for name in _SECTIONS if name not in sections]
    damage += [(f"no `{name}`", None) for name in _NEEDED if not fields.get(name, ("", 0))[0]]
    for name in ("Status Opcode", "Recommendation"):
        if "Troubleshooting Info" in sections and name not in fields:
            damage.append((f"no `{name}`", None))
    advice = fields.get("Recommendation")
    advised = advice is not None and (advice[0] or advice[1] is not None)  # in JSON it may be empty
    if (
        advice is not None
        and advised
        and fields.get("Status Opcode", ("", 0))[0] == "0"
        and not _NO_ISSUE.fullmatch(advice[0])
    ):
        damage.append((f"no issue by its opcode, but the recommendation {advice[0][:60]!r}", advice[1]))
    if "Tool Information" in sections and "MFT Version" not in fields and "mstflint Version" not in fields:
        damage.append(("`Tool Information` is incomplete: truncated", None))
    if _COUNTERS in sections and "Effective Physical BER" not in fields:
        damage.append((f"`{_COUNTERS}` without the effective bit error rate", None))
    return LinkFacts(file, fields, tuple(damage))


def _from_text(lines: Lines, fields: dict[str, tuple[str, int | None]]) -> set[str]:
    """Fill `fields` and return the sections. A line counts if its colon is aligned or follows a longer name."""
    sections: set[str] = set()
    seen: set[tuple[str, str]] = set()
    section, colon = "", 0
    following = [*[line for _, line in lines][1:], ""]
    for (number, line), after in zip(lines, following, strict=True):
        if _RULE.fullmatch(after) and line.strip() not in (*sections, "") and ":" not in line:
            section, colon = line.strip(), 0
            sections.add(section)
        elif section and (pair := _PAIR.match(line)) and (section, pair["name"]) not in seen:
            column = line.index(":", pair.end("name"))
            if not colon:
                colon = column
            elif column != colon and not (colon < column < _LONGEST and column - pair.end("name") < 2):
                continue
            seen.add((section, pair["name"]))
            fields.setdefault(pair["name"], (pair["value"], number))
        elif not (section and colon and line.strip() and not line[:colon].strip()):  # continuation of a value
            continue
        lines.claim(number)
    return sections


def _from_json(lines: Lines, file: str, fields: dict[str, tuple[str, int | None]]) -> set[str]:
    document = read_json(lines, file)
    result = document.get("result") if isinstance(document, dict) else None
    output = result.get("output") if isinstance(result, dict) else None
    if not isinstance(output, dict):
        raise ParseError("no result.output in mlxlink's JSON", file=file)
    for section in output.values():
        for name, value in section.items() if isinstance(section, dict) else ():
            if isinstance(value, dict):  # {"mask": ..., "values": ["NDR", "HDR"]}
                listed = value.get("values")
                value = f"({','.join(map(str, listed))})" if isinstance(listed, list) else str(value)
            fields.setdefault(str(name), (str(value), None))
    return {str(name) for name in output}


def judge(facts: LinkFacts, context: Context) -> list[Finding]:
    """State, speed against what port and cable support, and quality. PASS only if up, at full speed and error-free."""
    add = FindingCollector(
        facts.file, context, "NET008", Target(port=facts.text("Device") or facts.text("device"))
    )
    add.found += damaged(facts.damage, facts.file, "mlxlink")
    _state(facts, add)
    _speed(facts, add)
    _quality(facts, add)
    return add.with_pass(f"{facts.text('Speed')} {facts.text('Width')}, link up, no issue reported")


def _state(facts: LinkFacts, add: FindingCollector) -> None:
    state, physical = facts.text("State"), facts.text("Physical state")
    if not state or not physical or (state == "Active" and physical in _UP):
        return
    expected = Expected("Active, LinkUp", source="InfiniBand Architecture Specification, port states")
    text, down = f"{state}, physical state {physical}", state in _DOWN
    if not down:
        text = f"unknown state: {text[:80]}"
    elif advice := facts.text("Recommendation"):
        text += f"; {advice}"
    verdict: Verdict = "FAIL" if down else "UNJUDGED"
    add(verdict, text, facts.line("State"), code="NET001", measured=state, expected=expected)


def _rank(speed: str) -> float | None:
    """Sort key that grows with the speed; None if it is not a speed. No port has both InfiniBand and Ethernet."""
    if (name := speed.removeprefix("IB-")) in IB_SPEEDS:
        return float(IB_SPEEDS.index(name))
    found = _SPEED.match(speed)
    if found is None or found["eth"] is None:
        return None
    return float(found["eth"]) * (1.0 if found["unit"] == "G" else 1e-3)


def _best(text: str | None) -> str | None:
    """The fastest speed in a list such as "0x000000f1 (NDR,HDR,EDR)"."""
    ranked = [(rank, s) for s in _speeds(text) if (rank := _rank(s)) is not None]
    return max(ranked)[1] if ranked else None


def _speeds(text: str | None) -> list[str]:
    listed = _LISTED.search(text or "")
    return [] if listed is None else [s.strip() for s in listed["speeds"].split(",")]


def _speed(facts: LinkFacts, add: FindingCollector) -> None:
    if facts.text("State") != "Active":
        return
    speed, width = facts.text("Speed") or "", facts.text("Width") or ""
    lists = [
        facts.text(f"{of} Speed") or facts.text(f"{of} Speed (Ext.)")
        for of in ("Enabled Link", "Supported Cable")
    ]
    unknown = [speed] * (_rank(speed) is None) + [width] * (re.fullmatch(r"[0-9]{1,2}x", width) is None)
    if speed.startswith("IB-"):  # not all Ethernet speed names are known
        unknown += [s for text in lists for s in _speeds(text) if _rank(s) is None]
    line, (enabled, cable) = facts.line("Speed"), map(_best, lists)
    if unknown or enabled is None:
        why = "the enabled speeds are not in the output, or unreadable"
        if unknown:
            why = f"unknown speed or width: {', '.join(unknown)[:60]!r}"
        add("UNJUDGED", why, line, code="NET002")
        return
    best = min((s for s in (enabled, cable) if s is not None), key=lambda s: _rank(s) or 0.0)
    if (_rank(speed) or 0.0) < (_rank(best) or 0.0):
        expected = Expected(best, "", "the fastest that port and cable support, from mlxlink")
        text = f"runs at {speed}, port and cable support {best}"
        add("FAIL", text, line, code="NET002", measured=speed, expected=expected)
    narrow = width == "1x" or (width == "2x" and (_rank(speed) or 0) < IB_SPEEDS.index("NDR"))
    if narrow and speed.startswith("IB-"):
        expected = Expected("4x", "", "the width of a port up to HDR; NDR and later are also sold with 2x")
        text = f"runs over {width} instead of 4x lanes"
        # HDR100: a switch port is split into two ports of two lanes. A port that has lost two lanes looks the same.
        verdict: Verdict = "WARN" if (speed, width) == ("IB-HDR", "2x") else "FAIL"
        if verdict == "WARN":
            text += ": lost two lanes, unless its switch's port is split (HDR100)"
        add(verdict, text, facts.line("Width"), code="NET002", measured=width, expected=expected)


def _quality(facts: LinkFacts, add: FindingCollector) -> None:
    opcode, advice = facts.text("Status Opcode"), facts.text("Recommendation") or ""
    if opcode is not None and opcode != "0" and facts.text("State") == "Active":
        line = facts.line("Status Opcode")
        if opcode.isdecimal():
            text, good = f"status opcode {opcode}: {advice}", Expected("0", "", "mlxlink")
            add("WARN", text, line, measured=opcode, expected=good)
        else:
            add("UNJUDGED", f"the status opcode is unreadable: {opcode[:40]!r}", line)
    for name in ("Effective Physical BER", "Symbol BER"):
        value, line = facts.text(name), facts.line(name)
        if value is None or value in ("N/A", ""):
            continue
        rate = float(value) if re.fullmatch(r"\d+(?:\.\d+)?(?:[eE]-?\d{1,3})?", value) else None
        if rate is None:
            add("UNJUDGED", f"`{name}` is unreadable: {value[:40]!r}", line)
        elif rate > _BIT_ERRORS:
            most = Expected(_BIT_ERRORS, "", "at most; InfiniBand Architecture Specification")
            text = f"{name} {value}: errors remain after correction"
            add("WARN", text, line, measured=rate, expected=most)


TOOLS = (Tool("mlxlink", matches, parse, judge, first_line=re.compile(r"(?P<id>Operational Info)\s*$")),)
