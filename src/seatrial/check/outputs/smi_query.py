"""Output of `nvidia-smi -q`, as text or as XML (-x), whole or in part (-d): every value by its path."""

from __future__ import annotations

import re
import xml.parsers.expat
from collections.abc import Iterator, Set
from dataclasses import dataclass, field

from seatrial.check.outputs.smi_table import inforom_lines
from seatrial.check.outputs.tool import Lines, ParseError, lines_of
from seatrial.hardware.xid import address

_HEADER = re.compile(r"^=+\s*NVSMI LOG\s*=+\s*$")
_GPU = re.compile(r"^GPU (?P<id>[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f])\s*$", re.ASCII)
_XML, _XML_END = re.compile(r"<(?:\?xml|!DOCTYPE|nvidia_smi_log)"), "</nvidia_smi_log>"
_HEAD_KEYS = ("timestamp", "driver_version", "cuda_version", "attached_gpus")
BEGINS = re.compile(
    r"(?:=+\s*(?=NVSMI LOG\b)|<(?=\?xml\b))(?P<id>)|<nvidia_smi_log|GPU [0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f]\s*$"
)
# Fields that appear once per GPU. Lists of processes, pages or clocks repeat their names.
_ONCE = re.compile(
    r"(?:remapped_rows|ecc_errors|ecc_mode|clocks_\w+_reasons|fabric|gpu_reset_status|pci|retired_pages)\.(?!.*list)|gpu_recovery_action|product_name"
)
_NAME = re.compile(r"[\x20\tA-Za-z0-9._/()&-]+")
_COLON = re.compile(r"\s:(?=\s|$)")
LOST = re.compile(
    r"^Unable to determine the device handle for (?P<what>.{0,80}?): *(?P<why>.{0,200})$|^.{0,80}GPU is lost.{0,120}$",
    re.IGNORECASE,
)
# Sections that a partial output (-d) can start with: without a heading, they identify it.
SECTIONS = (
    "fabric",
    "ecc_errors",
    "ecc_mode",
    "retired_pages",
    "remapped_rows",
    "clocks",
    "clocks_event_reasons",
    "clocks_throttle_reasons",
    "temperature",
    "gpu_power_readings",
    "fb_memory_usage",
    "pci",
    "gpu_reset_status",
)
# A section that only the whole output has, and one near the end of the whole output.
_WHOLE, _END = "product_name", "processes"


@dataclass(frozen=True)
class Value:
    """One value as printed, and its line."""

    text: str
    line: int


@dataclass
class Gpu:
    """One GPU's section. Paths are in lower case with underscores: "remapped_rows.pending"."""

    pci: str | None  # None for a part without a heading
    line: int
    values: dict[str, Value] = field(default_factory=dict)
    index: int | None = None  # as printed; None: by position

    def get(self, *paths: str) -> Value | None:
        """The first of `paths` that has a value other than N/A."""
        for path in paths:
            value = self.values.get(path)
            if value is not None and value.text not in ("N/A", "[N/A]", "Not Supported", "Not Available", ""):
                return value
        return None

    def below(self, path: str) -> Iterator[tuple[str, Value]]:
        """Every value whose path begins with `path` and a dot."""
        return ((key, v) for key, v in self.values.items() if key.startswith(path + "."))

    @property
    def name(self) -> str | None:
        """Product name: "NVIDIA H100 80GB HBM3"."""
        value = self.get(_WHOLE)
        return None if value is None else value.text

    @property
    def sections(self) -> frozenset[str]:
        return frozenset(key.partition(".")[0] for key in self.values)


@dataclass
class Query:
    """The whole output. `attached` is the number of GPUs it states; `lost` are GPUs the driver cannot open."""

    file: str
    head: dict[str, Value]
    gpus: list[Gpu]
    lost: list[tuple[int, str]]
    whole: bool  # all sections, not a selection by -d
    corrupt: list[tuple[int, str | None]] = field(default_factory=list)  # corrupt infoROMs: line, address

    @property
    def attached(self) -> int | None:
        value = self.head.get("attached_gpus")
        return (
            int(value.text) if value is not None and value.text.isdecimal() and len(value.text) < 5 else None
        )


def matches(text: str) -> bool:
    """Whether this is `nvidia-smi -q` or `-q -x`, whole or in part."""
    start = text[:20_000]
    if "<nvidia_smi_log>" in start or re.search(r"^=+\s*NVSMI LOG\s*=+\s*$", start, re.MULTILINE):
        return True
    if re.search(
        r"^GPU [0-9A-F]{4,8}:[0-9A-F]{2}:[0-9A-F]{2}\.[0-9]\s*$", start, re.MULTILINE | re.IGNORECASE
    ):
        return True
    first = next((line for line in lines_of(start) if line.strip()), "")
    part = _key(first.strip()) in SECTIONS and ":" not in first
    return part and re.search(r"^\s+[A-Z][\w. ]{1,60}\s+: \S", start, re.MULTILINE) is not None


def parse(lines: Lines, file: str) -> Query:
    """Parse the output. Raises ParseError if it has no GPU or is cut off."""
    corrupt = inforom_lines(lines)
    lost = [(number, line.strip()) for number, line in lines if LOST.match(line)]
    lines.claim(*(number for number, _ in lost))
    # Driver messages about GPUs go to stderr and may be interleaved anywhere.
    seen = {number for number, _ in (*corrupt, *lost)}
    query = (_parse_xml if "<nvidia_smi_log" in lines.text else _parse_text)(lines, seen, file)
    query.corrupt, query.lost = corrupt, lost
    if not query.gpus and not query.lost:
        raise ParseError("no GPU in the output of nvidia-smi -q", file=file)
    _check_end(query, file)
    return query


def _check_end(query: Query, file: str) -> None:
    """Raise ParseError if the last GPU lacks a value of the first, or a whole output lacks the section near its end."""
    if not query.gpus:
        return
    first, last = query.gpus[0], query.gpus[-1]
    if query.whole and _END not in last.sections:
        missing: str | None = _END
    elif query.whole and last.name != first.name:
        missing = None  # different models have different values
    else:
        missing = next((path for path in first.values if not _is_present(path, last)), None)
    if missing is not None:
        where = max((v.line for v in last.values.values()), default=last.line)
        raise ParseError(
            f"{missing!r} of the last GPU is missing: the output is truncated", file=file, line=where
        )


def _is_present(path: str, gpu: Gpu) -> bool:
    """Whether a GPU has this value, or a value such as N/A for an enclosing section; skips processes, which change."""
    parts = path.split(".")
    return parts[0] in (_END, "accounted_processes", "capabilities") or any(
        ".".join(parts[:n]) in gpu.values for n in range(1, len(parts) + 1)
    )


def _parse_text(lines: Lines, claimed: Set[int], file: str) -> Query:
    head: dict[str, Value] = {}
    gpus: list[Gpu] = []
    stack: list[tuple[int, str]] = []  # indentation and name of the enclosing sections
    heading: tuple[int, int] | None = None  # number and indentation of the last line, if it had no value
    for number, line in lines:
        if not line.strip() or number in claimed:
            continue
        if _HEADER.match(line):
            lines.claim(number)
            continue
        if found := _GPU.match(line):
            if all(g.pci != address(found["id"]) for g in gpus):
                lines.claim(number)
            gpus.append(Gpu(address(found["id"]), number))
            stack, heading = [], None
            continue
        colon = _COLON.search(line)
        name, value = (line, None) if colon is None else (line[: colon.start()], line[colon.end() :].strip())
        indent, key = len(line.expandtabs(8)) - len(line.expandtabs(8).lstrip()), _key(name)
        if (gpus and not _NAME.fullmatch(name)) or (gpus and gpus[0].pci is not None and not indent):
            continue
        # A line without a value is a heading if indented lines follow.
        if heading is not None and indent > heading[1]:
            lines.claim(heading[0])
        heading = (number, indent) if value is None else None
        while stack and stack[-1][0] >= indent:
            stack.pop()
        path = ".".join([*(name for _, name in stack), key])
        if not gpus and indent == 0 and value is not None:
            if head.setdefault(key, Value(value, number)).line == number and key in _HEAD_KEYS:
                lines.claim(number)
            continue
        if not gpus:
            if key not in SECTIONS:
                continue  # a prompt, or output of another tool before it
            gpus.append(Gpu(None, number))
        # A repeated field belongs to another GPU, except in the lists of processes.
        if value is not None and (
            gpus[-1].values.setdefault(path, Value(value, number)).line == number
            or path.startswith((_END, "accounted_processes"))
        ):
            lines.claim(number)
        stack.append((indent, key))
    whole = any(_WHOLE in g.sections for g in gpus)
    return Query(file, head, gpus, [], whole)


def _parse_xml(lines: Lines, claimed: Set[int], file: str) -> Query:
    """Parse the XML with expat, which does not fetch the DTD that the output names; entities are refused."""
    head: dict[str, Value] = {}
    gpus: list[Gpu] = []
    path: list[str] = []
    words: list[str] = []
    parser = xml.parsers.expat.ParserCreate()
    number = 0

    def start(name: str, attributes: dict[str, str]) -> None:
        words.clear()
        path.append(name)
        if name == "gpu" and len(path) == 2:
            gpus.append(Gpu(address(attributes.get("id", "")), number))

    def end(name: str) -> None:
        value = "".join(words).strip()
        words.clear()
        inside = path[1:2] == ["gpu"]
        key = ".".join(path[2:] if inside else path[1:])
        if value:
            target = gpus[-1].values if inside else head
            if target.setdefault(key, Value(value, number)).line != number and _ONCE.match(key):
                raise ParseError(f"{key} twice in one GPU", file=file, line=number)
        elif inside and len(path) == 3:
            gpus[-1].values.setdefault(f"{key}.", Value("", number))  # an empty section
        path.pop()

    def entity(*_: object) -> None:
        raise ParseError("the XML declares an entity, which nvidia-smi never does", file=file)

    parser.StartElementHandler = start
    parser.EndElementHandler = end
    parser.CharacterDataHandler = words.append
    parser.EntityDeclHandler = entity
    begin = _XML.search(lines.text)
    first, last = 0 if begin is None else begin.start(), lines.text.find(_XML_END) + len(_XML_END)
    place = 0
    for number, line in lines.whole:
        at, place = place, place + len(line) + 1
        if number in claimed or place <= first or at >= last or not line.strip():
            continue
        if line.strip() != "None" and not (line.strip().startswith("<") and line.rstrip().endswith(">")):
            raise ParseError("text between the elements of the XML", file=file, line=number, source_line=line)
        try:
            parser.Parse(line[max(0, first - at) : last - at] + "\n", False)
        except xml.parsers.expat.ExpatError as error:
            reason = xml.parsers.expat.errors.messages[error.code]
            raise ParseError(f"the XML cannot be read: {reason}", file=file, line=number) from None
    if last < len(_XML_END) or path:
        last = lines.whole[-1][0]
        raise ParseError("the XML does not end: truncated", file=file, line=last)
    lines.claim_text(first, last)
    return Query(file, head, gpus, [], any(_WHOLE in g.values for g in gpus))


def _key(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")


def number(value: Value | None) -> float | None:
    """The number that a value begins with ("71.97 W"); None if there is none."""
    found = re.match(r"-?[0-9]{1,15}(?:\.[0-9]{1,9})?(?![0-9])", value.text) if value is not None else None
    return float(found[0]) if found else None
