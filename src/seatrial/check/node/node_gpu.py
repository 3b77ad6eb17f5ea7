"""The GPUs of this node: by NVML, by nvidia-smi if NVML is unusable, and what only nvidia-smi prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from seatrial.base.files import parse_json
from seatrial.base.process import python
from seatrial.check.node.run_tool import Order, Result, run_tools

# Without persistence mode the driver initialises every GPU first, which takes seconds.
SLOWEST_S = 25.0
# Outputs that have a reader and that NVML cannot fully replace.
_TEXTS = {
    "nvidia-smi nvlink -s": ("nvlink", "-s"),
    "nvidia-smi nvlink -e": ("nvlink", "-e"),
    "nvidia-smi topo -m": ("topo", "-m"),
}
_QUERY = "nvidia-smi -q -x"
LINK_ERRORS = "nvidia-smi nvlink -e"


def read_gpus(limit_s: float) -> tuple[dict[str, Any], list[Result]]:
    """NVML's facts (see probe_nvml.read(); "problem" is the reason if there are none), and the tools' outputs.

    Each call has `limit_s`. All run at once; `nvidia-smi -q -x` replaces NVML only if NVML failed without hanging.
    """
    nvml, *texts = run_tools(
        [_nvml(limit_s), *(_smi(name, words, limit_s) for name, words in _TEXTS.items())]
    )
    facts = _document(nvml)
    if facts["problem"] is not None and facts["ended"] not in ("hung", "stuck"):
        texts = [*run_tools([_smi(_QUERY, ("-q", "-x"), limit_s)]), *texts]
    return facts, texts


def read_after(limit_s: float) -> tuple[dict[str, Any], Result]:
    """Facts that are read again after the load: memory errors, lost cards, link errors."""
    nvml, links = run_tools([_nvml(limit_s), _smi(LINK_ERRORS, _TEXTS[LINK_ERRORS], limit_s)])
    return _document(nvml), links


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
        return {"problem": "NVML: the probe's output cannot be read", "ended": "failed"}
    return found | {"ended": "ok"}


def states_of(facts: Mapping[str, Any]) -> dict[str, Any] | None:
    """NVML's facts as fields of GpuStates, for JSON; None if there are none."""
    if facts.get("problem") is not None or not facts.get("gpus"):
        return None
    cannot = "Unable to determine the device handle for GPU"  # nvidia-smi's words
    gpus = facts["gpus"]
    return {
        "gpus": [gpu["state"] for gpu in gpus if "lost" not in gpu],
        "lost": [(None, f"{cannot}{gpu['index']}: {gpu['lost']}") for gpu in gpus if "lost" in gpu],
        "attached": len(gpus),
        "driver": facts.get("driver"),
        "printed": False,
    }
