"""Whether all GPUs of a node are present, from any output that lists them."""

from __future__ import annotations

from collections.abc import Sequence

from seatrial.check.judging.findings import Expected, Finding, Target, Verdict
from seatrial.check.judging.floors import Sku
from seatrial.check.outputs.tool import Context
from seatrial.check.ranges import listed


def count_findings(
    indices: Sequence[int], sku: Sku | None, context: Context, evidence: tuple[str, ...]
) -> list[Finding]:
    """GPU001 for a list of GPUs with these indices: judged by the plan, else by the counts known for such a board.

    A single GPU other than the first was requested alone and says nothing about the number of GPUs. A longer list that
    does not start at 0 or has gaps was either requested so or is incomplete: UNJUDGED.
    """
    if not indices or (len(indices) == 1 and indices[0] > 0):
        return []
    if list(indices) != list(range(len(indices))):
        why = (
            f"only the GPUs {listed(indices)} are in the output: only these were selected, or it is truncated"
        )
        return [Finding("GPU001", "UNJUDGED", Target(node=context.node), why, evidence=evidence)]
    count, target = len(indices), Target(node=context.node)
    if context.gpus is not None:
        expected = Expected(context.gpus, "GPUs", "job or peers")
        wrong = count != context.gpus
        what = f"{count} GPUs, {context.gpus} expected"
    elif sku is not None and sku.counts:
        expected = Expected(" or ".join(str(c) for c in sku.counts), "GPUs", sku.source)
        wrong = count not in sku.counts
        what = f"{count} GPU{'s' * (count != 1)}"
        if wrong:
            what = f"{count} {sku.name} GPUs; such a machine shows {expected.value}"
    else:
        return []
    verdict: Verdict = "FAIL" if wrong else "PASS"
    return [Finding("GPU001", verdict, target, what, count, "GPUs", expected, evidence=evidence)]
