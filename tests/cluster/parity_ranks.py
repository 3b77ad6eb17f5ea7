"""Runs the same training in many layouts, each as forked ranks on gloo, and leaves what every rank saw in files.

    python parity_ranks.py CASES.json OUT_FOLDER

A case is {"name", "layout": {...}, "tied", ...}. Ranks are forked from this one process, which has imported torch.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
import traceback
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import async_order
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from tqdm import tqdm

from seatrial.base.box import Box
from seatrial.checkpoint.manifest import Progress
from seatrial.checkpoint.write import Piece
from seatrial.data.loader import NO_TARGET
from seatrial.job import job_from_text, loss_rows, parts, preset_text
from seatrial.job.architecture import Architecture
from seatrial.job.job import Job
from seatrial.job.layout import Layout
from seatrial.job.lora import Lora
from seatrial.job.parameters import is_router_bias
from seatrial.job.schema import GroupSection, OptimizerSection
from seatrial.model import lora
from seatrial.model.hf import HuggingFaceWeights
from seatrial.model.initialise import RandomWeights
from seatrial.parallel import collectives, context, expert, overlap, overlap_grad, packed, ring
from seatrial.parallel.build import ParallelModel, Settings
from seatrial.parallel.loss import LoadBalancing
from seatrial.parallel.mesh import Mesh, build_mesh
from seatrial.parallel.offload import ActivationOffload
from seatrial.record.folder import RunFolder
from seatrial.train.optimizer import build_optimizer
from seatrial.train.step import train_step

sys.path.insert(0, str(Path(__file__).parents[1]))
import flash_on_cpu
import saving

TIMEOUT = timedelta(seconds=60)
SEQUENCES, LENGTH, MICROBATCH = 16, 64, 2
LR, CLIP = 3e-3, 1.0
KERNELS: list[torch.library.Library] = []  # they are there as long as these live
LOGITS = 2**13  # of a part of the loss: four parts a microbatch, two under tensor parallel

ARCH = Architecture(
    family="qwen2",
    vocab_size=264,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=256,
    rope_theta=1e6,
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
    qkv_bias=True,
    qk_norm=False,
    # Large enough that logits differ: with tiny weights every layout gives the same loss, right or wrong.
    initializer_range=0.1,
)


EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    # Large, so that a balance loss of the wrong size shows in every gradient.
    "router_aux_loss_coef": 0.1,
}


DEEPSEEK: dict[str, Any] = {
    "sigmoid_router": True,
    "n_shared_experts": 3,  # together of another width than all heads, by which selective recomputation would mistake them
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "partial_rotary_factor": 0.5,
}


class OneSided(RandomWeights):
    """Weights whose routers never choose the second half of the experts: their logits are 0, and one of two others is more."""

    def read(self, name: str, box: Box, dtype: torch.dtype) -> Tensor:
        if not name.endswith("mlp.gate.weight"):
            return super().read(name, box, dtype)
        rows_XD = super().read(name, Box.whole(self._shapes[name]), dtype)
        rows_XD[1::2] = -rows_XD[::2]
        rows_XD[len(rows_XD) // 2 :] = 0
        return rows_XD[box.slices()]


class NoisyWeights(RandomWeights):
    """Random weights with norms that are not 1, biases and adapters that are not 0, so that a lost gradient of one shows."""

    def read(self, name: str, box: Box, dtype: torch.dtype) -> Tensor:
        values = super().read(name, box, dtype)
        if name.endswith(("norm.weight", ".bias")) or is_router_bias(name):
            size = self._shapes[name][0]
            generator = torch.Generator().manual_seed(sum(name.encode()))
            noise = 0.05 * torch.randn(size, generator=generator)
            values = values + noise[box.slices()[0]].to(dtype)
        if name.endswith(lora.B):
            generator = torch.Generator().manual_seed(sum(name.encode()))
            values = 0.3 * torch.randn(self._shapes[name], generator=generator)[box.slices()].to(dtype)
        return values


def batch(step: int) -> Tensor:
    """[B, T + 1] arithmetic progressions, which can be learned; the same in every layout."""
    generator = torch.Generator().manual_seed(1234 + step)
    start = torch.randint(0, ARCH.vocab_size, (SEQUENCES, 1), generator=generator)
    stride = torch.randint(1, 5, (SEQUENCES, 1), generator=generator)
    return (start + stride * torch.arange(LENGTH + 1)) % ARCH.vocab_size


def own_rows(mesh: Mesh, size: int = SEQUENCES) -> slice:
    """Of the first `size` rows of a batch, those of this rank."""
    share = size // mesh.layout.data_parallel
    return slice(mesh.data_rank * share, (mesh.data_rank + 1) * share)


def own_batch(step: int, mesh: Mesh, size: int = SEQUENCES) -> tuple[Tensor, Tensor]:
    """[b, T] tokens and targets of this rank."""
    rows = batch(step)[own_rows(mesh, size)]
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def documents(step: int) -> Tensor:
    """[B, T] numbers of documents of one to many tokens, in every sequence others; the same in every layout."""
    generator = torch.Generator().manual_seed(4321 + step)
    begins = torch.rand(SEQUENCES, LENGTH, generator=generator) < 0.08
    return begins.cumsum(dim=1, dtype=torch.int32)


def counted(step: int, case: dict[str, Any]) -> Tensor:
    """[B, T] which targets count: of a sequence nearly all or nearly none, of two sequences of a microbatch none."""
    generator = torch.Generator().manual_seed(987 + step)
    share_B1 = torch.rand(SEQUENCES, 1, generator=generator) ** 4
    counts = torch.rand(SEQUENCES, LENGTH, generator=generator) < share_B1
    counts[2:4] = counts[8:12] = False  # with four data-parallel ranks, nothing of one of them
    counts[5] = True
    return counts & (step != case.get("nothing_in"))


def build(case: dict[str, Any], mesh: Mesh, source: Any) -> ParallelModel:
    if case.get("packed"):  # as where the kernel exists
        KERNELS.append(flash_on_cpu.register())
        packed.packs_documents = lambda *_: True
    settings = Settings(
        sequence_length=LENGTH,
        microbatch=case.get("microbatch", MICROBATCH),
        masked=case.get("masked", False),
        precision=case.get("precision", "fp32"),
        fp8_scaling=case.get("fp8_scaling", "rowwise"),
        activation_checkpointing=case.get("activation_checkpointing", "none"),
        recompute_every_layers=case.get("recompute_every_layers", 1),
        offload_activations=case.get("offload_activations", False),
        compile=case.get("compile", False),
        reshard_after_forward=case.get("reshard_after_forward", True),
        async_tensor=case.get("async_tensor", False),
        ring_attention=case.get("ring_attention", False),
        accumulate=case.get("accumulate", "whole"),
    )
    model = ParallelModel(arch_of(case), mesh, settings, source, timeout=TIMEOUT)
    sabotage(model, case.get("sabotage"))
    return model


def arch_of(case: dict[str, Any]) -> Architecture:
    arch = replace(
        ARCH,
        tie_word_embeddings=case["tied"],
        num_hidden_layers=case.get("layers", ARCH.num_hidden_layers),
        num_key_value_heads=case.get("kv_heads", ARCH.num_key_value_heads),
    )
    if case.get("family") == "qwen3":
        arch = replace(arch, family="qwen3", qkv_bias=False, qk_norm=True)
    if case.get("family") == "qwen3_moe":
        arch = replace(arch, family="qwen3_moe", qkv_bias=False, qk_norm=True, **EXPERTS)
    if case.get("family") == "glm4_moe":
        dense = case.get("first_dense", 0)
        mixture = {**EXPERTS, **DEEPSEEK, "first_k_dense_replace": dense}
        arch = replace(arch, family="glm4_moe", qk_norm=True, **mixture)
    if "lora" in case:
        arch = replace(arch, lora=Lora.of(case["lora"]))
    return arch


def sabotage(model: ParallelModel, what: str | None) -> None:
    """Faults as torch's own combinations have had them: the loss of the first step stays right."""
    if what == "norm gradients not summed":
        model._partial = []
    elif what == "targets of each rank alone":
        # The mean of means: each rank divides by what it counts itself, and by the number of ranks.
        model._count = lambda target_BT: model._divisor.copy_(  # type: ignore[method-assign]
            (target_BT != NO_TARGET).sum().clamp(min=1) * model.mesh.layout.data_parallel
        )
    elif what == "tied gradients not summed":
        model._ends = None
    elif what == "documents of another microbatch":
        if model.mesh.at.pipeline == 1:
            pipeline = model._pipeline
            assert pipeline is not None
            whole = pipeline.forward_backward

            def shifted(ids_BT: Tensor, target_BT: Tensor, documents: Tensor) -> Tensor:
                return whole(ids_BT, target_BT, documents.roll(MICROBATCH * len(documents) // len(ids_BT), 0))

            pipeline.forward_backward = shifted  # type: ignore[method-assign, assignment]
    elif what == "balance loss and positions counted by every tensor rank":
        balance = model.stages[-1].balance
        assert isinstance(balance, LoadBalancing)
        balance._factor *= model.mesh.layout.tensor
        model.take_expert_counts = lambda: torch.cat([stage.sent_LX for stage in model.stages])  # type: ignore[method-assign, misc]
    elif what == "balance of own positions":
        balance = model.stages[-1].balance
        assert isinstance(balance, LoadBalancing)
        balance._group, balance._rows = None, balance._rows // 2
    elif what == "positions left in the order of parts":
        overlap.Cut.in_order = lambda cut, x: x.reshape(cut.sequences, -1, x.shape[-1])  # type: ignore[method-assign]
    elif what == "a rank that ends before its second part":
        if model.mesh.at.tensor == 1:
            calls, launch = count(), overlap.all_gather_single

            def ending(*args: Any, **kwargs: Any) -> Any:
                if next(calls) == 1:
                    os._exit(1)
                return launch(*args, **kwargs)

            overlap.all_gather_single = ending
    elif what == "slots returned in the order of experts":
        expert.FromSlots = OrderOfExperts  # type: ignore[misc, assignment]
    elif what == "gradients of experts not summed":
        for block in model.stages[0].blocks:
            _, of_experts = block._get_fsdp_state()._fsdp_param_groups  # type: ignore[operator, union-attr]
            of_experts._reduce_scatter_comm = OwnPart()
    elif what == "biases moved by each rank's own positions":
        whole = Mesh.sum_over_ranks
        Mesh.sum_over_ranks = lambda mesh, x: x if x.dim() == 2 else whole(mesh, x)  # type: ignore[method-assign]
    elif what == "keys in the order of ranks":
        context.in_order = lambda both_BTE, size: both_BTE
    elif what == "later keys seen":
        ring._pairs = lambda *_: (slice(None), slice(None))
    elif what == "gradients of others' keys lost":
        whole_gradients = ring._gradients

        def of_own_keys(*args: Any, causal: bool) -> tuple[Tensor, ...]:
            of_q, of_k, of_v = whole_gradients(*args, causal=causal)
            return of_q, of_k * causal, of_v * causal

        ring._gradients = of_own_keys  # type: ignore[assignment]
    elif what == "gradients of keys not summed":
        ranks = range(model.mesh.layout.context)
        mine = model.mesh.context_rank

        def own_alone(x_BTD: Tensor, group: dist.ProcessGroup) -> Tensor:
            return x_BTD.chunk(len(ranks), 1)[mine]

        collectives.reduce_scatter_positions = own_alone
    elif what == "weight gradients of the first part only":
        whole_gradients = overlap_grad.all_gather_matmul_backward

        def first_part(grads: Any, *args: Any, **kwargs: Any) -> Any:
            of_input, _, of_biases = whole_gradients(grads, *args, **kwargs)
            n = grads[0].shape[0] // args[2].parts
            first = [torch.cat((grad[:n], torch.zeros_like(grad[n:]))) for grad in grads]
            return of_input, whole_gradients(first, *args, **{**kwargs, "of_input": False})[1], of_biases

        overlap_grad.all_gather_matmul_backward = first_part
    elif what is not None:
        raise ValueError(what)


class OrderOfExperts(torch.autograd.Function):
    """In place of `FromSlots`: as they are."""

    @staticmethod
    def forward(ctx: Any, y_QD: Tensor, order_Q: Tensor, slot_Q1: Tensor) -> Tensor:
        return y_QD.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].clone(), None, None


class OwnPart:
    """In place of FSDP2's reduce-scatter: each rank's own gradient."""

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, **_: Any
    ) -> None:
        output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()])


def train(case: dict[str, Any], mesh: Mesh) -> dict[str, Any]:
    """Loss and gradient norm of each step, this rank's gradients of the first one, and its weights at the end.

    With `ramp`, the sequences of each step, the gradients are those of the last one.
    """
    weights_of = OneSided if case.get("one_sided") else NoisyWeights
    model = build(case, mesh, weights_of(arch_of(case), seed=1))
    settings = OptimizerSection(**{"lr": LR, **case.get("optimizer", {})})
    optimizer = build_optimizer(model.shards, settings, mesh)
    if case.get("oracle"):  # torch's in its place
        optimizer.prepares = False
        optimizer.update = torchs_muon({s.name: s.parameter for s in model.shards}, settings)  # type: ignore[method-assign]
    gradients: list[tuple[str, tuple[int, ...], Tensor]] = []
    update = optimizer.update

    def keep_gradients(lr: float, scale: Tensor | None) -> None:
        gradients.clear()
        for s in model.shards:
            if not s.trained:
                assert s.grad is None, f"{s.name} is frozen and has a gradient"
                continue
            assert s.grad is not None, f"{s.name} has no gradient"
            gradients.append((s.name, s.box.offsets, s.grad.clone()))
        if "ramp" not in case:
            optimizer.update = update  # type: ignore[method-assign]
        update(lr, scale)

    optimizer.update = keep_gradients  # type: ignore[method-assign]
    history, balance, tokens, load = [], [], [], []
    routed: list[Tensor] = []
    take = model.take_expert_counts

    def keep_counts() -> Tensor | None:
        count_LX = take()
        if count_LX is not None:
            routed.append(count_LX.clone())  # it is summed over ranks in place
        return count_LX

    model.take_expert_counts = keep_counts  # type: ignore[method-assign]
    order: list[str] = []
    for step in range(case["steps"]):
        size = case["ramp"][step] if "ramp" in case else SEQUENCES
        mine = own_rows(mesh, size)
        ids, target = own_batch(step, mesh, size)
        if case.get("masked"):
            target.masked_fill_(~counted(step, case)[mine], NO_TARGET)
        last = step == case["steps"] - 1
        with async_order.recorded() if last and case.get("order") else nullcontext(order) as order:
            result = train_step(
                model,
                optimizer,
                ids,
                target,
                documents(step)[mine] if case.get("documents") else None,
                lr=settings.lr,
                clip_norm=CLIP,
            )
        values = result.values()
        history.append((values.loss, values.grad_norm))
        balance.append(values.balance_loss)
        load.append(values.expert_load)
        tokens.append(values.counted)
    logits = []
    if case.get("evaluate"):
        with torch.no_grad():
            # Other batches than in training, as an evaluation has them.
            logits = [model.stages[0](ids[:n]) for n in (1, 3, 4, 5)]
    return {
        "logits": logits,
        "history": history,
        "balance": balance,
        "load": load,
        "routed": routed,
        "tokens": tokens,
        "gradients": gradients,
        "weights": [(s.name, s.box.offsets, s.local.clone()) for s in model.shards],
        "order": "".join(order),
        "offloaded": offloaded(model),
    }


def offloaded(model: ParallelModel) -> int:
    """How many inputs of layers were in host memory at once."""
    kept = model.stages[0].layer_context
    return len(kept._transfers._spare) if isinstance(kept, ActivationOffload) else 0


def torchs_muon(
    whole: dict[str, nn.Parameter], settings: OptimizerSection
) -> Callable[[float, Tensor | None], None]:
    """An update by torch.optim.Muon, of each expert as a matrix of its own, and torch.optim.AdamW."""
    matrices: dict[str, list[nn.Parameter]] = {}
    plain: list[dict[str, Any]] = []
    hidden: list[dict[str, Any]] = []
    for name, p in whole.items():
        group = settings.group_of(name) or GroupSection(match=name)
        decay = settings.weight_decay if p.dim() > 1 else 0.0
        decay = decay if group.weight_decay is None else group.weight_decay
        own = {"params": [p], "factor": group.lr_factor, "weight_decay": decay}
        if p.dim() < 2 or "embed_tokens" in name or "lm_head" in name:
            plain.append(own)
        else:
            matrices[name] = [p] if p.dim() == 2 else [nn.Parameter(part) for part in p.detach()]
            hidden.append({**own, "params": matrices[name]})
    muon = torch.optim.Muon(
        hidden,
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        momentum=settings.momentum,
        nesterov=settings.nesterov,
        adjust_lr_fn=settings.adjust_lr,
    )
    adamw = torch.optim.AdamW(
        plain, lr=settings.lr, betas=(settings.beta1, settings.beta2), eps=settings.eps, fused=True
    )

    def update(lr: float, scale: Tensor | None) -> None:
        for name, p in whole.items():
            assert p.grad is not None
            if scale is not None:
                p.grad.mul_(scale)
            if name in matrices and p.dim() == 3:
                for part, grad in zip(matrices[name], p.grad, strict=True):
                    part.grad = grad
        for optimizer, factor in ((muon, 1.0), (adamw, settings.adamw_lr_factor)):
            for group in optimizer.param_groups:
                group["lr"] = lr * factor * group["factor"]
            optimizer.step()
        for p in whole.values():
            p.grad = None

    return update


def save(case: dict[str, Any], mesh: Mesh, to: str, step: int, pieces: Iterable[Piece]) -> None:
    """A checkpoint of what each rank owns of `pieces`, in the folder `to`."""
    manifest = saving.new_manifest(
        Progress(step, 0, 0, 1), architecture=arch_of(case).as_dict(), layout=mesh.layout.as_dict()
    )

    def agree(ok: bool) -> int:
        return int(mesh.sum_over_ranks(torch.tensor([0.0 if ok else 1.0])).item())

    Path(to).mkdir(exist_ok=True)
    owned = [piece for piece in pieces if piece.owner]
    saving.save(Path(to), manifest, owned, rank=mesh.rank, world_size=mesh.layout.world_size, agree=agree)


def convert(case: dict[str, Any], mesh: Mesh) -> dict[str, Any]:
    """A Hugging Face folder into a checkpoint, through this layout."""
    weights = HuggingFaceWeights(Path(case["from"]))
    weights.check(arch_of(case))
    model = build(case, mesh, weights)
    pieces = [Piece(f"model/{s.name}", s.local, s.box, s.whole, owner=s.owner) for s in model.shards]
    save(case, mesh, case["to"], 1, pieces)
    return {}


def job_and_folder(case: dict[str, Any], mesh: Mesh, *settings: str) -> tuple[Job, RunFolder]:
    """For a loop in this layout: a job with the batches of `batch`, and its run folder in case["root"]."""
    layout, root = mesh.layout, Path(case["root"])
    job = job_from_text(
        preset_text("first-voyage"),
        name=case["name"],
        base_folder=root,
        overrides=[
            *("cluster.nodes=1", f"cluster.gpus_per_node={layout.world_size}"),
            *(f"parallel.{n}={getattr(layout, n)}" for n in ("tensor", "pipeline", "context", "replicate")),
            f"parallel.shard={layout.sample_shards}",
            *(f"train.global_batch={SEQUENCES}", f"train.microbatch={MICROBATCH}"),
            *(f"train.sequence_length={LENGTH}", "checkpoint.every_steps=1000", *settings),
        ],
    )
    folder = RunFolder(root / case["name"])
    for path in (folder.checkpoints, folder.control):
        path.mkdir(parents=True, exist_ok=True)
    folder.generation_file.write_text("1")
    return job, folder


Work = Callable[[dict[str, Any], Mesh], dict[str, Any]]


def join(layout: Layout, rank: int, port: int) -> None:
    """Begin torch.distributed on gloo, of all ranks of `layout` on this machine."""
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        WORLD_SIZE=str(layout.world_size),
        RANK=str(rank),
        GLOO_SOCKET_IFNAME="lo",
    )
    dist.init_process_group("gloo", timeout=TIMEOUT)


def rank_main(case: dict[str, Any], rank: int, port: int, out: Path, work: Work) -> None:
    layout = Layout(**case["layout"])
    join(layout, rank, port)
    whole = case.get("optimizer", {}).get("name") == "muon"
    mesh = build_mesh(layout, torch.device("cpu"), TIMEOUT, with_stage=whole)
    torch.save(work(case, mesh), out / f"{case['name']}.{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def in_processes(bodies: Iterable[Callable[[], object]]) -> bool:
    """Call all of them at once, each in a process of its own; whether none of them failed."""
    pids = []
    for body in bodies:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                body()
                code = 0
            except Exception:  # noqa: BLE001  it must say why before it ends
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        pids.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    return not any(codes)


def run_case(case: dict[str, Any], out: Path, work: Work) -> bool:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    ranks = range(Layout(**case["layout"]).world_size)
    return in_processes(partial(rank_main, case, rank, port, out, work) for rank in ranks)


def _load_compiler() -> None:
    """Import torch's compiler and have it examine this CPU, once for all ranks: half of the time of a compilation."""
    inductor_config.compile_threads = (
        1  # no pool of threads, which a fork would lose; its variable is read at import
    )
    tqdm.monitor_interval = 0  # torch shows its progress with it: no thread
    torch.compile(lambda x_NN: x_NN.sin() @ x_NN)(torch.ones(8, 8))
    torch.compiler.reset()
    assert len(os.listdir("/proc/self/task")) == 1


def main(work: Work | None = None) -> int:
    """All cases, each rank doing `work`."""
    torch.set_num_threads(1)
    parts.ENOUGH = 1  # what is small here is cut into as many parts as what is large elsewhere
    loss_rows.LOGITS = LOGITS
    cases = json.loads(Path(sys.argv[1]).read_text())
    if any(case.get("compile") for case in cases):
        _load_compiler()
    gc.freeze()
    failed = [
        case["name"]
        for case in cases
        if not run_case(case, Path(sys.argv[2]), work or (convert if "from" in case else train))
    ]
    if failed:
        print("failed:", ", ".join(failed), file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
