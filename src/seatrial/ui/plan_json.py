"""A plan as one JSON document: bytes, seconds, decimal bytes/s; null if unknown, with the reason next to it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from seatrial.base.atomic import finite
from seatrial.plan.cost.finish import Finish
from seatrial.plan.cost.memory import Memory
from seatrial.plan.cost.predict import Prediction, Share
from seatrial.plan.cost.step import Traffic
from seatrial.plan.model.hardware import Hardware
from seatrial.plan.model.recipe import Recipe
from seatrial.plan.report.advice import Advice, Suggestion, Target
from seatrial.plan.report.answer import Answer, JobEstimate, RunForecast
from seatrial.plan.report.beyond_memory import BeyondMemory
from seatrial.plan.search.caution import too_short
from seatrial.plan.search.scaling import Scaling
from seatrial.plan.search.search import Choice, Found

SCHEMA_VERSION = 1


def document(answer: Answer) -> dict[str, Any]:
    """The plan as JSON values; numbers are finite or null."""
    job, arch, train = answer.job, answer.job.architecture, answer.job.train
    tokens = train.global_batch * train.sequence_length
    whole = {
        "schema_version": SCHEMA_VERSION,
        "name": job.name,
        "model": {
            "parameters": arch.parameters(),
            "active_parameters": arch.active_parameters(),
            "flops_per_token": arch.flops_per_token(train.sequence_length),
            "flops_per_token_full_attention": arch.flops_per_token(
                train.sequence_length, full_attention=True
            ),
            "architecture": arch.as_dict(),
        },
        "work": {"steps": train.steps, "tokens_per_step": tokens, "tokens": train.tokens},
        "cluster": _place(answer.place),
        "stack": answer.stack,
        "own": _job_estimate(answer.own),
        "search": None if answer.found is None else _search_result(answer.found, answer.beyond),
        "network": {
            "bytes_per_gpu_per_step": answer.network_demand.a_gpu,
            "bytes_per_nic_per_step": answer.network_demand.a_card,
            "needed_bytes_per_s_per_node": answer.network_demand.mean,
            "capacity_bytes_per_s_per_node": answer.network_demand.capacity,
            "enough_bytes_per_s_per_node": answer.network_demand.enough,
            "nodes": answer.network_demand.nodes,
        },
        "finish": None if answer.forecast is None else _forecast(answer.forecast),
        "scaling": {
            "weak": None if answer.weak is None else _scaling(answer.weak),
            "strong": None if answer.strong is None else _scaling(answer.strong),
            "best_layouts": None if answer.best_scaled is None else _scaling(answer.best_scaled),
        },
        "advice": None if answer.advice is None else _advice(answer.advice),
        "targets": [_target(t) for t in answer.targets],
        "provenance": list(answer.provenance),
        "cautions": _cautions(answer),
    }
    return dict(finite(whole))


def _cautions(answer: Answer) -> list[str]:
    p = answer.own.prediction
    warning = None if p is None else too_short(answer.job.architecture, answer.own.recipe, p)
    return [] if warning is None else [warning]


def _place(place: Hardware) -> dict[str, Any]:
    return {
        "nodes": place.nodes,
        "gpus_per_node": place.gpus_per_node,
        "nvlink_domain": place.domain or place.gpus_per_node,
        "gpu": None if place.gpu is None else asdict(place.gpu),
        "why_no_gpu": place.why_no_gpu or None,
        "network": None if place.network is None else asdict(place.network),
        "why_no_network": place.why_no_network or None,
    }


_RECIPE = (
    *("sequence", "global_batch", "microbatch", "tensor", "context", "shard", "replicate", "pipeline"),
    *("stages_per_rank", "schedule", "optimizer", "precision", "sharding", "reshard", "recompute"),
    *("recompute_every", "offload", "sequence_parallel", "compiled", "async_tensor", "accumulate"),
)


def recipe(r: Recipe) -> dict[str, Any]:
    """A layout with its settings."""
    return _settings(r) | {
        "ring_attention": r.rings,
        "world_size": r.world,
        "microbatches": r.microbatches,
    }


def _settings(r: Recipe) -> dict[str, Any]:
    values = vars(r.layout) | vars(r)
    return {key: values[key] for key in _RECIPE}


def held(m: Memory) -> dict[str, Any]:
    """Bytes on the most loaded GPU, by kind."""
    return asdict(m) | {"allocated": m.allocated, "reserved": m.reserved}


def _shares(shares: tuple[Share, ...]) -> list[dict[str, Any]]:
    return [asdict(s) for s in shares]


def prediction(p: Prediction) -> dict[str, Any]:
    """An 85 % interval of the measured step."""
    return {
        "step_s": p.step_s,
        "low_s": p.low_s,
        "high_s": p.high_s,
        "tokens_per_s_per_gpu": p.tokens_per_s_per_gpu,
        "mfu": p.mfu,
        "mfu_full_attention": p.mfu_full_attention,
        "fits": p.fits,
        "memory_verdict": p.verdict.document(),
        "pace": asdict(p.pace),
        "parts_s": asdict(p.parts),
        "waterfall": _shares(p.waterfall),
        "memory_bytes": held(p.memory),
        "traffic_bytes": _traffic(p.traffic),
    }


def _traffic(t: Traffic) -> dict[str, Any]:
    return asdict(t) | {"sent": t.sent}


def _job_estimate(own: JobEstimate) -> dict[str, Any]:
    return {
        "recipe": recipe(own.recipe),
        "fits": own.fits,
        "memory_verdict": None if own.verdict is None else own.verdict.document(),
        "memory_bytes": held(own.memory),
        "room_bytes": own.available,
        "traffic_bytes": _traffic(own.traffic),
        "prediction": None if own.prediction is None else prediction(own.prediction),
        "why_unknown": own.why_unknown or None,
        "limit": own.limit,
    }


def _choice(c: Choice) -> dict[str, Any]:
    return {"recipe": recipe(c.recipe), "limit": c.limit, "prediction": prediction(c.prediction)}


def _search_result(found: Found, beyond: BeyondMemory | None) -> dict[str, Any]:
    return {
        "legal": found.tried,
        "too_large": found.too_large,
        "refused": found.refused,
        "least_bytes": found.least_bytes,
        "own_costs": found.own_costs,
        "choices": [_choice(c) for c in found.choices],
        "sure": [_choice(c) for c in found.sure],
        "beyond_memory": None if beyond is None else _beyond(beyond),
    }


def _beyond(b: BeyondMemory) -> dict[str, Any]:
    """`gain`, of the speed, here and in `ways`: over the best layout that fits; null if none does, in `ways` over this one."""
    return {
        "recipe": recipe(b.recipe),
        "prediction": prediction(b.prediction),
        "gain": b.gain,
        "over": b.over,
        "ways": [_suggestion(way) for way in b.suggestions],
    }


def _finish(f: Finish) -> dict[str, Any]:
    return asdict(f) | {"waterfall": _shares(f.waterfall), "mfu": f.mfu}


def _forecast(e: RunForecast) -> dict[str, Any]:
    return {
        "own": _finish(e.finish),
        "every_steps": e.every_steps,
        "best": _finish(e.best),
        "storage_tenth": _finish(e.slow),
        "storage_gb_s": e.storage_gb_s,
        "storage_source": e.storage_source,
        "failure_rate": asdict(e.rate),
        "price_per_gpu_hour": e.price,
        "cost": e.cost,
    }


def _scaling(s: Scaling) -> dict[str, Any]:
    points = [
        {
            "nodes": p.nodes,
            "gpus": p.gpus,
            "recipe": None if p.recipe is None else recipe(p.recipe),
            "why_not": p.why_not,
            "global_batch": p.global_batch,
            "tokens_per_s": p.tokens_per_s,
            "efficiency": p.efficiency,
            "doubling": p.doubling,
            "speedup": p.speedup,
            "exposed": p.exposed,
            "step_s": None if p.prediction is None else p.prediction.step_s,
            "memory_verdict": None if p.prediction is None else p.prediction.verdict.document(),
        }
        for p in s.points
    ]
    return {
        "points": points,
        "grows": s.grows,
        "assumes": list(s.assumes),
        "communication_shows_at_gpus": None if s.shows_at is None else s.shows_at.gpus,
    }


def _suggestion(way: Suggestion | None) -> dict[str, Any] | None:
    if way is None:
        return None
    p = way.prediction
    return {
        "what": way.what,
        "built": way.built,
        "gain": way.gain,
        "recipe": recipe(way.recipe),
        "step_s": p.step_s,
        "tokens_per_s_per_gpu": p.tokens_per_s_per_gpu,
        "mfu": p.mfu,
        "memory_verdict": p.verdict.document(),
    }


def _advice(a: Advice) -> dict[str, Any]:
    return {
        "ways": [_suggestion(w) for w in a.suggestions],
        "turns": [
            vars(t) | {"becomes": None if t.becomes is None else _settings(t.becomes)} for t in a.crossovers
        ],
        "alike": [recipe(r) for r in a.alike],
    }


def _target(t: Target) -> dict[str, Any]:
    return {
        "value": t.wanted.value,
        "of": t.wanted.of,
        "own": t.own,
        "tokens_per_s_per_gpu": t.speed.value if t.speed.of == "tokens/s/GPU" else None,
        "likely": t.likely,
        "why_not": t.why_not or None,
        "better": _suggestion(t.better),
        "likely_with": t.likely_with,
        "inside_with": _suggestion(t.inside),
        "met_with": _suggestion(t.met),
    }
