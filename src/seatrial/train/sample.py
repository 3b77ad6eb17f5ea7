"""A sample of text from the trained model, so that a person sees what it learned."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import torch

from seatrial.base import units
from seatrial.base.errors import SeatrialError
from seatrial.data.tokenizer import load_tokenizer
from seatrial.hardware import accelerator
from seatrial.hardware.host_memory import host_memory
from seatrial.job import Job
from seatrial.model.generate import generate, load_whole
from seatrial.record.folder import RunFolder
from seatrial.train.checkpointing.places import Places
from seatrial.train.records import Records


def write_sample(job: Job, folder: RunFolder, records: Records, device: torch.device) -> None:
    """Continue `train.sample_prompt` with the newest checkpoint's model, and record the text as an event of the run.

    The whole model is loaded onto one device; where that is impossible an event states why. The run has succeeded, so
    no error here makes it fail.
    """
    records = replace(records, rank=None)
    try:
        _write_sample(job, folder, records, device)
    except (OSError, RuntimeError, ValueError, SeatrialError) as error:
        with contextlib.suppress(OSError):
            records.event("sample_skipped", f"no sample text: {error}")


def _write_sample(job: Job, folder: RunFolder, records: Records, device: torch.device) -> None:
    places = Places(job, folder)
    found = places.candidates() if job.train.sample_tokens else []
    if not found:
        return
    step, place = found[0]
    if accelerator.is_accelerator(device):
        accelerator.release_cached_memory()
    dtype = torch.bfloat16 if job.train.precision == "bf16" else torch.float32
    need = job.architecture.parameters() * dtype.itemsize
    free = _free_memory(device)
    if need > 0.8 * free:
        records.event(
            "sample_skipped",
            f"no sample text: the whole model is {units.memory(need)}, one device has {units.memory(free)} free",
        )
        return
    tokenizer = load_tokenizer(job.data.tokenizer)
    checkpoint = places.place(place).open(step)
    try:
        model = load_whole(job.architecture, checkpoint, device=device, dtype=dtype)
    finally:
        checkpoint.close()
    prompt = tokenizer.encode(job.train.sample_prompt)
    if not prompt:
        prompt = [tokenizer.end_of_document or 0]
    # The vocabulary may be padded beyond the tokenizer's: those ids mean nothing.
    ids = generate(
        model,
        prompt,
        tokens=job.train.sample_tokens,
        seed=job.train.seed,
        stop_id=tokenizer.end_of_document,
    )
    text = tokenizer.decode([i for i in ids if i < tokenizer.vocab_size])
    records.event(
        "sample",
        f"the model continues {job.train.sample_prompt!r}",
        data={"prompt": job.train.sample_prompt, "text": text},
    )


def _free_memory(device: torch.device) -> int:
    if accelerator.is_accelerator(device):
        return accelerator.free_memory(device)
    found = host_memory()
    return 0 if found is None else found.bytes
