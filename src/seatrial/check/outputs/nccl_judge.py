"""Whether a collective was correct, fast enough at its largest message, and used the links it should have used."""

from __future__ import annotations

from collections import Counter

from seatrial.check.judging.findings import Expected, Finding, Target
from seatrial.check.judging.floors import Floor, find_sku, highest, judge_share, shares
from seatrial.check.outputs.finding_collector import FindingCollector
from seatrial.check.outputs.nccl_log import BEGINS, NcclLog, Row, is_debug, is_table, parse
from seatrial.check.outputs.tool import Context, Tool
from seatrial.check.ranges import listed

_MIB, _GIB = 1 << 20, 1 << 30
# Message sizes near the plateau of the bus bandwidth: at 256 MiB B200s reach 77 % of it, at 1 GiB 86 %, H100s 95 %
# (reference data of stas00/ml-engineering@744d01e network/README.md, and public runs).
_LEAST = 256 * _MIB
_PLATEAU = _GIB
# By the definition of busbw (nccl-tests, doc/PERFORMANCE.md) these reach the busbw of an all_reduce in a ring. Eight
# healthy A100s: all_gather 230, reduce_scatter 232, broadcast 235, reduce 229 (microsoft/superbenchmark, tests/data);
# eight healthy H100s: all_gather 366, reduce_scatter 365 (xxrjun/nccl-tests-cluster).
_ONLY_RING = ("all_gather_perf", "reduce_scatter_perf", "broadcast_perf", "reduce_perf")
_RING = (None, "all_reduce_perf", *_ONLY_RING)
# Between pairs of GPUs: a healthy H100 reaches 367 and 348. Reaching a ring's floor is good, missing it proves nothing.
_LIKE_RING = ("sendrecv_perf", "alltoall_perf")
_SAME_RATIO = 0.03  # both are printed with two decimals
_STEADY = 64 * _MIB  # from this size on the bandwidth must not drop again


def judge(log: NcclLog, context: Context) -> list[Finding]:
    """Findings on correctness, bandwidth and topology of every run. The average over message sizes is never used."""
    return [f for run in (log, *log.later) for f in _run(run, context)]


def _run(log: NcclLog, context: Context) -> list[Finding]:
    add = FindingCollector(log.file, context, "NCC002")
    _topology(log, add)
    for line, text in log.warnings[:3]:
        add("WARN", f"NCCL WARN {text}", line, code="NCC005")
    if log.table:
        _right(log, add)
        _bandwidth(log, add)
    elif not add.found:
        hosts, why = f"{len(log.hosts)} host{'s' * (len(log.hosts) != 1)}", ""
        if not log.channels:
            why = "no line about channels: NCCL_DEBUG=INFO, and the whole start-up, are needed"
        elif len(log.channels) < log.most_ranks:
            why = f"lines about channels of {len(log.channels)} of {log.most_ranks} ranks: those of all are needed"
        if why:
            add("UNJUDGED", f"{hosts}, {why}", code="NCC004", why=why)
        else:
            channels = listed(sorted({c for c, _ in log.channels.values()}))
            add("PASS", f"{hosts}, {len(log.channels)} GPUs with {channels} channels", code="NCC004")
    return add.found


def _right(log: NcclLog, add: FindingCollector) -> None:
    code = "NCC001"
    if wrong := [r for r in log.rows if r.wrong]:
        text = f"wrong results at {len(wrong)} message sizes, first at {wrong[0].size} bytes"
        lines, none = (r.line for r in wrong), Expected(0, "values", "nccl-tests")
        add("FAIL", text, *lines, code=code, measured=wrong[0].wrong, expected=none)
    failures = list(log.failures)
    if log.out_of_bounds is not None and (log.out_of_bounds[1] or not log.out_of_bounds[2]):
        failures.append((log.out_of_bounds[0], f"{log.out_of_bounds[1]} values out of bounds"))
    if log.average is not None and log.average[2]:
        text = "the run reports FAILED for its average bandwidth, against a limit set by its user"
        failures.append((log.average[0], text))
    for line, text in sorted(failures)[:3]:
        add("FAIL", text, line, code=code)
    last, meant = (log.rows[-1].size if log.rows else 0), log.last_size()
    if not log.rows:
        why = "the table has no readable row"
    elif log.average is None or log.out_of_bounds is None:
        why = "the end of the run is missing: it was stopped, or the output is truncated"
    elif meant is not None and last < meant:
        why = f"the run should go up to {meant} bytes but ends at {last}"
    else:
        why = _lost_ranks(log)
    if not why and not wrong and not failures and all(r.wrong is None for r in log.rows):
        why = "the results were not checked (-c 0)"
    if why:
        add("UNJUDGED", why, code=code)
    elif not wrong and not failures:
        alone = "; one rank: no link was used, so bandwidth cannot be judged" if _ranks(log) == 1 else ""
        add("PASS", f"correct at all {len(log.rows)} message sizes{alone}", code=code)


def _ranks(log: NcclLog) -> int | None:
    """The number of ranks: as listed, else from the busbw/algbw ratio of all_reduce; None if unknown."""
    if log.ranks:
        return None if _lost_ranks(log) else len(log.ranks)
    ratio = _ratio(log)
    # Only the list can show a single rank: zero bandwidth is possible with several ranks too.
    ranks = None if ratio is None or ratio >= 1.999 else round(2 / (2 - ratio))
    return ranks if ranks != 1 and log.test in (None, "all_reduce_perf") else None


def _ratio(log: NcclLog) -> float | None:
    """busbw / algbw at the largest message; 2 (n - 1) / n for all_reduce, n ranks (nccl-tests, doc/PERFORMANCE.md)."""
    row = max(log.rows, key=lambda r: r.size, default=None)
    return None if row is None or row.algbw <= 0 else row.busbw / row.algbw


def _lost_ranks(log: NcclLog) -> str:
    """Why the list of ranks is incomplete, such as a header that is cut off; empty if there is no sign of it."""
    numbers, ratio = sorted(r.rank for r in log.ranks), _ratio(log)
    if numbers != list(range(len(numbers))):
        return f"only the ranks {listed(numbers)} are listed: the header of the run is incomplete"
    if len(numbers) % log.ranks_per_process:
        return f"{len(numbers)} ranks are listed of processes with {log.ranks_per_process} each: the list is incomplete"
    if not numbers or ratio is None or _test(log) != "all_reduce_perf":
        return ""
    if abs(ratio - 2 * (len(numbers) - 1) / len(numbers)) > _SAME_RATIO:
        return f"{len(numbers)} ranks are listed, and busbw is {ratio:.3g} times algbw, which corresponds to another number"
    return ""


def _test(log: NcclLog) -> str | None:
    """The test's name; if not printed, as by older versions, from busbw / algbw (nccl-tests, doc/PERFORMANCE.md).

    Only all_reduce is certain: the others share their ratios, and some print "sum" without summing. None if unknown.
    """
    ratio, ranks = _ratio(log), len(log.ranks)
    if log.test is not None or ratio is None:
        return log.test
    if ratio > 1 + _SAME_RATIO or (ranks > 1 and abs(ratio - 2 * (ranks - 1) / ranks) < _SAME_RATIO):
        return "all_reduce_perf"
    return "sendrecv_perf" if abs(ratio - 1) < _SAME_RATIO else "alltoall_perf"


def _bandwidth(log: NcclLog, add: FindingCollector) -> None:
    if not log.rows or _ranks(log) == 1:
        return
    row = max(log.rows, key=lambda r: r.size)
    best = max((r.busbw for r in log.rows if r.size >= _STEADY), default=0.0)
    if row.busbw < shares().broken * best:
        text = f"{row.busbw} GB/s busbw at {row.size} bytes, {best} at a smaller message"
        expected = Expected(best, "GB/s", "the same run", "one direction", "busbw", row.size)
        add("WARN", text, row.line, code="NCC003", measured=row.busbw, expected=expected)
    if row.busbw == 0 and row.size >= _LEAST and (_ranks(log) or 0) > 1:
        text = f"0 GB/s busbw at {row.size} bytes between {_ranks(log)} ranks"
        add("FAIL", text, row.line, measured=row.busbw, unit="GB/s")
        return
    why, test = "", _test(log)
    floor, guess = _floor(log, add.context)
    if test not in _RING and (test not in _LIKE_RING or len(_hosts(log)) > 1):
        why = f"no floor is known for {log.test or 'this test'}"
    elif row.size < _LEAST:
        why = f"the largest message is {row.size} bytes: below {_LEAST} it is bound by latency, not bandwidth"
    elif floor is None:
        why = "no floor is known for these GPUs"
    elif floor.verdict(row.busbw) != "PASS" and test in _LIKE_RING:
        why = f"{floor.value} is what a ring reaches on these GPUs, and no floor is known for {log.test or 'this test'}"
    elif floor.verdict(row.busbw) != "PASS":
        _low(log, row, floor, guess, add)
        return
    elif not guess and test in (None, "all_reduce_perf"):
        why = _maybe_nvls(log, row, floor, add.context)
    if why or floor is None:
        text = f"{row.busbw} GB/s busbw; {why}"
        add("UNJUDGED", text, row.line, measured=row.busbw, unit="GB/s", why=why)
        return
    of = "the highest floor of all known GPUs" if guess else "healthy GPUs of this kind"
    text = f"{row.busbw} GB/s busbw at {row.size} bytes; {of} ({floor.algorithm}, one node): {floor.value}"
    add("PASS", text, row.line, measured=row.busbw, unit="GB/s", expected=floor.expected())


def _floor(log: NcclLog, context: Context) -> tuple[Floor | None, bool]:
    """The floor of these GPUs with the algorithm that NCCL used; the highest of all GPUs, and True, if unnamed."""
    names = {r.gpu for r in log.ranks}
    name = names.pop() if len(names) == 1 else context.gpu
    if name is None:
        return highest("all_reduce", ["ring"]), True
    sku = find_sku(name)
    if sku is None:
        return None, False
    if _test(log) not in (None, "all_reduce_perf"):
        return sku.floor("all_reduce", algorithm="ring"), False
    nvls = bool(log.nvls) and all(count > 0 for count, _ in log.nvls.values()) and len(_hosts(log)) == 1
    return (sku.floor("all_reduce", algorithm="NVLS") if nvls else None) or sku.floor("all_reduce"), False


def _maybe_nvls(log: NcclLog, row: Row, floor: Floor, context: Context) -> str:
    """Why a bandwidth that is good for a ring may still be too low; empty if there is no reason."""
    sku = find_sku(next((r.gpu for r in log.ranks), context.gpu))
    nvls = None if sku is None else sku.floor("all_reduce", algorithm="NVLS")
    if (
        nvls is None
        or nvls == floor
        or log.nvls
        or len(_hosts(log)) != 1
        or (_ranks(log) or 8) < 8  # with fewer GPUs than the board has, NVLS reaches less
        or nvls.verdict(row.busbw) == "PASS"
    ):
        return ""
    return (
        f"a healthy ring reaches {floor.value}, but NVLS, which this hardware supports, {nvls.value}: "
        "run it with NCCL_DEBUG=INFO to see which was used"
    )


def _hosts(log: NcclLog) -> set[str]:
    return {r.host for r in log.ranks} or log.hosts


def _low(log: NcclLog, row: Row, floor: Floor, guess: bool, add: FindingCollector) -> None:
    """Judge a bandwidth below the floor of one node: a fault on one node; over several, compare with the NIC's rate."""
    ranks, nic = _ranks(log), add.context.nic_gbit_s
    nodes = add.context.nodes or len(_hosts(log)) or None
    detail = f"{row.busbw} GB/s busbw at {row.size} bytes"
    why = ""
    if guess:
        why = "the output does not name the GPU model, and some models reach less"
    elif row.size < _PLATEAU:
        why = f"the message is too small to judge: at least {_PLATEAU} bytes are required"
    elif ranks is None or nodes is None:
        why = "the number of nodes is unknown"
    elif nodes > 1 and nic is None:
        share = row.busbw * 8 * (nodes - 1) / (ranks - 1)
        why = f"over {nodes} nodes the network limits it, {share:.0f} Gb/s a GPU, and the rate of its NIC is unknown"
    elif nodes == 1 and ranks not in (8, 16) and ranks < 8:
        why = f"the floor is for the whole board, this ran on {ranks} GPUs"
    if why or ranks is None or nodes is None:
        add("UNJUDGED", f"{detail}; {why}", row.line, measured=row.busbw, unit="GB/s", why=why)
    elif nodes > 1 and nic is not None:
        rate = row.busbw * 8 * (nodes - 1) / (ranks - 1)
        formula = "busbw x (nodes - 1) / (GPUs - 1)"
        expected = Expected(nic, "Gb/s", "the NIC's data sheet", "one direction", formula, row.size)
        # Never FAIL: a healthy EFA reaches 74 % in an all-reduce over four nodes; ib_write_bw between two decides.
        low = judge_share(rate / nic) != "PASS"
        text = f"{detail} over {nodes} nodes: {rate:.0f} Gb/s a GPU of {nic:.0f}"
        add("WARN" if low else "PASS", text, row.line, measured=rate, expected=expected)
    else:
        text = f"{detail}; healthy GPUs of this model reach {floor.value} ({floor.algorithm})"
        verdict, expected = floor.verdict(row.busbw), floor.expected()
        add(verdict, text, row.line, measured=row.busbw, unit="GB/s", expected=expected)


def _topology(log: NcclLog, add: FindingCollector) -> None:
    code, hosts = "NCC004", _hosts(log)
    for count, line in log.nodes.items():
        if hosts and count > len(hosts):
            text = f"NCCL counts {count} nodes on {len(hosts)} host{'s' * (len(hosts) != 1)}: GPUs without NVLink to the others count as nodes of their own"
            expected = Expected(len(hosts), "nodes", "hosts in the log")
            add("FAIL", text, line, code=code, measured=count, expected=expected)
    for what, table in (("channels", log.channels), ("NVLS channels", log.nvls)):
        usual = Counter(c for c, _ in table.values()).most_common(1)
        top = max((c for c, _ in table.values()), default=0)
        expected = Expected(top, "channels", "the other ranks")
        for (host, device), (count, line) in sorted(table.items()):
            if count < top:
                text, at = f"{count} {what} on {host} GPU {device}, {top} on others", Target(host, device)
                median = float(usual[0][0])
                add(
                    "FAIL", text, line, code=code, target=at, measured=count, expected=expected, median=median
                )
    able = log.multicast | {where for where, (count, _) in log.nvls.items() if count > 0}
    for (host, device), line in sorted(log.no_multicast.items()):
        if able:
            text = f"no NVLS on {host} GPU {device}, but others do"
            add("FAIL", text, line, code=code, target=Target(host, device))
    if "Socket" in log.network and (max(log.nodes, default=1) > 1 or len(hosts) > 1):
        text = "NCCL uses TCP sockets between nodes, not RDMA"
        add("WARN", text, log.network["Socket"], code=code, measured="Socket")


TOOLS: tuple[Tool[NcclLog], ...] = (
    Tool("nccl-tests", is_table, parse, judge, first_line=BEGINS),
    Tool("NCCL_DEBUG", is_debug, parse, judge, first_line=BEGINS),
)
