"""The table that `dcgmi diag` prints without -j, DCGM 2 to 4. Judged like the JSON."""

from __future__ import annotations

import re
from dataclasses import replace

from seatrial.check.outputs.dcgm_diag import CONFIG_TEXT, Diagnostic, Result, judge
from seatrial.check.outputs.finding_collector import having
from seatrial.check.outputs.tool import Lines, ParseError, Tool

_HEAD = re.compile(r"^\|\s*Diagnostic\s*\|\s*Result\s*\|\s*$")
_ROW = re.compile(r"^\|(?P<name>[^|]*)\|(?P<value>[^|]*)\|\s*$")
_SUCCESS = re.compile(r"Successfully ran diagnostic for group\.?\s*")
_SECTION = re.compile(r"^[|+]-{3,}\s+(?P<name>\w[\w ]*?)\s+-{3,}\+-+[|+]\s*$")
_RULE = re.compile(r"^\+[-=]+\+[-=]+\+\s*$")
_STATUS = "Pass|Fail|Warn|Skip|Not Run"
# "Pass - All", "Fail - GPU: 3", "Skip - GPUs: 0, 1"; DCGM 4 has one line per entity, "GPU3: Fail".
_OLD = re.compile(
    rf"^(?P<status>{_STATUS})(?: - (?P<who>All|[A-Z]\w*:? ?(?P<ids>[0-9]{{1,3}}(?:, ?[0-9]{{1,3}})*)))?$"
)
_NEW = re.compile(rf"^(?P<kind>[A-Z]\w*?) ?(?P<id>[0-9]{{1,3}}): (?P<status>{_STATUS})$")
_WARNING = re.compile(r"^(?P<what>Warning|Error|Info)(?:: ?(?P<who>.*))?$")
_VERSIONS = ("metadata",)
# By name, for results without a reason.
_SETTINGS = ("persistence mode", "environment variables", "environmental variables")


def parse(lines: Lines, file: str) -> Diagnostic:
    """Parse the table. Raises ParseError if no test has a result, or the table is incomplete."""
    reader, closed = _Reader(), False
    width: int | None = None  # of all table lines
    for number, line in lines:
        if _HEAD.match(line) and width is None:
            width = len(line.rstrip())
        elif width is None or len(line.rstrip()) != width:
            if not _SUCCESS.fullmatch(line):
                continue
        elif section := _SECTION.match(line):
            reader.section, closed = section["name"].lower(), False
        elif _RULE.match(line):
            closed = bool(reader.results)
        elif row := _ROW.match(line):
            reader.row(row["name"].strip(), row["value"].strip())
            closed = False
        else:
            continue
        lines.claim(number)
    if not reader.results:
        raise ParseError("the table of dcgmi diag has no test", file=file)
    if not closed:
        raise ParseError("the table is incomplete: truncated", file=file)
    return Diagnostic(file, tuple(reader.finished()), None, reader.version)


class _Reader:
    def __init__(self) -> None:
        self.section = ""
        self.version: str | None = None
        self.results: list[Result] = []
        self._test = ""
        self._about: list[int] | None = None  # results that a continuation line of a warning belongs to

    def row(self, name: str, value: str) -> None:
        """Parse one row of the table."""
        if self.section in _VERSIONS:
            self.version = value if name == "DCGM Version" else self.version
        elif found_in_name := _WARNING.match(name):
            self._add_warning(found_in_name["what"], found_in_name["who"] or "", value)
        elif name:
            if name == "DCGM Version":
                self.version = value
            elif not name.endswith(("Detected", "Test Version")):
                self._test, self._about = name, None
                self._add(value)
        elif self._about is not None:
            self._continue_warning(value)
        elif value:
            self._add(value)

    def _add(self, value: str) -> None:
        if new := _NEW.match(value):
            gpu = int(new["id"]) if new["kind"] == "GPU" else None
            self.results.append(Result(self._test, gpu, _plain(new["status"]), (), False))
            return
        old = _OLD.match(value)
        status = _plain(old["status"] if old is not None else value)
        ids = [] if old is None or old["ids"] is None else re.findall(r"[0-9]+", old["ids"])
        gpus: list[int | None] = [int(i) for i in ids]
        for gpu in gpus or [None]:
            self.results.append(Result(self._test, gpu, status, (), False))

    def _add_warning(self, what: str, who: str, value: str) -> None:
        own = [n for n, r in enumerate(self.results) if r.test == self._test]
        gpus = {int(n) for n in re.findall(r"GPU ?([0-9]{1,3})", who)}
        meant = [n for n in own if self.results[n].gpu in gpus] if gpus else []
        self._about = (
            (meant or [n for n in own if self.results[n].status != "pass"]) if what != "Info" else []
        )
        for n in self._about:
            self.results[n] = replace(self.results[n], warnings=(*self.results[n].warnings, value))

    def _continue_warning(self, value: str) -> None:
        for n in self._about or ():
            *before, last = self.results[n].warnings
            self.results[n] = replace(self.results[n], warnings=(*before, f"{last} {value}"[:300]))

    def finished(self) -> list[Result]:
        """The results. DCGM 4 has one per test and one per GPU; a test's is dropped if a GPU has the same status."""
        kept = []
        for result in self.results:
            parts = [r for r in self.results if r.test == result.test and r.gpu is not None]
            if result.gpu is None and parts and any(r.status == result.status for r in parts):
                continue
            texts = tuple(" ".join(t.split()) for t in result.warnings)
            setting = not texts and result.test.lower() in _SETTINGS
            config = setting or (bool(texts) and all(CONFIG_TEXT.search(t) for t in texts))
            texts = texts or (("a setting, no reason given",) if setting else ())
            kept.append(replace(result, warnings=texts, config=config))
        return kept


def _plain(status: str) -> str:
    return re.sub(r"\s", "", status.lower())


def inventory(run: Diagnostic) -> dict[str, str | int | float]:
    """The version of DCGM."""
    return {} if run.version is None else {"DCGM": run.version}


_BEGINS = re.compile(r"Successfully ran diagnostic|\|\s*(?P<id>Diagnostic)\s*\|\s*Result\s*\|")
TOOLS: tuple[Tool[Diagnostic], ...] = (
    Tool("dcgmi diag", having(_HEAD.pattern), parse, judge, inventory, first_line=_BEGINS),
)
