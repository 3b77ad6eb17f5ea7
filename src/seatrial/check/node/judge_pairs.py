"""The verdict on copies between the GPUs of one node, both directions at once. Pure.

Single directions go through columns.columns() to nodes.judge_nodes(), which also determine the faulty GPU. The
reference target of NVLink is for both directions at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from seatrial.check.judging.compare import PEERS, median_of_others
from seatrial.check.judging.findings import Expected, Finding, Target, Verdict
from seatrial.check.judging.floors import Floor, find_sku, shares, targets
from seatrial.check.node.columns import gpus_of
from seatrial.check.ranges import listed
from seatrial.hardware.catalogue import find_gpu

Facts = Mapping[str, Any]

_CODE = "NOD023"
_ALGORITHM = "peer to peer copy"
_TARGETED_GB_S = 450.0  # NVLink rate of the GPUs for which the reference target is stated, one direction


def both_ways(facts: Facts | None) -> list[float]:
    """GB/s of every pair, both directions added, for judge_load.Peers."""
    rates = (facts or {}).get("rates") or {}
    return [p["both_gb_s"] for p in rates.get("pairs") or () if p.get("both_gb_s")]


def judge_pairs(facts: Facts, node: str, values: Sequence[float]) -> Iterator[Finding]:
    """One finding per node, about its slowest pair; one more if fully connected GPUs lack peer access.

    `values` are those of all nodes' pairs, sorted.
    """
    gpus = gpus_of(facts)
    pairs = [p for p in ((facts["rates"] or {}).get("pairs") or ()) if p.get("both_gb_s")]
    if not pairs:
        return
    kinds = {gpu["name"] for gpu in gpus.values() if gpu.get("name")}
    kind = kinds.pop() if len(kinds) == 1 else None
    sku = find_sku(kind)

    def target(pair: Facts) -> Target:
        far = gpus.get(pair["to"], {}).get("index")
        peer = pair["to"] if far is None else f"GPU {far}"
        return Target(node=node, gpu=gpus.get(pair["from"], {}).get("index"), pci=pair["from"], peer=peer)

    apart = [p for p in pairs if not p["peer_access"]]
    if apart and sku is not None and sku.board in ("switch", "mesh", "xgmi"):
        text = f"{len(apart)} of {len(pairs)} pairs have no peer access: {listed(target(p) for p in apart)}"
        yield Finding(_CODE, "FAIL", target(apart[0]), text, expected=Expected("peer access", "", sku.source))
    slowest = min(pairs, key=lambda p: float(p["both_gb_s"]))
    read = float(slowest["both_gb_s"])
    text = f"{read:.4g} GB/s, both directions added, the slowest of {len(pairs)} pairs"
    known = None if kind is None else find_gpu(kind)
    aim = targets()["nvlink"]
    if known is not None and known.link_gb_s == _TARGETED_GB_S:
        reached = sum(p["both_gb_s"] >= aim.value for p in pairs)
        text += f"; the reference target of {aim.value:g} {aim.unit} (no floor) is reached by {reached}"
    floor = None if sku is None else sku.floor("nvlink_copy", direction="both directions")
    usual = median_of_others(values, read) if len(values) > PEERS and read in values else None
    verdict, expected = _verdict(read, floor, usual)
    if expected is None:
        why = f"no floor is known, and fewer than {PEERS} other pairs were measured"
        expected = Expected(None, "GB/s", "", "both directions", _ALGORITHM)
        yield Finding(_CODE, "UNJUDGED", target(slowest), text, read, "GB/s", expected, why_unjudged=why)
        return
    yield Finding(_CODE, verdict, target(slowest), text, read, "GB/s", expected, usual)


def _verdict(read: float, floor: Floor | None, usual: float | None) -> tuple[Verdict, Expected | None]:
    """By the floor and by the other pairs: if all are equally slow only the floor reveals it, and vice versa."""
    if floor is not None and (verdict := floor.verdict(read)) != "PASS":
        return verdict, floor.expected()
    if usual is None:
        return "PASS", None if floor is None else floor.expected()
    share = read / usual
    verdict = "FAIL" if share < shares().broken else "WARN" if share < shares().suspect else "PASS"
    if verdict == "PASS" and floor is not None:
        return verdict, floor.expected()
    return verdict, Expected(usual, "GB/s", "median of the other pairs", "both directions", _ALGORITHM)
