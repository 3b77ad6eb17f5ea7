"""The GPUs of this node: NVML first, nvidia-smi where NVML cannot be used, and what only nvidia-smi prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from seatrial.base.files import parse_json
from seatrial.base.process import python
from seatrial.check.node.run_tool import Order, Result, run_tools

# Without persistence mode the driver initialises every GPU first, which takes seconds.
SLOWEST_S = 25.0
# What the readers of outputs know and NVML has no whole answer for.
_TEXTS = {
    "nvidia-smi nvlink -s": ("nvlink", "-s"),
    "nvidia-smi nvlink -e": ("nvlink", "-e"),
    "nvidia-smi topo -m": ("topo", "-m"),
}
_QUERY = "nvidia-smi -q -x"
LINK_ERRORS = "nvidia-smi nvlink -e"


def read_gpus(limit_s: float) -> tuple[dict[str, Any], list[Result]]:
    """NVML's facts (see probe_nvml.read(); "problem" says why there are none), and what the tools have printed.

    Each call has `limit_s`. All run at once, and nvidia-smi is asked for what NVML refuses only if the driver answers.
    """
    nvml, *texts = run_tools(
        [_nvml(limit_s), *(_smi(name, words, limit_s) for name, words in _TEXTS.items())]
    )
    facts = _document(nvml)
    if facts["problem"] is not None and facts["ended"] not in ("hung", "stuck"):
        texts = [*run_tools([_smi(_QUERY, ("-q", "-x"), limit_s)]), *texts]
    return facts, texts


def read_after(limit_s: float) -> tuple[dict[str, Any], Result]:
    """What is read again after the load: errors of memory, cards that are gone, errors of links."""
    nvml, links = run_tools([_nvml(limit_s), _smi(LINK_ERRORS, _TEXTS[LINK_ERRORS], limit_s)])
    return _document(nvml), links


def dcgm_order(level: int, limit_s: float) -> Order:
    """`dcgmi diag -r LEVEL -j`."""
    return Order("dcgmi diag -j", ("dcgmi", "diag", "-r", str(level), "-j"), limit_s)


def _smi(name: str, arguments: Sequence[str], limit_s: float) -> Order:
    return Order(name, ("nvidia-smi", *arguments), limit_s)


def _nvml(limit_s: float) -> Order:
    return Order("NVML", python("seatrial.check.node.probe_nvml"), limit_s)


def _document(result: Result) -> dict[str, Any]:
    if not result.ok:
        return {"problem": result.why, "ended": result.ended}
    try:
        found: dict[str, Any] = parse_json(result.out)
    except ValueError:
        return {"problem": "NVML: the probe's answer cannot be read", "ended": "failed"}
    return found | {"ended": "ok"}


def query_text(facts: Mapping[str, Any]) -> str | None:
    """NVML's facts as `nvidia-smi -q` prints them, so that one judge is for both; None where there are none."""
    if facts.get("problem") is not None or not facts.get("gpus"):
        return None
    lines = [
        "==============NVSMI LOG==============",
        "",
        f"Driver Version : {facts.get('driver') or 'N/A'}",
        f"Attached GPUs : {len(facts['gpus'])}",
    ]
    for gpu in facts["gpus"]:
        if "lost" in gpu:
            lines.append(f"Unable to determine the device handle for GPU{gpu['index']}: {gpu['lost']}")
        else:
            lines.append(f"GPU {gpu['bus_id']}")
            _indent(gpu["query"], 1, lines)
    return "\n".join(lines) + "\n"


def _indent(values: Mapping[str, Any], depth: int, lines: list[str]) -> None:
    for name, value in values.items():
        if isinstance(value, Mapping):
            lines.append("    " * depth + name)
            _indent(value, depth + 1, lines)
        else:
            lines.append("    " * depth + f"{name} : {value}")
