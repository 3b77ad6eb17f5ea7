"""The verdict on a drilled run, from its records alone. Pure: the same records give the same verdict anywhere."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from seatrial.base import units
from seatrial.drill.evidence import Criteria, Evidence, Losses, relative
from seatrial.drill.expectation import OTHER_WORLD, Expectation
from seatrial.drill.injection import Injection
from seatrial.record.events import Event
from seatrial.record.ledger import ledger_gaps
from seatrial.record.metrics import MetricsRecord

ScenarioResult = Literal["PASS", "FAIL", "UNJUDGED"]


@dataclass(frozen=True)
class Check:
    """One condition that must hold; `ok` None: could not be judged, which is never a pass."""

    name: str
    ok: bool | None
    text: str


@dataclass(frozen=True)
class Judgement:
    """The verdict on one scenario, with every reason."""

    verdict: ScenarioResult
    checks: tuple[Check, ...]
    detected_in_s: float | None = None  # the slowest, if there were several faults
    recovered_in_s: float | None = None
    steps_redone: int | None = None
    work_lost_s: float | None = None  # step time of the redone steps
    largest_difference: float | None = None  # of a loss or gradient norm, relative

    def why(self) -> str:
        """The first condition that does not hold; empty for a pass."""
        for wanted in (False, None):
            for check in self.checks:
                if check.ok is wanted:
                    return f"{check.name}: {check.text}"
        return ""

    def as_dict(self) -> dict[str, Any]:
        """The fields for the report."""
        return {
            "verdict": self.verdict,
            "why": self.why(),
            "detected_in_s": self.detected_in_s,
            "recovered_in_s": self.recovered_in_s,
            "steps_redone": self.steps_redone,
            "work_lost_s": self.work_lost_s,
            "largest_difference": self.largest_difference,
            "checks": [vars(c) for c in self.checks],
        }


def unjudged(reason: str) -> Judgement:
    """The verdict on a scenario that could not be run here."""
    return Judgement("UNJUDGED", (Check("needs", None, reason),))


def judge(expected: Expectation, evidence: Evidence, criteria: Criteria) -> Judgement:
    """Check the evidence against the expectation. PASS only if every check passes."""
    detections = [_detection(expected, evidence, i) for i in evidence.injections]
    recoveries = [
        _recovery(evidence, i, d) if d is not None else None
        for i, d in zip(evidence.injections, detections, strict=True)
    ]
    different = _differences(evidence, criteria.reference)
    checks = [
        _injected(evidence),
        _ended(expected, evidence, criteria),
        _calm_before(evidence),
        _detected(expected, evidence.injections, detections),
        _named(expected, evidence),
        _replaced(expected, evidence, detections),
        *_followed(expected, evidence),
        _recovered(expected, recoveries),
        _redone(expected, evidence, criteria),
        _ledger(evidence, criteria),
        _losses(expected, evidence, criteria, different),
        _weights(expected, evidence, criteria),
        _replayed(expected, evidence, criteria),
        _left(evidence),
    ]
    kept = tuple(c for c in checks if c is not None)
    seconds = [
        (d.time - i.time, None if r is None else r.time - i.time)
        for i, d, r in zip(evidence.injections, detections, recoveries, strict=True)
        if d is not None
    ]
    recovered = [r for _, r in seconds if r is not None]
    return Judgement(
        verdict=_verdict(kept),
        checks=kept,
        detected_in_s=max((d for d, _ in seconds), default=None),
        recovered_in_s=max(recovered, default=None) if expected.recovers else None,
        steps_redone=len(evidence.superseded()),
        work_lost_s=math.fsum(r.step_time_s for r in evidence.superseded()),
        largest_difference=max((abs(d) for d in different.values()), default=0.0),
    )


def _verdict(checks: Sequence[Check]) -> ScenarioResult:
    if any(c.ok is False for c in checks):
        return "FAIL"
    return "UNJUDGED" if any(c.ok is None for c in checks) else "PASS"


# -- what happened


def _detection(expected: Expectation, evidence: Evidence, injection: Injection) -> Event | None:
    """The first event after the fault that reports a problem."""
    return next(
        (e for e in _after(evidence.events, injection.time) if e.kind in expected.detected),
        None,
    )


def _recovery(evidence: Evidence, injection: Injection, detection: Event) -> MetricsRecord | None:
    """The first step after the detection: of a later generation if there is one, else the redone one."""
    before = max(
        (m.generation for m in evidence.metrics if m.time <= injection.time), default=detection.generation
    )
    later = [m for m in evidence.metrics if m.time > detection.time]
    return next((m for m in later if m.generation > before), next(iter(later), None))


def _after(events: Sequence[Event], time: float) -> Iterator[Event]:
    return (e for e in sorted(events, key=lambda e: e.time) if e.time >= time)


def _differences(evidence: Evidence, reference: Losses) -> dict[tuple[int, str], float]:
    """(step, "loss" or "gradient norm") -> relative difference, where it is not bit-equal to the reference."""
    found: dict[tuple[int, str], float] = {}
    for step, record in evidence.final().items():
        if step not in reference:
            continue
        for what, ours, theirs in zip(
            ("loss", "gradient norm"), (record.loss, record.grad_norm), reference[step], strict=True
        ):
            if apart := relative(ours, theirs):
                found[step, what] = apart
    return found


# -- the checks


def _injected(evidence: Evidence) -> Check:
    if not evidence.injections:
        return Check("injected", False, "the fault was never injected: the run ended before it could be")
    return Check("injected", True, "; ".join(i.message for i in evidence.injections))


def _ended(expected: Expectation, evidence: Evidence, criteria: Criteria) -> Check:
    if evidence.overdue:
        return Check("ended", False, "it did not end and was stopped by the drill")
    if tuple(evidence.exits) != expected.exits:
        wanted, got = (" then ".join(map(str, codes)) for codes in (expected.exits, evidence.exits))
        return Check("ended", False, f"exit {got or 'unknown'}, not {wanted}; {_reason_of(evidence)}")
    last = max((m.step for m in evidence.metrics), default=0)
    if last != criteria.steps:
        return Check("ended", False, f"its last step is {last}, not {criteria.steps}")
    return Check("ended", True, f"exit {' then '.join(map(str, evidence.exits))} after step {last}")


def _reason_of(evidence: Evidence) -> str:
    bad = [e for e in evidence.events if e.kind in ("gave_up", "run_failed")]
    return bad[-1].message if bad else "no reason was recorded"


def _calm_before(evidence: Evidence) -> Check | None:
    """Check that nothing was recovered from before the first fault."""
    first = min((i.time for i in evidence.injections), default=math.inf)
    false = [e for e in evidence.events if e.kind == "recovering" and e.time < first]
    if false:
        return Check("no false alarm", False, f"before the fault: {false[0].message}")
    return Check("no false alarm", True, "nothing was recovered from before the fault")


def _detected(
    expected: Expectation, injections: Sequence[Injection], detections: Sequence[Event | None]
) -> Check | None:
    if not injections:
        return None
    missed = [i for i, d in zip(injections, detections, strict=True) if d is None]
    if missed:
        kinds = " or ".join(expected.detected)
        return Check("detected", False, f"no {kinds} event after: {missed[0].message}")
    found = [(d.time - i.time, d) for i, d in zip(injections, detections, strict=True) if d is not None]
    slowest, event = max(found, key=lambda f: f[0])
    return Check("detected", True, f"after {units.duration(slowest)}: {event.kind}: {event.message}")


def _named(expected: Expectation, evidence: Evidence) -> Check | None:
    if expected.names == "nothing" or not evidence.injections:
        return None
    kinds = expected.named_by or expected.detected
    missing = []
    for injection in evidence.injections:
        named = [e for e in _after(evidence.events, injection.time) if e.kind in kinds]
        wanted = f"node {injection.node}"
        if expected.names == "rank":
            wanted = f"rank {injection.rank}"
        # The events of several faults may come in any order; for a single fault the first event must be right.
        first = expected.first_names and len(evidence.injections) == 1
        pool = named[:1] if first else named
        if not any(_names(e, injection, expected.names) for e in pool):
            text = (
                f"{pool[0].kind} names {_culprit(pool[0])}"
                if pool
                else f"there is no {' or '.join(kinds)} event"
            )
            missing.append(f"{wanted} was expected to be named, but {text}")
    if missing:
        return Check("named", False, "; ".join(missing))
    who = [f"rank {i.rank}" if expected.names == "rank" else f"node {i.node}" for i in evidence.injections]
    return Check("named", True, ", ".join(who))


def _names(event: Event, injection: Injection, what: str) -> bool:
    if what == "rank":
        return event.rank == injection.rank and event.node in (None, injection.node)
    return event.node == injection.node


def _culprit(event: Event) -> str:
    parts = [f"{w} {v}" for w, v in (("node", event.node), ("rank", event.rank)) if v is not None]
    return " ".join(parts) if parts else "no node or rank"


def _replaced(expected: Expectation, evidence: Evidence, detections: Sequence[Event | None]) -> Check | None:
    if expected.replaced is None:
        return None
    for injection, detection in zip(evidence.injections, detections, strict=True):
        if detection is None:
            continue
        start = next(
            (
                e
                for e in _after(evidence.events, detection.time)
                if e.kind == "generation_started" and e.data and isinstance(e.data.get("slots"), dict)
            ),
            None,
        )
        if start is None or start.data is None:
            return Check("placed", False, "no generation was started after the detection")
        inside = injection.node in [int(n) for n in start.data["slots"].values()]
        if inside is expected.replaced:
            what = "is still used" if inside else "was dropped"
            return Check("placed", False, f"node {injection.node} {what} in generation {start.generation}")
    return Check("placed", True, "without the node" if expected.replaced else "with the same node")


def _followed(expected: Expectation, evidence: Evidence) -> Iterator[Check]:
    first = min((i.time for i in evidence.injections), default=math.inf)
    for kind in expected.follows:
        event = next((e for e in _after(evidence.events, first) if e.kind == kind), None)
        yield Check(kind, event is not None, event.message if event else f"no {kind} event after the fault")


def _recovered(expected: Expectation, recoveries: Sequence[MetricsRecord | None]) -> Check | None:
    if not expected.recovers or not recoveries:
        return None
    if any(r is None for r in recoveries):
        return Check("recovered", False, "no step was trained after the detection")
    return Check("recovered", True, "training continued")


def _redone(expected: Expectation, evidence: Evidence, criteria: Criteria) -> Check:
    late = evidence.late_checkpoints()
    each = expected.redone_limit(
        snapshot=criteria.snapshot_every, checkpoint=criteria.checkpoint_every, late=late
    )
    limit = each * max(1, len(evidence.injections))
    redone = len(evidence.superseded())
    return Check("steps redone", redone <= limit, f"{redone}, at most {limit}")


def _ledger(evidence: Evidence, criteria: Criteria) -> Check:
    gaps = list(evidence.problems) + ledger_gaps(evidence.ledger, criteria.batches)
    last = max((r.step for r in evidence.ledger), default=0)
    if last != criteria.steps:
        gaps.append(f"it ends with step {last}, not {criteria.steps}")
    if gaps:
        return Check("ledger", False, "; ".join(gaps[:3]))
    return Check("ledger", True, f"{criteria.batches.total(criteria.steps)} samples, each once and in order")


def _losses(
    expected: Expectation,
    evidence: Evidence,
    criteria: Criteria,
    different: dict[tuple[int, str], float],
) -> Check:
    final = evidence.final()
    absent = [s for s in range(1, criteria.steps + 1) if s not in final or s not in criteria.reference]
    if absent:
        return Check("losses", False, f"step {absent[0]} has no record in this run or in the reference")
    if not different:
        return Check("losses", True, f"{criteria.steps} losses and gradient norms bit-equal to the reference")
    first = _first_shrunk(expected, evidence)
    allowed = {key: _allowed(criteria, *key, first=first) for key in different}
    wrong = [(key, apart) for key, apart in different.items() if not apart <= allowed[key]]
    if wrong:
        (step, what), apart = min(wrong)
        limit = f", allowed {allowed[step, what]:.2g}" if allowed[step, what] else ""
        return Check("losses", False, f"{what} of step {step} differs by {apart:.1e} relative{limit}")
    judged = {key: apart for key, apart in different.items() if math.isfinite(allowed[key])}
    limits = [
        f"{what} {apart:.1e} (at most {max(allowed[key] for key in judged if key[1] == what):.2g})"
        for what in ("loss", "gradient norm")
        if (apart := max((v for k, v in judged.items() if k[1] == what), default=0.0))
    ]
    if len(judged) < len(different):
        limits.append(f"after step {first:.0f} compared with the replay alone")
    return Check("losses", True, f"relative to the reference: {', '.join(limits)}")


def _first_shrunk(expected: Expectation, evidence: Evidence) -> float:
    """The first step that counts and was trained after the run had shrunk; infinity if there is none."""
    if expected.world == "same":
        return math.inf
    shrunk = evidence.shrunk_at()
    return min((step for step, r in evidence.final().items() if r.time >= shrunk), default=math.inf)


def _allowed(criteria: Criteria, step: int, what: str, *, first: float) -> float:
    """Relative difference from the reference that is allowed; `first`: see `_first_shrunk`. Infinity: any."""
    other = OTHER_WORLD[what] if criteria.stays_near or (step == first and what != "weights") else math.inf
    return max(criteria.tolerance.get((step, what), 0.0), other if step >= first else 0.0)


def _weights(expected: Expectation, evidence: Evidence, criteria: Criteria) -> Check:
    difference = evidence.weights
    if difference is None:
        return Check("weights", False, evidence.weights_problem or "there is no last checkpoint to compare")
    if difference.missing:
        return Check("weights", False, f"{difference.missing[0]} is in one of the two checkpoints only")
    if difference.equal:
        return Check("weights", True, f"{difference.tensors} tensors bit-equal to the reference")
    text = (
        f"{len(difference.differing)} of {difference.tensors} tensors differ, by {difference.largest:.1e} "
        f"at most ({difference.where})"
    )
    allowed = _allowed(criteria, criteria.steps, "weights", first=_first_shrunk(expected, evidence))
    if math.isinf(allowed):
        text += "; compared with the replay alone"
    elif allowed:
        text += f", allowed {allowed:.2g} of a tensor's 2-norm"
    return Check("weights", 0.0 < allowed >= difference.largest, text)  # without a tolerance -0.0 is not 0.0


def _replayed(expected: Expectation, evidence: Evidence, criteria: Criteria) -> Check | None:
    """Check a run that shrank against one that trained the same steps in the same layouts without a fault."""
    if expected.world == "same" or math.isinf(evidence.shrunk_at()):
        return None
    replay = evidence.replay
    if replay is None:
        return Check("replay", None, evidence.replay_problem or "the run did not end")
    apart = _differences(evidence, replay.losses)
    wrong = sorted((key, a) for key, a in apart.items() if not a <= criteria.tolerance.get(key, 0.0))
    if wrong:
        (step, what), by = wrong[0]
        return Check(
            "replay",
            False,
            f"{what} of step {step} differs by {by:.1e} relative from a run in the same layouts",
        )
    weights = replay.weights
    allowed = criteria.tolerance.get((criteria.steps, "weights"), 0.0)
    if weights.missing or not (weights.equal or 0.0 < allowed >= weights.largest):
        where = weights.missing[0] if weights.missing else f"{weights.where} by {weights.largest:.1e}"
        return Check(
            "replay", False, f"the last checkpoint differs from that of a run in the same layouts: {where}"
        )
    same = "bit-equal to" if not apart and weights.equal else "as near as two undisturbed runs to"
    text = f"losses, gradient norms and {weights.tensors} tensors are {same} those of a run that changed its layouts at the same steps"
    return Check("replay", True, text)


def _left(evidence: Evidence) -> Check:
    if evidence.left:
        return Check("nothing left", False, f"still running: {'; '.join(evidence.left[:3])}")
    return Check("nothing left", True, "no process of it was left")
