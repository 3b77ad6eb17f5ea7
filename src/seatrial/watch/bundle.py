"""An archive of a run for support: its records and the ends of its logs, without secrets, data or weights.

Only files on this list are included. MANIFEST.json in the archive lists what was left out, with reasons.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import platform
import re
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from seatrial import __version__
from seatrial.base import atomic
from seatrial.base.files import flat, open_file, parse_json, parse_toml, read_text
from seatrial.record.folder import RunFolder
from seatrial.watch.redact import GONE, Redactor, is_secret_name, secrets_of

SCHEMA_VERSION = 1
_LOG_BYTES, _RECORD_BYTES, _ALL_BYTES = 256 << 10, 8 << 20, 64 << 20
_RECORDS = ("events.jsonl", "metrics.jsonl", "ledger.jsonl", "control/coordinator.log")
# Path in the run folder -> how it is read.
_WANTED: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"job\.toml|control/(?:generation|follow_up|stopped-\d+)"), "text"),
    (re.compile(r"(?:plan|interval)\.json"), "json"),
    (re.compile(r"control/(?:identity|inputs|launch|outcome|lease)\.json"), "json"),
    (re.compile(r"(?:events|metrics|ledger)\.jsonl|control/coordinator\.log"), "lines"),
    (re.compile(r"logs/\d+/node\d+/environment\.json"), "environment"),
    (re.compile(r"logs/\d+/node\d+/rank\d+\.error\.json"), "json"),
    (re.compile(r"logs/(?:\d+/node\d+/)?[\w.-]+\.(?:log|out)"), "text"),
    (re.compile(r"nodes/node\d+\.\w+\.json|ranks/\d+/rank\d+\.tcp\.json"), "json"),
    (re.compile(r"reports/[\w.-]+\.json"), "json"),
    (re.compile(r"reports/[\w.-]+\.md"), "text"),
)
# Reasons for leaving out the rest; the first match applies.
_LEFT_OUT = (
    (re.compile(r"control/secret|control/token-.*"), "a secret of the run"),
    (re.compile(r"checkpoints/.*"), "checkpoints: weights"),
    (re.compile(r"launch/.*"), "site-specific commands: may contain secrets"),
    (re.compile(r"ranks/.*"), "large, not needed for support"),
    (re.compile(r"logs/.*/flight-.*"), "pickled by torch: unsafe to load"),
    (re.compile(r".*"), "not on the list of included files"),
)
# Variables included with their value; of others only the name.
_VARIABLES = re.compile(
    r"(?:NCCL|TORCH|PYTORCH|CUDA|OMP|MKL|GLOO|UCX|FI|MASTER|SEATRIAL|TP|FSDP|HSA|ROCR|KINETO)_[A-Z0-9_]+|RANK|WORLD_SIZE|"
    r"LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|TOKENIZERS_PARALLELISM|PYTHONUNBUFFERED|PYTHONHASHSEED|LANG|LC_ALL|TZ|"
    r"SLURM_(?:JOB_ID|JOB_NUM_NODES|NTASKS|PROCID|NODEID|LOCALID|JOB_PARTITION|STEP_ID)"
)


@dataclass
class Bundle:
    """Contents of an archive, and what was left out."""

    path: Path
    files: list[dict[str, Any]] = field(default_factory=list)
    left_out: dict[str, dict[str, Any]] = field(default_factory=dict)  # reason -> files, bytes, examples
    redactions: int = 0

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "schema_version": SCHEMA_VERSION,
            "seatrial": __version__,
            "python": sys.version.split()[0],
            "system": platform.platform(),
            "time": time.time(),
            "redactions": self.redactions,
            "files": self.files,
            "left_out": [{"why": why, **what} for why, what in self.left_out.items()],
        }


def write_bundle(folder: RunFolder, out: Path, summary: str, environment: Mapping[str, str]) -> Bundle:
    """Write the archive to `out`. `summary`: the run's summary as JSON; `environment`: searched for secrets. Raises OSError."""
    redactor = Redactor(_known_secrets(folder, environment))
    bundle, memory = Bundle(out), io.BytesIO()
    room = _ALL_BYTES
    with tarfile.open(fileobj=memory, mode="w:gz", format=tarfile.PAX_FORMAT) as archive:

        def put(name: str, text: str, modified: float) -> None:
            content = text.encode("utf-8", "replace")
            entry = tarfile.TarInfo(f"{folder.path.name}/{name}")
            entry.size, entry.mtime, entry.mode = len(content), int(modified), 0o600
            archive.addfile(entry, io.BytesIO(content))

        put("summary.json", _json(summary, redactor), time.time())
        for path, name, size, modified in _in_order(folder, bundle):
            how = next((how for pattern, how in _WANTED if pattern.fullmatch(name)), None)
            if how is None:
                why = next(why for pattern, why in _LEFT_OUT if pattern.fullmatch(name))
                _leave_out(bundle, name, size, why)
                continue
            most = _RECORD_BYTES if name in _RECORDS or how == "json" else _LOG_BYTES
            if room <= 0:
                _leave_out(bundle, name, size, f"archive limit of {_ALL_BYTES >> 20} MiB reached")
                continue
            if how in ("json", "environment") and size > most:
                _leave_out(bundle, name, size, f"larger than {most >> 20} MiB")
                continue
            before = redactor.removed
            try:
                data = _end_of(path, most)
                text = _READ[how](data.decode("utf-8", "replace"), redactor)
            except OSError as error:
                _leave_out(bundle, name, size, f"could not be read: {error.strerror}")
                continue
            room -= len(text)
            put(name, text, modified)
            shown = {"path": name, "bytes": size, "redactions": redactor.removed - before}
            bundle.files.append(shown | ({"only_last_bytes": len(data)} if len(data) < size else {}))
        bundle.redactions = redactor.removed
        put("MANIFEST.json", atomic.json_text(Redactor().value(bundle.as_dict())), time.time())
    atomic.write_output(out, memory.getvalue())
    if out.is_file():
        os.chmod(out, 0o600)
    return bundle


def _known_secrets(folder: RunFolder, environment: Mapping[str, str]) -> set[str]:
    """Values of secret files, keys and variables, to be removed wherever they occur."""
    found = {value for name, value in environment.items() if is_secret_name(name)}
    with contextlib.suppress(OSError, ValueError):  # a run that never started has none
        found.add(read_text(folder.secret).strip())
    with contextlib.suppress(OSError, ValueError):  # names and formats are still recognised
        job = parse_toml(read_text(folder.job_toml))
        found |= secrets_of(job)
        named = (str(value) for key, value in flat(job).items() if key.endswith("_env"))
        found |= {environment[name] for name in named if name in environment}
    for path in folder.logs.glob("*/node*/environment.json"):
        try:
            variables = parse_json(read_text(path))["variables"]
            found |= secrets_of({str(v["name"]): v["value"] for v in variables})
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return found


def _in_order(folder: RunFolder, bundle: Bundle) -> Iterator[tuple[Path, str, int, float]]:
    """(path, name in the folder, bytes, modified) of regular files: records first, then the newest logs."""
    found = []
    for parent, folders, names in os.walk(folder.path):
        here = Path(parent)
        for name in list(folders):
            if (here / name).is_symlink():
                _leave_out(bundle, str((here / name).relative_to(folder.path)), 0, "a symbolic link")
        folders[:] = [name for name in folders if not (here / name).is_symlink()]
        for name in names:
            path = here / name
            status = os.lstat(path)
            relative = str(path.relative_to(folder.path))
            if not path.is_file() or path.is_symlink():
                _leave_out(bundle, relative, 0, "not a regular file")
                continue
            found.append((path, relative, status.st_size, status.st_mtime))
    yield from sorted(found, key=lambda f: (f[1].startswith(("logs/", "ranks/", "reports/")), -f[3], f[1]))


def _leave_out(bundle: Bundle, name: str, size: int, why: str) -> None:
    entry = bundle.left_out.setdefault(why, {"files": 0, "bytes": 0, "examples": []})
    entry["files"] += 1
    entry["bytes"] += size
    if len(entry["examples"]) < 8:
        entry["examples"].append(name)


def _end_of(path: Path, most: int) -> bytes:
    """The last `most` bytes, cut at the start of a line."""
    with open(open_file(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - most))
        data = file.read(most)
    if size > most:
        line = data.find(b"\n")
        data = data[line + 1 :] if line >= 0 else b""
    return data


def _text(text: str, redactor: Redactor) -> str:
    return redactor.text(text)


def _json(text: str, redactor: Redactor) -> str:
    try:
        value = parse_json(text)
    except ValueError:
        return redactor.text(text)
    return json.dumps(redactor.value(_without_samples(value)), indent=1) + "\n"


def _without_samples(value: Any) -> Any:
    """`value` without generated text, which may repeat training data."""
    if isinstance(value, dict):
        if value.get("kind") == "sample":
            return value | {"message": GONE, "data": None}
        return {k: GONE if k == "sample" and v else _without_samples(v) for k, v in value.items()}
    return [_without_samples(v) for v in value] if isinstance(value, list) else value


def _lines(text: str, redactor: Redactor) -> str:
    lines = []
    for line in text.splitlines():
        try:
            lines.append(
                json.dumps(redactor.value(_without_samples(parse_json(line))), separators=(",", ":"))
            )
        except ValueError:
            lines.append(redactor.text(line))
    return "\n".join(lines) + "\n"


def _environment(text: str, redactor: Redactor) -> str:
    """environment.json, with values only of listed variables."""
    try:
        value = parse_json(text)
    except ValueError:
        return GONE + "\n"  # its content cannot be checked
    variables = value.get("variables") if isinstance(value, dict) else None
    kept: dict[str, Any] = {"variables": []}
    for variable in variables if isinstance(variables, list) else []:
        if not isinstance(variable, dict) or not isinstance(variable.get("name"), str):
            continue
        if _VARIABLES.fullmatch(variable["name"]) and not is_secret_name(variable["name"]):
            kept["variables"].append(redactor.value(variable))
        else:
            redactor.removed += 1
            kept["variables"].append(
                {"name": variable["name"], "value": GONE, "source": str(variable.get("source"))}
            )
    if isinstance(value, dict):
        kept |= {key: redactor.value(value[key]) for key in ("binding", "facts") if key in value}
    return json.dumps(kept, indent=1) + "\n"


_READ: dict[str, Callable[[str, Redactor], str]] = {
    "text": _text,
    "json": _json,
    "lines": _lines,
    "environment": _environment,
}
