"""Plain data as YAML that is readable in review: block style, strings quoted wherever YAML could misread them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

# Letters first, and none of YAML's names for booleans and null: read as text by YAML 1.1 and 1.2 alike.
_PLAIN = re.compile(r"(?!(?:true|false|yes|no|on|off|null|y|n)$)[A-Za-z/][A-Za-z0-9_./-]*", re.IGNORECASE)


def to_yaml(document: dict[str, Any]) -> str:
    """One document of dicts, lists, strings, integers and booleans. Empty dicts and lists are written as {} and []."""
    return "\n".join(_block(document)) + "\n"


def _block(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if isinstance(inner, dict | list) and inner:
                yield f"{_scalar(key)}:"
                yield from (f"  {line}" for line in _block(inner))
            else:
                yield f"{_scalar(key)}: {_scalar(inner)}"
    else:
        for item in value:
            lines = list(_block(item)) if isinstance(item, dict | list) and item else [_scalar(item)]
            yield f"- {lines[0]}"
            yield from (f"  {line}" for line in lines[1:])


def _scalar(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value):
        return value
    # JSON is valid YAML, except for characters that YAML requires to be escaped.
    return re.sub(
        r"[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]",
        lambda found: f"\\u{ord(found[0]):04x}",
        json.dumps(value, ensure_ascii=False),
    )
