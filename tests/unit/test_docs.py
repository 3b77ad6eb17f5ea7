"""The documents' tables against the code: job-file keys, records, event kinds, layers, verbs."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import re
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic.fields import FieldInfo

from seatrial.check.outputs.registry import tools
from seatrial.checkpoint.manifest import Entry, File, Manifest, Part, Progress
from seatrial.cli import check
from seatrial.cli.main import VERBS
from seatrial.data import sources
from seatrial.data.packed import PACKINGS
from seatrial.job.schema import GroupSection, JobFile, LoraSection, NameIn, RampSection, RopeScalingSection
from seatrial.job.validate import SECTIONS
from seatrial.record.events import Event
from seatrial.record.ledger import LedgerRecord
from seatrial.record.metrics import MetricsRecord
from seatrial.record.series import NODE_SERIES, RUN_SERIES, SERVED_SERIES
from seatrial.record.states import TABLE

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "seatrial"


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def part(text: str, heading: str) -> str:
    """What stands below a heading of the second level."""
    match = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert match is not None, f"no heading {heading}"
    return match[1]


def rows(text: str) -> list[list[str]]:
    """Cells of the table rows that begin with a name in backquotes."""
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def names(text: str) -> list[str]:
    return [row[0].strip("`") for row in rows(text)]


# -- the job file

SCHEMA: dict[str, dict[str, FieldInfo]] = {
    "top level": {k: f for k, f in JobFile.model_fields.items() if k not in SECTIONS},
    **{f"[{name}]": section.model_fields for name, section in SECTIONS.items()},
    "[model.rope_scaling]": RopeScalingSection.model_fields,
    "[model.lora]": LoraSection.model_fields,
    "[[optimizer.groups]]": GroupSection.model_fields,
    "[[train.batch_ramp]]": RampSection.model_fields,
}


def default_of(field: FieldInfo) -> str:
    """A default as the document writes it."""
    if field.is_required():
        return "required"
    value: Any = field.get_default()
    if value is None:
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f'`"{value}"`' if isinstance(value, str) else f"`{value!r}`"


@pytest.mark.parametrize("heading", SCHEMA)
def test_exactly_the_schema_keys_are_documented_with_defaults(heading: str) -> None:
    documented = {row[0].strip("`"): row[2] for row in rows(part(read("docs/job-file.md"), heading))}
    assert documented == {key: default_of(field) for key, field in SCHEMA[heading].items()}


def test_every_section_of_the_document_is_in_the_schema() -> None:
    headings = re.findall(r"^## (\[.+\]|top level)$", read("docs/job-file.md"), re.MULTILINE)
    assert sorted(headings) == sorted(SCHEMA)


def test_choices_are_documented() -> None:
    """Each value of a Literal, and each built-in name of a registry, stands in its key's row."""
    text = read("docs/job-file.md")
    for heading, fields in SCHEMA.items():
        found = {row[0].strip("`"): row[1] for row in rows(part(text, heading))}
        for key, field in fields.items():
            registered = [name for m in field.metadata if isinstance(m, NameIn) for name in m.registry.own]
            for choice in [*_choices(field.annotation), *registered]:
                assert f"`{choice}`" in found[key], f"{heading} {key}: {choice}"


def _choices(annotation: Any) -> list[str]:
    if isinstance(annotation, str):
        return [annotation]
    return [choice for inner in get_args(annotation) for choice in _choices(inner)]


# -- the run folder


def field_names(record: type) -> list[str]:
    return [field.name for field in dataclasses.fields(record)]


def test_every_record_field_is_documented() -> None:
    text = read("docs/run-folder.md")
    assert names(part(text, "metrics.jsonl")) == field_names(MetricsRecord)
    assert names(part(text, "ledger.jsonl")) == field_names(LedgerRecord)
    assert names(part(text, "events.jsonl").partition("| kind |")[0]) == field_names(Event)


def test_the_manifest_is_documented() -> None:
    text = part(read("docs/run-folder.md"), "A checkpoint")
    assert names(text) == ["schema_version", *field_names(Manifest)]
    for record in (Progress, File, Entry, Part):
        for name in field_names(record):
            assert f"`{name}`" in text, f"{record.__name__}.{name}"


def test_the_table_of_states_is_documented() -> None:
    text = part(read("docs/run-folder.md"), "The state of a run")
    assert [row[0].strip("`") for row in rows(text)] == [row.state for row in TABLE]
    assert [tuple(row[1:]) for row in rows(text)] == [(row.when, row.reason) for row in TABLE]


# What takes the kind of an event, and at which place. A kind that reaches the file by another way must be added here.
_BY_NAME = {"record_event": 0, "Note": 0, "ProcessFailure": 0}
_BY_METHOD = {
    "_event": 0,
    "_external_event": 0,
    "Note": 0,
    "ProcessFailure": 0,
    "event_of_first": 0,
    "ExternalEvent": 0,
    "MonitorFailed": 0,
}
# Kinds that are passed on: from what, by whom. Their sources are found by the names above.
_PASSED_ON = {
    "action.kind": ("control/coordinator/executor.py",),  # of a Note
    "failure.event": ("control/coordinator/coordinator.py",),  # of a ProcessFailure
    "message.kind": (
        "control/coordinator/coordinator.py",  # of an agent's `ExternalEvent`
        "control/coordinator/monitor.py",  # of a `MonitorFailed`
    ),
}


class Kinds(ast.NodeVisitor):
    """Every kind of event that one source file can write."""

    def __init__(self, path: Path) -> None:
        self.found: set[str] = set()
        self._file = str(path.relative_to(SOURCE))
        self._functions: list[ast.FunctionDef] = []
        self._tree = ast.parse(path.read_text(encoding="utf-8"))
        self.visit(self._tree)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._functions.append(node)
        self.generic_visit(node)
        self._functions.pop()

    def visit_Call(self, node: ast.Call) -> None:
        place = self._place(node.func)
        if place is not None and not any(k.arg is None for k in node.keywords):  # `end_event` has them
            named = [k.value for k in node.keywords if k.arg in ("kind", "event")]
            self._resolve(named[0] if named else node.args[place])
        self.generic_visit(node)

    def visit_Dict(self, node: ast.Dict) -> None:
        """What `end_event` gives."""
        for key, value in zip(node.keys, node.values, strict=True):
            if self._file == "record/launches.py" and isinstance(key, ast.Constant) and key.value == "kind":
                self._resolve(value)
        self.generic_visit(node)

    def _place(self, function: ast.expr) -> int | None:
        match function:
            case ast.Attribute(value=ast.Name(id="events"), attr="append"):
                return 1  # the folder comes first
            case ast.Attribute(value=ast.Name(id="events"), attr="Event"):
                return 2  # after time and generation
            case ast.Attribute(attr="event") if re.search(r"(recorder|records)\.event$", _text(function)):
                return 0
            case ast.Attribute(value=ast.Name(id="self"), attr="event"):
                return 0 if self._file == "control/coordinator/recorder.py" else None
            case ast.Attribute(attr=name):
                return _BY_METHOD.get(name)
            case ast.Name(id=name):
                return _BY_NAME.get(name)
        return None

    def _resolve(self, kind: ast.expr) -> None:
        match kind:
            case ast.Constant(value=str(text)):
                self.found.add(text)
            case ast.IfExp(test=ast.Compare(left=ast.Name(id=a), ops=[ast.In()], comparators=[many])) if (
                isinstance(kind.body, ast.Name) and kind.body.id == a
            ):
                self.found |= self._members(many)
                self._resolve(kind.orelse)
            case ast.IfExp():
                self._resolve(kind.body)
                self._resolve(kind.orelse)
            case ast.Name(id=name) if values := self._assigned(name):
                for value in values:
                    self._resolve(value)
            case ast.Name(id=name) if self._is_parameter_of_a_helper(name):
                pass  # its callers say it
            case ast.Attribute() | ast.Subscript() if self._file in _PASSED_ON.get(_text(kind), ()):
                pass
            case _:
                place = f"src/seatrial/{self._file}:{kind.lineno}"
                pytest.fail(f"{place}: an event's kind that this test cannot read: {_text(kind)}")

    def _assigned(self, name: str) -> list[ast.expr]:
        """What is assigned to a local variable of the function that we are in."""
        body = ast.walk(self._functions[-1]) if self._functions else iter(())
        assignments = [n for n in body if isinstance(n, ast.Assign)]
        return [n.value for n in assignments if any(_text(t) == name for t in n.targets)]

    def _is_parameter_of_a_helper(self, name: str) -> bool:
        if not self._functions:
            return False
        function = self._functions[-1]
        arguments = [a.arg for a in (*function.args.args, *function.args.kwonlyargs)]
        return name in arguments and function.name in {"event", *_BY_NAME, *_BY_METHOD}

    def _members(self, collection: ast.expr) -> set[str]:
        """The words of a module's constant."""
        for node in self._tree.body:
            if isinstance(node, ast.Assign) and _text(node.targets[0]) == _text(collection):
                return {n.value for n in ast.walk(node.value) if isinstance(n, ast.Constant)}
        pytest.fail(f"{self._file}: {_text(collection)} is not a constant of this file")


def _text(node: ast.AST) -> str:
    return ast.unparse(node)


def event_kinds() -> set[str]:
    """Every kind of event that the source can write: of files that use records, or call a function that does."""
    found: set[str] = set()
    for path in sorted(SOURCE.rglob("*.py")):
        if SOURCE / "check" in path.parents:  # writes no events
            assert not re.search(r"seatrial\.record\b(?!\.codec\b)", path.read_text(encoding="utf-8")), path
            continue
        found |= Kinds(path).found
    return found


def test_every_series_is_documented_as_it_is() -> None:
    text = read("docs/watch.md")
    for each in (*NODE_SERIES.values(), *RUN_SERIES.values(), *SERVED_SERIES.values()):
        labels = ", ".join(
            f"`{label}`" for label in each.labels if label != "run" or each in SERVED_SERIES.values()
        )
        assert f"| `{each.name}` | {each.kind} | {labels} | {each.help} | {each.source} |\n" in text
    every = len(NODE_SERIES) + len(RUN_SERIES) + len(SERVED_SERIES)
    assert len(re.findall(r"^\| `\w+` \| (?:gauge|counter) \|", text, re.MULTILINE)) == every


@pytest.mark.cluster  # slow
def test_every_event_kind_is_documented_and_no_other_is() -> None:
    documented = names("| kind |" + part(read("docs/run-folder.md"), "events.jsonl").partition("| kind |")[2])
    assert len(documented) == len(set(documented))
    assert set(documented) == event_kinds()


# -- the source layout


def layers() -> list[str]:
    contracts = tomllib.loads(read("pyproject.toml"))["tool"]["importlinter"]["contracts"]
    return next(c["layers"] for c in contracts if c["type"] == "layers")


def test_every_layer_is_in_the_picture_in_its_order() -> None:
    text = part(read("docs/design.md"), "2. Source layout")
    place = 0
    for layer in layers():
        for name in (n.strip() for n in layer.split("|")):
            match = re.compile(rf"^ +(?:[a-z]+ *\| *)*{name}\b", re.MULTILINE).search(text)
            assert match is not None, f"no layer {name}"
            line = text.rfind("\n", 0, match.start() + 1) + 1
            assert line >= place, f"{name} comes too early"
        place = line


def test_the_contract_is_written_out() -> None:
    assert f"    {' > '.join(layers())}\n" in read("docs/design.md")


def test_every_package_is_in_the_source_layout() -> None:
    layout = part(read("docs/design.md"), "2. Source layout")
    for package in sorted(p.parent.name for p in SOURCE.glob("*/__init__.py")):
        assert re.search(rf"^ +{package}/ ", layout, re.MULTILINE), package


def test_every_file_that_the_design_names_is_there() -> None:
    known = {str(p.relative_to(ROOT)) for p in (*SOURCE.rglob("*.*"), *(ROOT / "tests").rglob("*.py"))}
    paragraphs = read("docs/design.md").split("\n\n")
    built = "\n".join(p for p in paragraphs if not p.startswith("**Not built yet**"))
    named = set(re.findall(r"(?<![\w/.-])(?:\w+/)*\w+\.py\b", built))
    assert len(named) > 20
    missing = {name for name in named if not any(k == name or k.endswith(f"/{name}") for k in known)}
    assert not missing


def test_names_of_tests_have_at_most_60_characters() -> None:
    defined = re.compile(r"^ *def (test_\w+)", re.MULTILINE)
    names = {
        name
        for p in (ROOT / "tests").rglob("*.py")
        for name in defined.findall(p.read_text(encoding="utf-8"))
    }
    assert len(names) > 2000
    assert not {name for name in names if len(name) > 60}


def test_the_glossary_names_files_that_are_there() -> None:
    """Its questions and the new names; the old ones are not there any more."""
    text = read("docs/glossary.md")
    new = re.sub(r"^\| `[^|]*\|", "", text, flags=re.MULTILINE)
    named = set(re.findall(r"`((?:\w+/)+(?:\w+\.\w+)?)`", new))
    assert len(named) > 50
    assert not {name for name in named if not (SOURCE / name).exists()}
    questions = part(text, "Ten questions")
    assert questions.count("?") == 10
    old = set(re.findall(r"^\| `([\w/]+\.py)`", text, re.MULTILINE))
    assert len(old) > 15
    assert not {name for name in old if (SOURCE / name).exists()}


def test_every_verb_is_in_commands() -> None:
    commands = read("docs/commands.md")
    for verb in VERBS:
        assert f"`seatrial {verb}" in commands, verb


# -- the check


def test_every_option_of_the_check_is_documented() -> None:
    parser = argparse.ArgumentParser()
    check.add_arguments(parser)
    options = {o for action in parser._actions for o in action.option_strings if o.startswith("--")}
    text = read("docs/check.md")
    missing = [
        o
        for o in sorted(options - {"--help", "--plain", "--runs"})
        if f"`{o}" not in text and f" {o}" not in text
    ]
    assert missing == []


def test_every_tool_that_the_check_reads_is_documented() -> None:
    """By the words of its name, since one row speaks of several."""
    text = read("docs/check.md")
    unknown = [
        t.name for t in tools() if not all(word in text for word in t.name.split() if word != "nvidia-smi")
    ]
    assert unknown == []


# -- the suffixes of sources


def test_the_suffixes_of_sources_are_listed() -> None:
    text = part(read("docs/job-file.md"), "[data]")
    table = {
        row[0].strip(): set(re.findall(r"`(\.\w+)`", row[1]))
        for row in (line.split("|")[1:-1] for line in text.splitlines() if line.startswith("| "))
        if len(row) == 3
    }
    kinds = {kind: {s for s, k in sources._KINDS.items() if k == kind} for kind in ("jsonl", "parquet")}
    assert table["text"] == sources._TEXT_SUFFIXES
    assert (table["JSONL"], table["Parquet"]) == (kinds["jsonl"], kinds["parquet"])
    assert table["compressed"] == set(PACKINGS)
