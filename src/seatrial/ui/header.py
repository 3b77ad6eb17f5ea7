"""The header: what will run, as text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from seatrial.base import units
from seatrial.record.folder import RunFolder
from seatrial.ui import figures
from seatrial.ui.model_card import origin

if TYPE_CHECKING:
    from seatrial.job import Job


def header_pairs(
    job: Job,
    folder: RunFolder,
    generation: int,
    device: str,
    device_reason: str,
    data_summary: str,
    resume_step: int | None,
) -> list[tuple[str, str]]:
    """(label, text) of each line of the header."""
    arch, layout, train = job.architecture, job.layout, job.train
    tokens_a_step = train.global_batch * train.sequence_length
    nodes, gpus, spares = job.cluster.nodes, job.cluster.gpus_per_node, job.cluster.spares
    spare_nodes = f", {_many(spares, 'spare')}" if spares else ""
    if resume_step is None:
        start = f"fresh, generation {generation}"
    else:
        start = f"resumes, newest checkpoint step {resume_step}, generation {generation}"
    return [
        (
            "model",
            f"{arch.family}, {figures.parameters(arch)}, "
            f"{arch.num_hidden_layers} layers, hidden {arch.hidden_size}, vocabulary {arch.vocab_size:,}",
        ),
        *_lora(job),
        (
            "layout",
            f"{layout}; {_many(layout.world_size, 'rank')} on {_many(nodes, 'node')} x {gpus}{spare_nodes}",
        ),
        (
            "batch",
            f"{_many(train.global_batch, 'sequence')} x {train.sequence_length:,} = {tokens_a_step:,} tokens per step, "
            f"{_many(job.microbatches, 'microbatch', 'microbatches')} of {train.microbatch}",
        ),
        *([("batch ramp", f"{train.batches} sequences per step")] if train.batch_ramp else []),
        ("steps", f"{train.steps:,} steps, {units.count(train.tokens)} tokens"),
        *([] if job.model.init_from is None else [("weights", _weights(Path(job.model.init_from)))]),
        ("precision", train.precision),
        ("data", data_summary),
        *_validation(job),
        ("device", f"{device} ({device_reason})" if device_reason else device),
        (
            "checkpoints",
            _checkpoints(job),
        ),
        ("failures", _failures(job)),
        ("folder", str(folder.path)),
        ("start", start),
    ]


def _lora(job: Job) -> list[tuple[str, str]]:
    lora, trained = job.architecture.lora, job.architecture.trained_parameters()
    if lora is None:
        return []
    text = f"rank {lora.rank}, alpha {lora.alpha:g}, of {', '.join(lora.targets)}"
    return [("adapters", f"{text}: {units.count(trained)} parameters, the only ones trained")]


def _weights(folder: Path) -> str:
    from_where = origin(folder)
    return str(folder) if from_where is None else f"{folder}: {from_where}"


def _validation(job: Job) -> list[tuple[str, str]]:
    data, train = job.data, job.train
    if data.validation is None or train.validate_every_steps is None:
        return []
    most = train.validation_samples(1 << 62)
    every = _many(train.validate_every_steps, "step")
    text = f"{data.validation}, at most {_many(most, 'sample')}, every {every} and at the end"
    return [("validation", text)]


def _checkpoints(job: Job) -> str:
    section = job.checkpoint
    every = section.every_steps
    text = "at the interval that minimises lost time" if every == "auto" else f"every {every} steps"
    text += f" and at the end, keeping the newest {section.keep}"
    if section.keep_every_steps:
        text += f", and every {section.keep_every_steps} steps"
    if section.folder is not None:
        text += f", in {section.folder}"
    return text if section.fallback is None else f"{text}, fallback {section.fallback}"


def _failures(job: Job) -> str:
    resilience = job.resilience
    if resilience.max_restarts == 0:
        return "the first one ends the run (max_restarts = 0)"
    every = resilience.snapshot_every_steps
    kept = f"copies in memory every {_many(every, 'step')}" if every else "no copies in memory"
    return f"at most {_many(resilience.max_restarts, 'recovery', 'recoveries')}, {kept}"


def _many(n: int, one: str, many: str | None = None) -> str:
    return f"{n:,} {one}" if n == 1 else f"{n:,} {many or one + 's'}"
