"""One rank of a peer for bench/peers.py: torchtitan, transformers' Trainer, or a plain PyTorch loop. It does not import Seatrial.

    torchrun --nproc-per-node N bench/peers_rank.py SPEC.json

Each trains on the same batches from a file, and writes into the folder of the spec: seconds of the timed steps, every loss,
parameters, peak memory.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

# What `shim` does where torchtitan has no GPU; bench/peers.py prints it.
SHIM = (
    "torch reports the device type cpu, and torch.cpu has the calls of torch.cuda that torchtitan makes (name, memory: no figures)",
    "torch.distributed.barrier gets no device_ids, which gloo refuses",
    "FSDP2 sums gradients, where torchtitan has them multiplied by 1 in the reduction, which gloo refuses",
    "an empty module stands for torchtitan.models.moe.kernels, which needs triton; this model has no experts",
)


class Spec:
    """What to train, as bench/peers.py wrote it."""

    def __init__(self, path: Path) -> None:
        values: dict[str, Any] = json.loads(path.read_text())
        self.contestant: str = values["contestant"]
        self.model: dict[str, Any] = values["model"]
        self.tensor, self.shard, self.replicate, self.pipeline = (
            values[k] for k in ("tensor", "shard", "replicate", "pipeline")
        )
        self.data_parallel = self.shard * self.replicate  # only one of the two is more than 1
        self.batch, self.microbatch, self.sequence = (values[k] for k in ("batch", "microbatch", "sequence"))
        self.warm_up, self.steps, self.lr = values["warm_up"], values["steps"], values["lr"]
        self.device, self.bf16, self.recompute = values["device"], values["bf16"], values["recompute"]
        self.folder = path.parent
        self.rows = np.load(values["rows"], mmap_mode="r")  # [step, row of the batch, sequence + 1]
        self.local_rank = int(os.environ.get("LOCAL_RANK", 0))
        self.rank = int(os.environ.get("RANK", 0))
        # Tensor parallel is innermost, pipeline outermost, in every contestant.
        self.data_rank = self.rank // self.tensor % self.data_parallel

    @property
    def microbatches(self) -> int:
        return self.batch // self.data_parallel // self.microbatch

    def share(self, step: int) -> tuple[Tensor, Tensor]:
        """Ids and targets of this rank's rows of a step's batch."""
        count = self.batch // self.data_parallel
        rows = np.asarray(self.rows[step, self.data_rank * count : (self.data_rank + 1) * count])
        both = torch.from_numpy(rows.astype(np.int64))
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()


class Laps:
    """Time of the steps after the warm-up, and the loss of every step."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._losses: list[Tensor] = []
        self._stamps: list[float] = []

    def lap(self, loss: Tensor | None) -> None:
        """A step is done; `loss`: the mean of this rank's tokens, None if another stage has it."""
        self._losses.append(torch.tensor(torch.nan) if loss is None else loss.detach())
        if len(self._losses) in (self._spec.warm_up, self._spec.warm_up + self._spec.steps):
            if self._spec.device == "cuda":
                torch.cuda.synchronize()
            self._stamps.append(time.perf_counter())

    def write(self, parameters: int) -> None:
        """`parameters`: of this rank's pipeline stage, whole."""
        on_gpu = self._spec.device == "cuda"
        peak = (
            torch.cuda.max_memory_allocated()
            if on_gpu
            else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        )
        begin, end = self._stamps
        losses = [float(loss) for loss in self._losses]
        found = {"seconds": end - begin, "losses": losses, "parameters": parameters, "memory": peak}
        (self._spec.folder / f"rank-{self._spec.rank}.json").write_text(json.dumps(found))


# -- torchtitan


def shim() -> None:
    """Let torchtitan 0.2.2 run without a GPU; see SHIM."""
    from torch.distributed.fsdp import FSDPModule

    torch._utils._get_available_device_type = lambda: "cpu"
    missing: dict[str, Callable[..., Any]] = {
        "get_device_name": lambda *_: "cpu",
        "get_device_properties": lambda *_: types.SimpleNamespace(total_memory=1),
        "reset_peak_memory_stats": lambda *_: None,
        "empty_cache": lambda: None,
        "memory_stats": lambda *_: {},
    }
    for name, function in missing.items():
        setattr(torch.cpu, name, function)
    barrier = dist.barrier
    dist.barrier = lambda *_, **__: barrier()
    set_factor = FSDPModule.set_gradient_divide_factor

    def set_factor_and_sum(module: FSDPModule, factor: float) -> None:
        set_factor(module, factor)
        module.set_force_sum_reduction_for_comms(True)

    FSDPModule.set_gradient_divide_factor = set_factor_and_sum
    kernels = types.ModuleType("torchtitan.models.moe.kernels")
    kernels.generate_permute_indices = None  # type: ignore[attr-defined]
    sys.modules[kernels.__name__] = kernels


def torchtitan(spec: Spec, laps: Laps) -> int:
    if spec.device == "cpu":
        shim()
    from torchtitan.config import JobConfig
    from torchtitan.models.llama3 import TransformerModelArgs, get_train_spec
    from torchtitan.protocols.train_spec import register_train_spec
    from torchtitan.tools.logging import init_logger
    from torchtitan.train import Trainer

    m = spec.model
    if m["family"] != "llama" or m["head_dim"] * m["num_attention_heads"] != m["hidden_size"]:
        raise SystemExit("torchtitan 0.2.2 has no such model")
    if spec.bf16 and spec.shard == 1 and spec.tensor * spec.pipeline > 1:
        raise SystemExit(
            "torchtitan 0.2.2 computes in fp32 with tensor or pipeline parallel and without FSDP"
        )

    class Batches:
        def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
            for step in range(len(spec.rows)):
                size = spec.microbatch * (spec.microbatches if spec.pipeline > 1 else 1)
                for ids, target in zip(*(each.split(size) for each in spec.share(step)), strict=True):
                    yield {"input": ids}, target

    class Timed(Trainer):  # type: ignore[misc]
        def forward_backward_step(self, **given: Any) -> Tensor:
            loss: Tensor = super().forward_backward_step(**given)
            whole = getattr(loss, "full_tensor", lambda: loss)()
            self.loss = self.loss + whole.detach()
            return loss

        def train_step(self, batches: Any) -> None:
            self.loss = torch.zeros((), device=self.device)
            super().train_step(batches)
            # It divides by the tokens of all ranks.
            laps.lap(self.loss * spec.data_parallel if spec.pipeline == 1 or self.pp_has_last_stage else None)

    config = JobConfig()
    config.job.dump_folder = str(spec.folder / "torchtitan")
    config.debug.seed = 1
    config.model.name, config.model.flavor = "peers", "peers"
    config.optimizer.lr = spec.lr
    config.lr_scheduler.warmup_steps, config.lr_scheduler.decay_ratio = 2, 0.0
    training, parallelism = config.training, config.parallelism
    training.seq_len, training.global_batch_size = spec.sequence, spec.batch
    training.local_batch_size = spec.microbatch * (spec.microbatches if spec.pipeline > 1 else 1)
    training.steps = spec.warm_up + spec.steps
    training.mixed_precision_param = "bfloat16" if spec.bf16 else "float32"
    parallelism.data_parallel_shard_degree = spec.shard
    parallelism.data_parallel_replicate_degree = spec.replicate
    parallelism.tensor_parallel_degree = spec.tensor
    parallelism.pipeline_parallel_degree = spec.pipeline
    parallelism.pipeline_parallel_microbatch_size = spec.microbatch
    config.activation_checkpoint.mode = "full" if spec.recompute else "none"
    config.compile.enable = spec.device == "cuda"
    config.metrics.disable_color_printing = True
    args = TransformerModelArgs(
        dim=m["hidden_size"],
        n_layers=m["num_hidden_layers"],
        n_heads=m["num_attention_heads"],
        n_kv_heads=m["num_key_value_heads"],
        vocab_size=m["vocab_size"],
        # It rounds the width up to a multiple: this makes it exactly intermediate_size.
        multiple_of=m["intermediate_size"],
        ffn_dim_multiplier=m["intermediate_size"] / (8 * m["hidden_size"] / 3) / 2,
        norm_eps=m["rms_norm_eps"],
        rope_theta=m["rope_theta"],
        max_seq_len=spec.sequence,
    )
    titan = get_train_spec()
    titan.model_args = {"peers": args}
    titan.build_tokenizer_fn = None
    titan.build_dataloader_fn = lambda **_: Batches()
    titan.state_dict_adapter = None
    register_train_spec("peers", titan)
    init_logger()
    trainer = Timed(config)
    parameters = sum(p.numel() for part in trainer.model_parts for p in part.parameters())
    trainer.train()
    trainer.close()
    return parameters


# -- transformers


def transformers(spec: Spec, laps: Laps) -> int:
    if spec.tensor * spec.pipeline > 1:
        raise SystemExit(
            "transformers' Trainer has no pipeline parallel, and its tensor parallel is not set up here"
        )
    if spec.shard > 1 and spec.device == "cpu":
        raise SystemExit(
            "accelerate trains with DDP on a CPU, whatever it is told about FSDP: see layout dp2"
        )
    from torch.utils.data import Dataset, SequentialSampler
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    names = [
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings"),
    ]
    config = AutoConfig.for_model(
        spec.model["family"],
        **{name: spec.model[name] for name in names},
        max_position_embeddings=spec.sequence,
        rope_parameters={"rope_type": "default", "rope_theta": spec.model["rope_theta"]},
        use_cache=False,
    )
    model = AutoModelForCausalLM.from_config(config)
    parameters = sum(p.numel() for p in model.parameters())
    flat = spec.rows.reshape(-1, spec.sequence + 1)
    losses: list[Tensor] = []

    class Rows(Dataset[dict[str, Tensor]]):
        def __len__(self) -> int:
            return len(flat)

        def __getitem__(self, i: int) -> dict[str, Tensor]:
            row = torch.from_numpy(np.asarray(flat[i]).astype(np.int64))
            return {"input_ids": row[:-1], "labels": row[1:], "shift_labels": row[1:]}

    class Timed(Trainer):  # type: ignore[misc]
        def _get_train_sampler(self, *_: Any) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

        def training_step(self, *given: Any, **named: Any) -> Tensor:
            losses.append(super().training_step(*given, **named).detach())
            return losses[-1]

    class Lap(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            laps.lap(torch.stack(losses).sum())
            losses.clear()

    arguments = TrainingArguments(
        output_dir=str(spec.folder / "transformers"),
        per_device_train_batch_size=spec.microbatch,
        gradient_accumulation_steps=spec.microbatches,
        max_steps=spec.warm_up + spec.steps,
        learning_rate=spec.lr,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=2,
        weight_decay=0.1,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        bf16=spec.bf16,
        torch_compile=spec.device == "cuda",
        gradient_checkpointing=spec.recompute,
        use_cpu=spec.device == "cpu",
        fsdp=spec.shard > 1,
        fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": [type(model.model.layers[0]).__name__]}
        if spec.shard > 1
        else None,
        average_tokens_across_devices=False,  # all rows have the same number: one collective less
        remove_unused_columns=False,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    Timed(model=model, args=arguments, train_dataset=Rows(), callbacks=[Lap()]).train()
    return parameters


# -- the hand-written loop


class Attention(nn.Module):
    def __init__(self, m: dict[str, Any]) -> None:
        super().__init__()
        d, self.head_dim = m["hidden_size"], m["head_dim"]
        heads, kv = m["num_attention_heads"] * self.head_dim, m["num_key_value_heads"] * self.head_dim
        self.q, self.k, self.v = (nn.Linear(d, width, bias=m["qkv_bias"]) for width in (heads, kv, kv))
        self.o = nn.Linear(heads, d, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = (a * cos + torch.cat((-a.chunk(2, -1)[1], a.chunk(2, -1)[0]), -1) * sin for a in (q, k))
        out = F.scaled_dot_product_attention(
            q.to(v.dtype), k.to(v.dtype), v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        )
        return self.o(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, m: dict[str, Any]) -> None:
        super().__init__()
        d, width = m["hidden_size"], m["intermediate_size"]
        self.gate, self.up = nn.Linear(d, width, bias=False), nn.Linear(d, width, bias=False)
        self.down = nn.Linear(width, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, m: dict[str, Any]) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = (nn.RMSNorm(m["hidden_size"], m["rms_norm_eps"]) for _ in range(2))
        self.attention, self.mlp = Attention(m), MLP(m)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x), cos, sin)
        return x + self.mlp(self.norm_2(x))


class Model(nn.Module):
    """A llama or qwen2 decoder, or one pipeline stage of it."""

    def __init__(self, spec: Spec, stage: int) -> None:
        super().__init__()
        m = spec.model
        first, last = stage == 0, stage == spec.pipeline - 1
        layers = m["num_hidden_layers"] // spec.pipeline
        self.embed = nn.Embedding(m["vocab_size"], m["hidden_size"]) if first else None
        self.layers = nn.ModuleList(Block(m) for _ in range(layers))
        self.norm = nn.RMSNorm(m["hidden_size"], m["rms_norm_eps"]) if last else None
        self.head = nn.Linear(m["hidden_size"], m["vocab_size"], bias=False) if last else None
        self.recompute = spec.recompute
        powers = torch.arange(0, m["head_dim"], 2) / m["head_dim"]
        angles = torch.outer(torch.arange(spec.sequence), m["rope_theta"] ** -powers).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embed is None else self.embed(x)
        for block in self.layers:
            if self.recompute:
                x = torch.utils.checkpoint.checkpoint(block, x, self.cos, self.sin, use_reentrant=False)
            else:
                x = block(x, self.cos, self.sin)
        return x if self.head is None or self.norm is None else self.head(self.norm(x))


def split(model: Model, spec: Spec, mesh: Any) -> None:
    """Tensor parallel with sequence parallel, then FSDP2, in place."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    if spec.tensor > 1:
        whole = {"desired_input_layouts": (Replicate(),)}
        block_plan = {
            "norm_1": SequenceParallel(),
            "norm_2": SequenceParallel(),
            "attention": PrepareModuleInput(
                input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
            ),
            "mlp": PrepareModuleInput(input_layouts=(Shard(1),), **whole),
            **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
            **{f"mlp.{name}": ColwiseParallel() for name in ("gate", "up")},
            **{name: RowwiseParallel(output_layouts=Shard(1)) for name in ("attention.o", "mlp.down")},
        }
        for block in model.layers:
            parallelize_module(block, mesh["tensor"], block_plan)
        plan = {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
        }
        parallelize_module(model, mesh["tensor"], {k: v for k, v in plan.items() if getattr(model, k)})
    if spec.device == "cuda":
        for block in model.layers:
            block.compile()
    if spec.shard > 1:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if spec.bf16 else MixedPrecisionPolicy()
        for block in model.layers:
            fully_shard(block, mesh=mesh["data"], mp_policy=policy)
        fully_shard(model, mesh=mesh["data"], mp_policy=policy)


def hand_written(spec: Spec, laps: Laps) -> int:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import loss_parallel

    device = torch.device("cuda", spec.local_rank) if spec.device == "cuda" else torch.device("cpu")
    if spec.device == "cuda":
        torch.cuda.set_device(device)
    mesh, stage = None, 0
    if spec.tensor * spec.data_parallel * spec.pipeline > 1:
        dist.init_process_group("nccl" if spec.device == "cuda" else "gloo")
        sizes = (spec.pipeline, spec.data_parallel, spec.tensor)
        mesh = init_device_mesh(spec.device, sizes, mesh_dim_names=("pipeline", "data", "tensor"))
        stage = mesh.get_local_rank("pipeline")
    torch.manual_seed(stage)
    with device:
        model = Model(spec, stage)
    parameters = sum(p.numel() for p in model.parameters())
    split(model, spec, mesh)
    last = stage == spec.pipeline - 1
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=spec.lr,
        betas=(0.9, 0.95),
        fused=True,
    )
    schedule = None
    trained = nn.parallel.DistributedDataParallel(model) if spec.replicate > 1 else model

    def loss_of(logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())

    compiled_loss = torch.compile(loss_of) if spec.device == "cuda" and spec.tensor == 1 else loss_of
    autocast: AbstractContextManager[Any] = nullcontext()
    if spec.bf16 and spec.shard == 1:
        autocast = torch.autocast(spec.device, torch.bfloat16)
    if spec.pipeline > 1:
        assert mesh is not None
        part = PipelineStage(model, stage, spec.pipeline, device, group=mesh.get_group("pipeline"))
        schedule = Schedule1F1B(part, spec.microbatches, loss_fn=loss_of)

    def backward(ids: Tensor, target: Tensor) -> Tensor | None:
        """Gradients of this rank's rows; their mean loss."""
        if schedule is not None:
            losses: list[Tensor] | None = [] if last else None
            schedule.step(*([ids] if stage == 0 else []), target=target if last else None, losses=losses)
            return torch.stack([_whole(each) for each in losses]).mean() if losses else None
        total = torch.zeros((), device=device)
        for x, y in zip(ids.split(spec.microbatch), target.split(spec.microbatch), strict=True):
            with autocast:
                loss = compiled_loss(trained(x), y) / spec.microbatches
            loss.backward()
            total += _whole(loss.detach())
        return total

    def _whole(tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    for step in range(spec.warm_up + spec.steps):
        ids, target = (each.to(device, non_blocking=True) for each in spec.share(step))
        with loss_parallel() if spec.tensor > 1 else nullcontext():
            loss = backward(ids, target)
        norm = _whole(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
        if mesh is not None and spec.pipeline > 1:
            squared = norm.square()
            dist.all_reduce(squared, group=mesh.get_group("pipeline"))
            norm = squared.sqrt()
        nn.utils.clip_grads_with_norm_(list(model.parameters()), 1.0, norm)
        for group in optimizer.param_groups:
            group["lr"] = spec.lr * min(1.0, (step + 1) / 2)
        optimizer.step()
        optimizer.zero_grad()
        laps.lap(loss)
    return parameters


PEERS = {"torchtitan": torchtitan, "transformers": transformers, "hand-written": hand_written}


def main() -> None:
    path = Path(sys.argv[1])
    spec = Spec(path)
    laps = Laps(spec)
    try:
        laps.write(PEERS[spec.contestant](spec, laps))
    except BaseException as error:  # bench/peers.py prints what it says
        text = str(error) if isinstance(error, SystemExit) else f"{type(error).__name__}: {error}"
        (spec.folder / f"failed-{spec.rank}").write_text(text)
        raise
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
