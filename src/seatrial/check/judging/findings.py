"""The results of a check: a finding, its target, what was expected, and the codes that `seatrial explain` knows."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, Literal

Verdict = Literal["PASS", "WARN", "FAIL", "UNJUDGED"]
Direction = Literal["one direction", "both directions", ""]

# Worst first. UNJUDGED is worse than PASS: what was not judged does not count as fit.
ORDER: tuple[Verdict, ...] = ("FAIL", "WARN", "UNJUDGED", "PASS")


@dataclass(frozen=True)
class Target:
    """What a finding is about. Fields that are unknown or do not apply are None; all None means the whole input."""

    node: str | None = None
    gpu: int | None = None  # index as the driver reports it
    pci: str | None = None  # "0000:3b:00", as hardware.xid.address() writes it
    link: int | None = None  # NVLink, as numbered on the GPU (or on the switch, where `pci` is a switch's)
    port: str | None = None  # of an RDMA device: "mlx5_0/1"
    peer: str | None = None  # the other node of a pair, or the other end of a link

    def __str__(self) -> str:
        """The target as text: "node7 GPU 3 NVLink 5", "node7 mlx5_0/1 to node9"."""
        words = [] if self.node is None else [self.node]
        if self.gpu is not None:
            words.append(f"GPU {self.gpu}")
        if self.pci is not None:
            words.append(self.pci if self.gpu is None else f"({self.pci})")
        if self.link is not None:
            words.append(f"NVLink {self.link}")
        if self.port is not None:
            words.append(self.port)
        if self.peer is not None:
            words.append(f"to {self.peer}")
        return " ".join(words) or "-"


@dataclass(frozen=True)
class Expected:
    """What should have been measured, in `unit`, and the source of that value.

    `direction`, `algorithm` and `size_bytes` state what a bandwidth means; they are empty if the value is not one.
    """

    value: float | str | None
    unit: str = ""
    source: str = ""
    direction: Direction = ""
    algorithm: str = ""  # "ring", "NVLS", "peer to peer copy", "ib_write_bw", ...
    size_bytes: int | None = None


@dataclass(frozen=True)
class Finding:
    """One verdict about one thing.

    `code` is in codes*.toml. `why_unjudged` is set only for UNJUDGED, by default to the message. `action` defaults to
    the action of the code (nothing for PASS). `evidence` holds "FILE:LINE" or the command that was run.
    """

    code: str
    verdict: Verdict
    target: Target
    message: str
    measured: float | str | None = None
    unit: str = ""
    expected: Expected | None = None
    peers_median: float | None = None  # in `unit`; None where there are no peers
    why_unjudged: str = ""
    action: str = field(default="")
    evidence: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        code = codes().get(self.code)
        assert code is not None, f"no such code: {self.code}"
        if self.verdict == "UNJUDGED" and not self.why_unjudged:
            object.__setattr__(self, "why_unjudged", self.message)
        assert (self.verdict == "UNJUDGED") == bool(self.why_unjudged), "why_unjudged goes with UNJUDGED"
        if not self.action and self.verdict != "PASS":
            text = code.unjudged if self.verdict == "UNJUDGED" else ""
            object.__setattr__(self, "action", text or code.action)

    @property
    def deviation(self) -> float | None:
        """Relative difference of `measured` from the peers' median (-0.2: a fifth below); None if unknown."""
        if self.peers_median is None or not self.peers_median or not isinstance(self.measured, int | float):
            return None
        return self.measured / self.peers_median - 1


def worst(findings: Iterable[Finding]) -> Verdict:
    """The worst verdict: FAIL before WARN before UNJUDGED before PASS. No findings at all is UNJUDGED."""
    seen = {f.verdict for f in findings}
    return next((v for v in ORDER if v in seen), "UNJUDGED")


@dataclass(frozen=True)
class Code:
    """One code: what it means and what to do about it."""

    code: str
    title: str
    meaning: str
    action: str
    source: str
    unjudged: str = ""  # what to do if it could not be judged; default: `action`


@cache
def codes() -> dict[str, Code]:
    """Every code, from all codes*.toml in this folder: each area has its own file."""
    found: dict[str, Code] = {}
    folder = files("seatrial.check.judging")
    for entry in sorted((e for e in folder.iterdir()), key=lambda e: e.name):
        if not (entry.name.startswith("codes") and entry.name.endswith(".toml")):
            continue
        table: dict[str, dict[str, Any]] = tomllib.loads(entry.read_text(encoding="utf-8"))
        for code, fields in table.items():
            assert code not in found, f"{code} is in two files"
            found[code] = Code(code=code, **fields)
    return found


def explain(code: str) -> Code | None:
    """The code named `code` ("NET004", in any case); None if there is no such code."""
    return codes().get(code.strip().upper())
