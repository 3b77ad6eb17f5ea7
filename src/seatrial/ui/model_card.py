"""Provenance files of an exported Hugging Face folder: README.md and seatrial.json."""

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


def notes(provenance: dict[str, Any], model: str, *, library: str = "transformers") -> dict[str, str]:
    """File name -> content. `model`: description of the model (family, size); `library`: which loads the folder."""
    document = {"schema_version": SCHEMA_VERSION, **provenance}
    return {
        PROVENANCE: json_text(document),
        CARD: _card(provenance, model, library),
    }


def origin(folder: Path) -> str | None:
    """The origin of the weights in an exported folder, on one line; None if unknown."""
    try:
        source = read_json(folder / PROVENANCE)
    except (OSError, ValueError):
        return None
    if not isinstance(source, dict) or type(source.get("step")) is not int:
        return None
    text = f"step {source['step']} of run {source.get('run') or 'unknown'}"
    return text if source.get("newest") is not False else f"{text}, not its newest checkpoint"


def _card(source: dict[str, Any], model: str, library: str) -> str:
    run = "an unknown run" if source["run"] is None else f"the run `{source['run']}`"
    of_job = "" if source["job_steps"] is None else f" of {source['job_steps']:,}"
    lines = [
        "---",
        f"library_name: {library}",
        "tags:",
        "- seatrial",
        "---",
        f"# {source['run'] or 'Checkpoint'}, step {source['step']:,}{of_job}",
        "",
        f"{model}. Written by `seatrial export` {source['seatrial']} from {source['checkpoint']} of {run}.",
        f"Trained on {units.count(source['tokens'])} tokens.",
    ]
    if source["left_out_steps"]:
        lines += [
            "",
            f"Skipped steps, their samples not trained on: {figures.steps(source['left_out_steps'])}.",
        ]
    if source["not_taken"]:
        lines += ["", f"**{NEWEST[source['newest']]}** Not taken:", ""]
        lines += [f"- {item['checkpoint']}: {item['why']}" for item in source["not_taken"]]
    return "\n".join([*lines, "", f"`{PROVENANCE}` has the same in machine-readable form.", ""])
