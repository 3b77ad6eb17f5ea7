"""Job files that ship with Seatrial (presets/NAME.toml), written for people to start from."""

from __future__ import annotations

import difflib
import re
from importlib import resources

from seatrial.base.errors import InputError

# Placeholders in the paths of a preset.
PLACEHOLDER = re.compile(r"<[^<>/]+>")


def presets() -> list[str]:
    """The names, in order of size."""
    return ["first-voyage", "qwen2.5-7b-h200", "llama3-8b-h100", "qwen2.5-72b-b300"]


def preset_text(name: str) -> str:
    """The job file of a preset; InputError for an unknown name."""
    names = presets()
    if name not in names:
        close = difflib.get_close_matches(name.lower(), names, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise InputError(f'no preset "{name}"', hint=f"{hint}known: {', '.join(names)}")
    return (resources.files("seatrial.job") / "presets" / f"{name}.toml").read_text(encoding="utf-8")


def preset_summary(name: str) -> str:
    """One line about a preset: the first comment line of its file that is not an editor directive."""
    lines = preset_text(name).splitlines()
    return next(line for line in lines if line.startswith("# ")).removeprefix("# ")


def is_complete(text: str) -> bool:
    """Whether a job file has no placeholders left."""
    return not any(PLACEHOLDER.search(line.partition("#")[0]) for line in text.splitlines())
