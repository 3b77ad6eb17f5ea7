"""Validate values against the schema: every unknown key, wrong type, missing key and bad range, as text.

Pydantic finds the problems; its messages are reworded here in the terms of the job file.
"""

from __future__ import annotations

import datetime
import difflib
import json
from collections.abc import Callable
from typing import Any, cast, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from seatrial.base.errors import Diagnostic
from seatrial.job.numbers import both, either
from seatrial.job.partial import Partial
from seatrial.job.scanner import Path
from seatrial.job.schema import JobFile
from seatrial.job.schema_base import Section
from seatrial.job.source import Source


def _section_type(annotation: Any) -> type[Section] | None:
    """The Section in a field's annotation (`Section`, `Section | None`, `Section | Literal[...]`)."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None


SECTIONS: dict[str, type[Section]] = {
    name: section
    for name, field in JobFile.model_fields.items()
    if (section := _section_type(field.annotation)) is not None
}


def list_fields() -> frozenset[Path]:
    """The keys whose values may be arrays."""
    return frozenset(
        (name, key)
        for name, section in SECTIONS.items()
        for key, field in section.model_fields.items()
        if _takes_list(field.annotation)
    )


def _takes_list(annotation: Any) -> bool:
    return get_origin(annotation) is list or any(_takes_list(part) for part in get_args(annotation))


def text_fields() -> frozenset[Path]:
    """The keys whose values are strings: an override of one of them needs no quotes."""
    return frozenset(
        {("name",), ("parallel",)}
        | {
            (name, key)
            for name, section in SECTIONS.items()
            for key, field in section.model_fields.items()
            if _takes_text(field.annotation) and not _takes_number(field.annotation)
        }
    )


def _takes_text(annotation: Any) -> bool:
    """Whether `str`, or a literal string, occurs anywhere in an annotation."""
    if annotation is str or isinstance(annotation, str):
        return True
    return any(_takes_text(part) for part in get_args(annotation))


def _takes_number(annotation: Any) -> bool:
    return annotation in (int, float) or any(_takes_number(part) for part in get_args(annotation))


def validate(source: Source) -> tuple[JobFile, list[Diagnostic]]:
    """The job file and its problems; if there are problems, it has only its readable values (Partial)."""
    problems = [_unknown(source, (key,), JobFile) for key in source.values if key not in JobFile.model_fields]
    readable: dict[str, Any] = {}
    for name, field in JobFile.model_fields.items():
        section = SECTIONS.get(name)
        raw = source.values.get(name)
        if raw is None:
            if not field.is_required():
                readable[name] = field.get_default()
            elif section is None:
                problems.append(
                    Diagnostic(
                        f"`{name}` is missing",
                        source.file,
                        hint=f'write it above the first section: {name} = "my-run"',
                    )
                )
            else:
                problems.append(_missing_section(source, name, section))
        elif section is None:
            found = _field_problems(source, name)
            problems += found
            if not found:
                readable[name] = raw
        elif name == "parallel" and raw == "auto":
            readable[name] = raw
        elif not isinstance(raw, dict):
            problems.append(
                source.value_place((name,)).diagnostic(
                    f"{name}: expected a section, found {_describe(raw)}",
                    f"write [{name}] and its keys below it"
                    + (', or parallel = "auto"' if name == "parallel" else ""),
                )
            )
        else:
            readable[name] = _read_section(source, name, section, raw, problems)
    if problems:
        return cast(JobFile, Partial(readable)), problems
    return JobFile.model_validate(source.values), []


def _read_section(
    source: Source, name: str, section: type[Section], raw: dict[str, Any], problems: list[Diagnostic]
) -> Any:
    read, details = _read(section, raw)
    problems += [_translate(source, (name, *d["loc"]), d) for d in details]
    return read


def _read(section: type[Section], raw: Any) -> tuple[Any, list[ErrorDetails]]:
    """The section, or what of it is readable, and what is wrong with it."""
    try:
        return section.model_validate(raw), []
    except ValidationError as error:
        details = error.errors(include_url=False)
    bad = {d["loc"][0] for d in details if d["loc"]}
    readable: dict[str, Any] = {}
    for key, field in section.model_fields.items() if isinstance(raw, dict) else ():
        inner = _section_type(field.annotation)
        if inner is not None and _takes_list(field.annotation) and isinstance(raw.get(key), list):
            readable[key] = [_read(inner, item)[0] for item in raw[key]]
        elif key in bad:
            continue
        elif key not in raw:
            readable[key] = field.get_default()
        else:
            readable[key] = raw[key] if inner is None else inner.model_validate(raw[key])
    return Partial(readable), details


def _field_problems(source: Source, name: str) -> list[Diagnostic]:
    """Problems of a key outside the sections."""
    try:
        JobFile.model_validate({name: source.values[name]})
    except ValidationError as error:
        details = [
            d for d in error.errors(include_url=False) if d["loc"][0] == name and d["type"] != "missing"
        ]
        return [_translate(source, (name,), d) for d in details]
    return []


def _missing_section(source: Source, name: str, section: type[Section]) -> Diagnostic:
    if name == "model":
        hint = 'name a built-in model: preset = "qwen2.5-7b"; or hf = "path/to/config.json"'
    else:
        needed = [f"`{key}`" for key, field in section.model_fields.items() if field.is_required()]
        hint = f"it needs {both(needed)}"
    return Diagnostic(f"the section [{name}] is missing", source.file, hint=hint)


def _translate(source: Source, path: Path, error: ErrorDetails) -> Diagnostic:
    """One pydantic error as text, at its location."""
    kind = error["type"]
    path = _without_tags(path)
    if kind == "extra_forbidden":
        model: type[Section] | None = SECTIONS[str(path[0])]
        for part in path[1:-1]:
            if not isinstance(part, int):
                model = _section_type(model.model_fields[part].annotation) if model else None
        return _unknown(source, path, model or JobFile)
    if kind == "missing":
        return source.key_place(path[:-1]).diagnostic(
            f"{_header(path[:-1])} is missing the key `{path[-1]}`",
            f"add it below the section's header: {path[-1]} = {_EXAMPLES.get(_keys(path), '...')}",
        )
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    message, hint = _words(name.removeprefix("."), kind, error)
    return source.value_place(path).diagnostic(message, hint)


def _keys(path: Path) -> str:
    """`path` with dots, without indexes."""
    return ".".join(part for part in path if isinstance(part, str))


def _header(path: Path) -> str:
    """The header of the section at `path`, or of a list's."""
    return f"[[{_keys(path)}]]" if isinstance(path[-1], int) else f"[{_keys(path)}]"


def _without_tags(path: Path) -> Path:
    """`path` without the names that pydantic gives the alternatives of a value: only keys and indexes remain."""
    field = SECTIONS[str(path[0])].model_fields.get(str(path[1])) if len(path) > 2 else None
    if field is None or _section_type(field.annotation) is not None:
        return path
    return (*path[:2], *(part for part in path[2:] if isinstance(part, int)))


_EXPECTED = {
    "int_type": "an integer",
    "float_type": "a number",
    "string_type": "a string",
    "bool_type": "true or false",
    "list_type": "an array",
    "model_type": "a table",
    "model_attributes_type": "a table",
}
# What a key with literal names accepts besides them.
_OR_ELSE = {"checkpoint.every_steps": ("a number of steps",), "resilience.snapshot_copies": ("0", "1", "2")}
_LIMITS: dict[str, tuple[str, Callable[[dict[str, Any]], Any]]] = {
    "greater_than": ("must be greater than", lambda c: c["gt"]),
    "greater_than_equal": ("must be at least", lambda c: c["ge"]),
    "less_than": ("must be less than", lambda c: c["lt"]),
    "less_than_equal": ("must be at most", lambda c: c["le"]),
}
_EXAMPLES = {
    "train.steps": "1000",
    "train.sequence_length": "4096",
    "train.global_batch": "256",
    "train.batch_ramp.steps": "1000",
    "train.batch_ramp.global_batch": "64",
    "optimizer.lr": "3e-4",
    "checkpoint.every_steps": "500",
    "optimizer.groups.match": '"*norm.weight"',
    "data.train": '"builtin:python-library"',
}


def _words(name: str, kind: str, error: ErrorDetails) -> tuple[str, str | None]:
    value = error["input"]
    context = error.get("ctx", {})
    if huge := _huge(value):
        return f"{name}: {huge}", "TOML integers have 64 bits"
    if kind in _EXPECTED:
        hint = (
            f"write [[{name}]] above each"
            if name in ("optimizer.groups", "train.batch_ramp")
            else _type_hint(kind, value)
        )
        return f"{name}: expected {_EXPECTED[kind]}, found {_describe(value)}", hint
    if kind == "literal_error":
        options = [o.strip().strip("'") for o in context["expected"].replace(" or ", ", ").split(", ")]
        close = difflib.get_close_matches(str(value), options, n=1)
        accepted = either([*_OR_ELSE.get(name, ()), *(f'"{o}"' for o in options)])
        if name in _OR_ELSE and str(value).isdecimal():
            return f"{name}: expected {accepted}, found {_describe(value)}", f"remove the quotes: {value}"
        return f"{name}: expected {accepted}, found {_describe(value)}", (
            f'did you mean "{close[0]}"?' if close else None
        )
    if kind == "registry_error":
        return f"{name}: {context['message']}", context["hint"]
    if kind in _LIMITS:
        words, limit = _LIMITS[kind]
        return f"{name} {words} {_limit(limit(context))}, not {value}", None
    if kind in ("string_too_short", "too_short"):
        return f"{name} is empty", "give it a value, or remove the key"
    if kind == "finite_number":
        return f"{name}: expected a finite number, found {value}", None
    if kind == "string_pattern_mismatch":
        return (
            f'{name}: "{value}" is not a valid name for a run folder',
            "use a letter or digit first, then letters, digits, `.`, `_` or `-`, at most 100 characters",
        )
    return f"{name}: {error['msg'][0].lower()}{error['msg'][1:]}", None


def _type_hint(kind: str, value: Any) -> str | None:
    number = {"int_type": int, "float_type": float}.get(kind)
    if number is not None and isinstance(value, str):
        try:
            return (
                f"remove the quotes: {number(value):g}"
                if number is float
                else f"remove the quotes: {int(value)}"
            )
        except ValueError:
            return None
    if kind == "int_type" and isinstance(value, float) and value.is_integer():
        return f"write {int(value)}"
    if kind == "bool_type" and isinstance(value, str) and value.lower() in ("true", "false"):
        return f"remove the quotes: {value.lower()}"
    if kind == "list_type" and isinstance(value, int | float | str) and not isinstance(value, bool):
        return f"put it in brackets: [{json.dumps(value)}]"
    if kind == "string_type" and not isinstance(value, list | dict):
        return f'put it in quotes: "{value}"'
    return None


def _describe(value: Any) -> str:
    """A TOML value, for people."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'the string "{value if len(value) <= 60 else value[:57] + "..."}"'
    if isinstance(value, int):
        return _huge(value) or f"the integer {value}"
    if isinstance(value, float):
        return f"the number {value}"
    if isinstance(value, list):
        return "an array"
    if isinstance(value, datetime.date | datetime.time):
        return "a date or time"
    return "a table"


def _huge(value: Any) -> str | None:
    """A value too large for Python to print."""
    bits = value.bit_length() if isinstance(value, int) else 0
    return f"an integer of about {bits * 3 // 10:,} digits" if bits > 128 else None


def _limit(value: float) -> str:
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:g}"


def _unknown(source: Source, path: Path, model: type[Section]) -> Diagnostic:
    """A problem about an unknown key, with similar keys here or in another section."""
    key, section = str(path[-1]), _keys(path[:-1])
    names = list(model.model_fields)
    homes = [f"[{s}]" for s, m in SECTIONS.items() if key in m.model_fields and s != section]
    close = difflib.get_close_matches(key, names, n=1)
    hints = []
    if close:
        meant = f"[{close[0]}]" if not section and close[0] in SECTIONS else f"`{close[0]}`"
        hints.append(f"did you mean {meant}?")
    if homes:
        hints.append(f"`{key}` is a key of {either(homes)}")
    if not hints:
        far = [
            (k, s)
            for s, m in SECTIONS.items()
            for k in difflib.get_close_matches(key, m.model_fields, n=1, cutoff=0.8)
        ]
        if far:
            hints.append(f"did you mean `{far[0][0]}`, a key of [{far[0][1]}]?")
        elif not names:
            hints.append(f"[{section}] has no keys in this version: remove them")
        else:
            hints.append(f"known keys: {', '.join(names)}")
    if section:
        message = f"unknown key `{key}` in {_header(path[:-1])}"
    elif isinstance(source.values.get(key), dict):
        message = f"unknown section [{key}]"
    else:
        message = f"unknown key `{key}` outside the sections"
    return source.key_place(path).diagnostic(message, "; ".join(hints))
