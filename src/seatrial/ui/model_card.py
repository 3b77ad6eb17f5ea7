"""The origin of an exported Hugging Face folder: README.md for people, seatrial.json for programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from seatrial.base import units
from seatrial.base.atomic import json_text
from seatrial.base.files import read_json
from seatrial.ui import figures

SCHEMA_VERSION = 1
PROVENANCE = "seatrial.json"
CARD = "README.md"
NEWEST = {
    True: "This is the newest checkpoint of its run.",
    False: "This is not the newest checkpoint of its run.",
    None: "Whether this is the newest checkpoint of its run is unknown.",
}


def notes(provenance: dict[str, Any], model: str) -> dict[str, str]:
    """File name -> content. `model`: family, size and the like, for people."""
    document = {"schema_version": SCHEMA_VERSION, **provenance}
    return {
        PROVENANCE: json_text(document),
        CARD: _card(provenance, model),
    }


def origin(folder: Path) -> str | None:
    """The origin of the weights in an exported folder, on one line; None if unknown."""
    try:
        told = read_json(folder / PROVENANCE)
    except (OSError, ValueError):
        return None
    if not isinstance(told, dict) or type(told.get("step")) is not int:
        return None
    text = f"step {told['step']} of run {told.get('run') or 'unknown'}"
    return text if told.get("newest") is not False else f"{text}, not its newest checkpoint"


def _card(told: dict[str, Any], model: str) -> str:
    run = "an unknown run" if told["run"] is None else f"the run `{told['run']}`"
    of_job = "" if told["job_steps"] is None else f" of {told['job_steps']:,}"
    lines = [
        "---",
        "library_name: transformers",
        "tags:",
        "- seatrial",
        "---",
        f"# {told['run'] or 'Checkpoint'}, step {told['step']:,}{of_job}",
        "",
        f"{model}. Written by `seatrial export` {told['seatrial']} from {told['checkpoint']} of {run}.",
        f"Trained on {units.count(told['tokens'])} tokens.",
    ]
    if told["left_out_steps"]:
        lines += [
            "",
            f"Skipped steps, their samples not trained on: {figures.steps(told['left_out_steps'])}.",
        ]
    if told["not_taken"]:
        lines += ["", f"**{NEWEST[told['newest']]}** Not taken:", ""]
        lines += [f"- {item['checkpoint']}: {item['why']}" for item in told["not_taken"]]
    return "\n".join([*lines, "", f"`{PROVENANCE}` has the same in machine-readable form.", ""])
