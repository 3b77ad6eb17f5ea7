"""A job that has passed every check, as the rest of Seatrial uses it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import BaseModel

from seatrial.base.errors import Diagnostic, InputError, InternalError
from seatrial.base.files import flat
from seatrial.job.architecture import Architecture
from seatrial.job.families import family_named
from seatrial.job.finding import RuleViolation
from seatrial.job.layout import Layout
from seatrial.job.numbers import shares
from seatrial.job.ring import ALWAYS, NEVER, RING_POSITIONS, RingRule
from seatrial.job.rules_layout import ring_obstacles
from seatrial.job.schema import (
    CheckpointSection,
    ClusterSection,
    DataSection,
    JobFile,
    ModelSection,
    OptimizerSection,
    ParallelSection,
    ResilienceSection,
    TrainSection,
    joined_gpus,
)
from seatrial.job.source import Source

_LEAST_COLLECTIVE_S = 600
# From an overdue step until its ranks are queried, blamed and killed, with a coordinator lost meanwhile.
_TO_KILL_S = 300


@dataclass(frozen=True)
class Job:
    """A job file, the model it names and the layout it asks for. Paths are absolute; defaults are filled in.

    With `parallel = "auto"` a job is open until the planner has settled it (`settled.py`): its layout must not be read.
    """

    file: JobFile
    architecture: Architecture
    layout: Layout
    source: str  # the path as given, for messages
    text: Source | None = field(default=None, compare=False, repr=False)  # what it was read from
    chosen: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)
    """How `parallel = "auto"` was settled, as recorded in plan.json; None if the job names its layout."""

    @property
    def is_open(self) -> bool:
        """Whether the layout is still to be chosen."""
        return self.file.parallel == "auto"

    def compiles(self, device: str, layout: Layout | None = None) -> bool:
        """Whether ranks on `device` ("cuda" or "cpu") compile their layers, in the job's layout or another one.

        `train.compile`; if it is missing, on GPUs where torch.compile can.
        """
        if self.train.compile is None:
            return device != "cpu" and not (layout or self.layout).splits_backward
        return self.train.compile

    @property
    def ring_rule(self) -> RingRule:
        """Where keys and values go around a ring, rather than being gathered.

        `parallel.ring_attention`. If it is missing, where they can, and leave an NVLink domain: inside of one they are
        gathered sooner than the ring's results are added up.
        """
        wanted = self.parallel.ring_attention
        if wanted is None and not any(ring_obstacles(self.file, self.architecture)):
            return RingRule(RING_POSITIONS, joined_gpus(self.cluster))
        return ALWAYS if wanted else NEVER

    def wrote(self, key: str) -> bool:
        """Whether "section.key" was written in the file or set for this start, rather than left to its default."""
        section, _, name = key.partition(".")
        return name in getattr(self.file, section).model_fields_set

    def refusal(self, key: str, message: str, hint: str) -> InputError:
        """An error about "section.key" or "section" at its location in the job file."""
        return InputError(self.located(RuleViolation((key,), message, hint)))

    @contextmanager
    def about(self, key: str) -> Iterator[None]:
        """Report an InputError raised inside at the location of `key` in the job file."""
        try:
            yield
        except InputError as error:
            raise self.refusal(key, error.diagnostics[0].message, error.diagnostics[0].hint or "") from None

    def located(self, finding: RuleViolation) -> Diagnostic:
        """Convert a finding to a diagnostic at its location in the job file."""
        if self.text is None:
            return Diagnostic(finding.message, self.source, hint=finding.hint)
        return finding.locate(self.text)

    @property
    def name(self) -> str:
        return self.file.name

    @property
    def model(self) -> ModelSection:
        return self.file.model

    @property
    def data(self) -> DataSection:
        return self.file.data

    @property
    def cluster(self) -> ClusterSection:
        return self.file.cluster

    @property
    def parallel(self) -> ParallelSection:
        if not isinstance(self.file.parallel, ParallelSection):
            raise Unchosen.error()
        return self.file.parallel

    @property
    def train(self) -> TrainSection:
        return self.file.train

    @property
    def optimizer(self) -> OptimizerSection:
        return self.file.optimizer

    @property
    def checkpoint(self) -> CheckpointSection:
        return self.file.checkpoint

    @property
    def resilience(self) -> ResilienceSection:
        return self.file.resilience

    @property
    def microbatches(self) -> int:
        """Microbatches a step on each data-parallel rank, after a batch ramp."""
        return self.train.global_batch // self.layout.data_parallel // self.train.microbatch

    def without_ramp(self) -> Job:
        """The same job with `global_batch` sequences in every step."""
        train = self.train.model_copy(update={"batch_ramp": []})
        return replace(self, file=self.file.model_copy(update={"train": train}))

    @property
    def collective_timeout_s(self) -> int:
        """torch's own timeout of collectives in seconds: later than a hang is found and its ranks are killed."""
        return max(_LEAST_COLLECTIVE_S, math.ceil(self.resilience.first_step_s) + _TO_KILL_S)

    def identity(self) -> dict[str, object]:
        """The keys that make two jobs the same run, flat and plain; every other key may change on resume.

        A path does not identify the data: `open_run` adds the content of the token stores.
        """
        train = self.train
        identity: dict[str, object] = {
            **flat(self.architecture.as_dict(), "model."),
            **flat(self.optimizer.model_dump(), "optimizer."),
            "train.sequence_length": train.sequence_length,
            "train.global_batch": train.global_batch,
            "train.seed": train.seed,
        }
        # Only if not the default: runs that were made before these keys existed must be able to resume.
        if len(self.data.sources) > 1:
            identity["data.weights"] = ", ".join(map(str, shares(self.data.weights or ())))
        if not self.data.attend_across_documents:
            identity["data.attend_across_documents"] = False
        if self.data.loss != "answers":
            identity["data.loss"] = self.data.loss
        if train.batch_ramp:
            identity["train.batch_ramp"] = ", ".join(
                f"{p.steps} x {p.global_batch}" for p in train.batch_ramp
            )
        return identity

    def to_toml(self) -> str:
        """The job with every key written out; reading it gives this job again.

        The model is written as explicit sizes, so that the text does not depend on a preset or on a
        config.json that may change; `shard` as the resolved number.
        """
        out = [f"name = {_value(self.name)}", ""]
        if self.is_open:
            out.insert(1, 'parallel = "auto"')
        for name in type(self.file).model_fields:
            section = getattr(self.file, name)
            if not isinstance(section, BaseModel):
                continue
            values: dict[str, Any] = section.model_dump()
            if name == "model":
                origin = _origin(self.model)
                if origin is not None:
                    out.append(f"# from {origin}")
                values = {"init_from": self.model.init_from, **self.architecture.as_dict()}
                if family_named(self.architecture.family).partial_rotary_factor != 1:
                    values["partial_rotary_factor"] = self.architecture.partial_rotary_factor
            if name == "parallel":
                if self.chosen is not None:
                    out.append('# chosen by parallel = "auto": see plan.json for the reasons')
                values["shard"] = self.layout.sample_shards
                values["reshard_after_forward"] = self.parallel.reshards
            if values:
                out.append(f"[{name}]")
                out += [f"{key} = {_value(value)}" for key, value in values.items() if value is not None]
                out.append("")
        return "\n".join(out[:-1]) + "\n"


class Unchosen:
    """Placeholder for the layout of an open job: any access to it is an internal error."""

    @staticmethod
    def error() -> InternalError:
        return InternalError('the layout of a job with parallel = "auto" was accessed before it was chosen')

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise self.error()


def _origin(model: ModelSection) -> str | None:
    """Where the sizes came from, for a comment."""
    for key in ("preset", "hf"):
        value = getattr(model, key)
        if value is not None:
            return f"{key} = {_value(value)}"
    return None


def _value(value: Any) -> str:
    """A TOML value. Strings as JSON writes them: the same escapes, with DEL added, which TOML forbids."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{k} = {_value(v)}" for k, v in value.items() if v is not None) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value)
