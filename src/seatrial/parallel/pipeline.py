"""Pipeline stages and their schedule, from torch.distributed.pipelining."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from seatrial.job.layout import Layout
from seatrial.job.schedules import SCHEDULES, schedule_named
from seatrial.job.schema import Accumulate
from seatrial.model.decoder import Decoder
from seatrial.parallel.shard import prepare_backward
from seatrial.parallel.stage_clock import StageClock
from seatrial.record.stages import BACKWARD, FORWARD


class _Stage(PipelineStage):
    """torch's stage; its passes are timed as forward and backward, the rest of the schedule is not."""

    clock: StageClock
    accumulate: Accumulate

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self.clock.during(FORWARD):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        if self.accumulate == "whole" or not isinstance(self.submod, FSDPModule):
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        # As torch does it, except that torch never reduces before all passes of a step are done.
        assert backward_type == "full", "the rules refuse schedules that split the backward pass"
        prepare_backward(self.submod, last=last_backward, accumulate=self.accumulate)
        self.submod.set_reshard_after_backward(False)
        values = (bwd_kwargs[key] for key in ("stage_output", "output_grads", "input_values"))
        return stage_backward(*values), None

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self.clock.during(BACKWARD):
            return super().backward_one_chunk(*args, **kwargs)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self.clock.during(BACKWARD):
            return super().backward_weight_one_chunk(*args, **kwargs)

    def perform_reduce_grad(self, *args: Any, **kwargs: Any) -> Any:
        with self.clock.during(BACKWARD):
            return super().perform_reduce_grad(*args, **kwargs)


class Pipeline:
    """The stages that this rank holds, and one call that runs all microbatches forward and backward."""

    def __init__(
        self,
        models: list[Decoder],
        layout: Layout,
        group: ProcessGroup,
        pipeline_rank: int,
        *,
        device: torch.device,
        input_shape_BT: tuple[int, int],
        hidden_shape_BTD: tuple[int, int, int],
        experts: int,
        compute_dtype: torch.dtype,
        accumulate: Accumulate,
        clock: StageClock,
    ) -> None:
        """`hidden_shape_BTD`: shape sent from stage to stage: a microbatch, this rank's positions, the width."""
        last = layout.stages - 1
        stages = []
        for model, index in zip(models, layout.stage_indices(pipeline_rank), strict=True):
            # Shapes are given, so that torch does not infer them by running the model once before the first step.
            hidden: Any = torch.empty(
                hidden_shape_BTD, dtype=compute_dtype, device="meta", requires_grad=True
            )
            if experts:  # `routed_2X` of the decoder
                hidden = (hidden, torch.empty(2, experts, device="meta", requires_grad=True))
            ids = torch.empty(input_shape_BT, dtype=torch.int64, device="meta")
            loss = torch.empty((), dtype=torch.float64, device="meta", requires_grad=True)
            stage = _Stage(
                model,
                index,
                layout.stages,
                device,
                input_args=ids if index == 0 else hidden,
                output_args=loss if index == last else hidden,
                group=group,
            )
            stage.clock, stage.accumulate = clock, accumulate
            stages.append(stage)
        self.holds_first = stages[0].is_first
        self.holds_last = stages[-1].is_last
        self._device = device
        self._stages, self._microbatch = stages, input_shape_BT[0]
        name = layout.schedule
        self._schedule_class = SCHEDULES.imported(name, schedule_named(name).torch_class)
        self._schedule: Any = None
        self._microbatches = 0  # of `_schedule`

    def schedule(self, microbatches: int) -> Any:
        """torch's schedule of a step with so many microbatches; its first step allocates what the stages receive into."""
        if microbatches != self._microbatches:
            single = issubclass(self._schedule_class, PipelineScheduleSingle)
            # scale_grads divides gradients by the number of microbatches; our loss is already a share of the global mean.
            self._schedule = self._schedule_class(
                self._stages[0] if single else self._stages,
                n_microbatches=microbatches,
                loss_fn=lambda loss, _target: loss,  # the last stage has computed it
                scale_grads=False,
            )
            self._microbatches = microbatches
        return self._schedule

    def forward_backward(self, ids_BT: Tensor, target_BT: Tensor, documents: Tensor | None = None) -> Tensor:
        """Run one step's microbatches; returns this rank's sum of the losses, fp64 (0 where it has no last stage).

        Every rank of a pipeline has read the same batch, so documents and targets are not sent from stage to stage: the
        schedule passes each stage of this rank its microbatch of them along with the hidden states that it receives.
        """
        return self._run("step", ids_BT, target_BT, documents)

    def forward(self, ids_BT: Tensor, target_BT: Tensor, documents: Tensor | None = None) -> Tensor:
        """As `forward_backward`, without the backward pass; under torch.no_grad."""
        return self._run("eval", ids_BT, target_BT, documents)

    def _run(
        self, how: Literal["step", "eval"], ids_BT: Tensor, target_BT: Tensor, documents: Tensor | None
    ) -> Tensor:
        run = getattr(self.schedule(len(ids_BT) // self._microbatch), how)
        losses: list[Tensor] = []
        inputs = (ids_BT,) if self.holds_first else ()
        each_stage = {"target_BT": target_BT} | ({} if documents is None else {"documents": documents})
        if self.holds_last:
            run(*inputs, target=target_BT, losses=losses, return_outputs=False, **each_stage)
        else:
            run(*inputs, return_outputs=False, **each_stage)
        if not losses:
            return torch.zeros((), device=self._device, dtype=torch.float64)
        return torch.stack([loss.detach() for loss in losses]).sum()
