"""The job file as types: sections, keys, defaults and what each key means.

The limits of single keys are here. Rules between keys are in `rules.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

from pydantic import (
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    SerializerFunctionWrapHandler,
    Tag,
    model_serializer,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from seatrial.base.batches import BatchSizes
from seatrial.base.errors import InputError
from seatrial.base.registry import Registry
from seatrial.hardware.catalogue import AttentionKernel, Precision, find_gpu
from seatrial.job.callbacks import CALLBACKS, METRICS
from seatrial.job.families import FAMILIES
from seatrial.job.lora import LORA_TARGETS, LoraTarget
from seatrial.job.optimizers import ADAMW, MUON, OPTIMIZERS
from seatrial.job.ring import RING_POSITIONS
from seatrial.job.schedules import SCHEDULES
from seatrial.job.schema_base import Section, Text
from seatrial.job.schema_launchers import KubernetesSection, SlurmSection, SshSection
from seatrial.job.trackers import TRACKERS

# Every number has limits, far beyond any training run, so that arithmetic, clocks and memory cannot overflow.
Size = Annotated[int, Field(ge=1, le=10_000_000)]  # a dimension of the model
Count = Annotated[int, Field(ge=1, le=1_000_000_000)]  # of steps, tokens, sequences
CountOrNone = Annotated[int, Field(ge=0, le=1_000_000_000)]
Ranks = Annotated[int, Field(ge=1, le=1_000_000)]  # along one dimension of the mesh
Seconds = Annotated[float, Field(ge=1, le=2_678_400)]  # 31 days
SecondsOrNone = Annotated[float, Field(ge=0, le=2_678_400)]
Times = Annotated[float, Field(gt=1, le=1_000_000)]  # a ratio
Accumulate = Literal["whole", "sharded"]  # how gradients of microbatches add up
Fp8Scaling = Literal["rowwise", "tensorwise", "mxfp8"]  # what has a scale of its own in an FP8 product


VALIDATION_BATCHES = 32  # measured at most, unless the job says how many samples


def _one_or_several(value: Any) -> str:
    return "several" if isinstance(value, list) else "one"


# Tags, so that a wrong value is reported as the one kind that it resembles. `validate.py` knows them.
OneOrSeveral = Annotated[
    Annotated[Text, Tag("one")] | Annotated[list[Text], Field(min_length=1), Tag("several")],
    Discriminator(_one_or_several),
]


def _word_or_number(value: Any) -> str:
    return "word" if isinstance(value, str) else "number"


StepsOrAuto = Annotated[
    Annotated[Count, Tag("number")] | Annotated[Literal["auto"], Tag("word")],
    Discriminator(_word_or_number),
]

CopiesOrAuto = Annotated[
    Annotated[int, Field(ge=0, le=2), Tag("number")] | Annotated[Literal["auto"], Tag("word")],
    Discriminator(_word_or_number),
]


@dataclass(frozen=True)
class NameIn:
    """Accepts the names of a registry. An entry of another package is imported once a value asks for it."""

    registry: Registry[Any]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        names = self.registry.names()
        return handler(schema) | ({"enum": names} if names else {})

    def _check(self, value: str) -> str:
        if value in self.registry.own:  # most are: other packages need not be looked for
            return value
        if (names := self.registry.names()) and value not in names:
            raise PydanticCustomError("literal_error", "{expected}", {"expected": ", ".join(names)})
        try:
            self.registry.named(value)
        except InputError as error:
            raise PydanticCustomError("registry_error", "{message}", vars(error)) from None
        return value


class RopeScalingSection(Section):
    """Llama 3's RoPE scaling, as in config.json."""

    factor: Annotated[float, Field(gt=0, le=1_000_000)]
    low_freq_factor: Annotated[float, Field(gt=0, le=1_000_000)]
    high_freq_factor: Annotated[float, Field(gt=0, le=1_000_000)]
    original_max_position_embeddings: Count


class LoraSection(Section):
    """Low-rank adapters: they alone are trained, all other weights are frozen."""

    rank: Annotated[int, Field(ge=1, le=10_000)] = Field(description="rank of the adapters")
    alpha: Annotated[float, Field(gt=0, le=1_000_000)] = Field(
        description="adapters are scaled by alpha / rank"
    )
    targets: Annotated[list[LoraTarget], Field(min_length=1)] = Field(
        default=list(LORA_TARGETS), description="linear layers of a decoder layer that have an adapter"
    )


class ModelSection(Section):
    """Which model: a preset's name, or a Hugging Face config.json, or explicit sizes.

    Explicit sizes beside `preset` or `hf` replace that one size.
    """

    preset: Text | None = Field(default=None, description="name of a built-in model, such as qwen2.5-72b")
    hf: Text | None = Field(
        default=None, description="path of a Hugging Face config.json, or of the folder that contains one"
    )
    init_from: Text | None = Field(
        default=None,
        description="folder with a Hugging Face checkpoint to start from; without it the weights are random",
    )
    family: Annotated[str, NameIn(FAMILIES)] | None = None
    vocab_size: Size | None = None
    hidden_size: Size | None = None
    intermediate_size: Size | None = None
    num_hidden_layers: Size | None = None
    num_attention_heads: Size | None = None
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    max_position_embeddings: Count | None = None
    rope_theta: Annotated[float, Field(ge=1, le=1e15)] | None = None
    rms_norm_eps: Annotated[float, Field(ge=1e-20, le=1)] | None = None
    tie_word_embeddings: bool | None = None
    qkv_bias: bool | None = None
    qk_norm: bool | None = None
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] | None = None
    rope_scaling: RopeScalingSection | None = None
    initializer_range: Annotated[float, Field(ge=1e-6, le=10)] | None = None
    num_experts: Size | None = None
    num_experts_per_tok: Size | None = None
    moe_intermediate_size: Size | None = None
    norm_topk_prob: bool | None = None
    router_aux_loss_coef: Annotated[float, Field(ge=0, le=1000)] | None = None
    first_k_dense_replace: Annotated[int, Field(ge=0, le=10_000_000)] | None = None
    n_shared_experts: Size | None = None
    sigmoid_router: bool | None = None
    n_group: Size | None = None
    topk_group: Size | None = None
    routed_scaling_factor: Annotated[float, Field(gt=0, le=1000)] | None = None
    lora: LoraSection | None = Field(
        default=None, description="train low-rank adapters of the weights of `init_from`, which are frozen"
    )


class DataSection(Section):
    """What to train on: one source, or a blend of several by weight."""

    train: OneOrSeveral = Field(
        description='"builtin:python-library", a folder of prepared token shards, the address of such a folder on an '
        "object store, a Megatron .bin/.idx pair, or text, JSONL or Parquet files; a list of them is a blend"
    )
    weights: Annotated[list[Annotated[float, Field(gt=0, le=1e18)]], Field(min_length=1)] | None = Field(
        default=None,
        description="with a list: relative share of the samples from each source, in the same order; they need not sum to 1",
    )
    validation: Text | None = Field(
        default=None,
        description="one source, of the same kinds, on which the validation loss is measured; nothing of `train` is left out for it",
    )
    tokenizer: Text = Field(default="bytes", description='"bytes", or the path of a tokenizer.json')
    text_key: Text = Field(
        default="text",
        description="key (JSONL) or column (Parquet) of the text in files that are not a token store",
    )
    loss: Literal["answers", "all"] = Field(
        default="answers",
        description="what counts of conversations: only what the assistant says, or all; every token of texts counts",
    )
    attend_across_documents: bool = Field(
        default=True,
        description="tokens attend to earlier documents of their packed sequence; false: only to their own document",
    )
    cache_gb: Annotated[float, Field(gt=0, le=1_000_000)] = Field(
        default=20.0,
        description="GB of shards of an object store that a node keeps on its disk; the least recently used are removed",
    )

    @property
    def sources(self) -> tuple[str, ...]:
        """What `train` names, one or several."""
        return (self.train,) if isinstance(self.train, str) else tuple(self.train)


class ClusterSection(Section):
    """Where it runs."""

    launcher: Text = Field(
        default="local",
        description="what starts the nodes' agents: local (a virtual cluster of processes on this machine), slurm, "
        "kubernetes, ssh, or one that an installed package adds",
    )
    nodes: Annotated[int, Field(ge=1, le=100_000)] = Field(default=1, description="machines that train")
    gpus_per_node: Annotated[int, Field(ge=1, le=1024)] = Field(
        default=1, description="ranks on each node; CPU processes where there is no GPU"
    )
    spares: Annotated[int, Field(ge=0, le=100_000)] = Field(
        default=0, description="nodes that wait, ready to train, to replace a lost one"
    )
    gpu: Text | None = Field(
        default=None, description='name in the hardware catalogue, such as "B300 SXM"; detected if missing'
    )
    nvlink_domain: Annotated[int, Field(ge=1, le=100_000)] | None = Field(
        default=None,
        description="GPUs that NVLink joins, of whole nodes: 36 for NVL36; if missing 72 for GB200 and GB300 (NVL72), "
        "and those of one node for others",
    )
    network: Text | None = Field(
        default=None,
        description='name of the network between nodes, such as "InfiniBand NDR 8x400", for the planner',
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="auto: cuda where each rank has its own GPU"
    )
    port: Annotated[int, Field(ge=1024, le=65535)] | None = Field(
        default=None,
        description="TCP port of the process-group store on the first node; a free one if missing",
    )
    python: Text | None = Field(
        default=None,
        description="Python interpreter on the nodes that has Seatrial; the path of this one if missing, on Kubernetes python3",
    )
    bind: Text | None = Field(
        default=None,
        description="address, CIDR or network interface by which nodes reach each other; found by the route if missing",
    )
    namespaces: bool = Field(
        default=False,
        description="with the local launcher: each node has a network, /dev/shm, TMPDIR and host name of its own (root)",
    )


def joined_gpus(cluster: ClusterSection) -> int:
    """GPUs that NVLink joins: as written, else as sold."""
    if cluster.nvlink_domain is not None:
        return cluster.nvlink_domain
    gpu = find_gpu(cluster.gpu or "")
    usual = 1 if gpu is None else gpu.nvlink_domain or 1
    return usual if usual % cluster.gpus_per_node == 0 else cluster.gpus_per_node


class GpuSection(Section):
    """A GPU by its figures, for the planner alone; in place of `cluster.gpu`."""

    bf16_tflops: Annotated[float, Field(gt=0, le=1e6)] = Field(
        description="dense peak of bf16 matrix products, TFLOP/s"
    )
    best_bf16_tflops: Annotated[float, Field(gt=0, le=1e6)] | None = Field(
        default=None, description="the best rate at which one was measured; if missing, 0.75 of the peak"
    )
    hbm_gb: Annotated[float, Field(gt=0, le=1e6)] = Field(description="memory in GB, as data sheets count it")
    hbm_tb_s: Annotated[float, Field(gt=0, le=1e4)] = Field(description="its bandwidth, TB/s")
    link_gb_s: Annotated[float, Field(gt=0, le=1e6)] = Field(
        description="GB/s in one direction to the other GPUs that it is joined with"
    )
    watts: Annotated[float, Field(gt=0, le=1e5)] | None = Field(
        default=None, description="power limit; if missing, the usual one of the architecture"
    )
    architecture: Text | None = Field(
        default=None,
        description='whose kernels it runs: "Ampere", "Hopper", "Blackwell"; without one of them no speed is predicted',
    )


class NetworkSection(Section):
    """A network between nodes by its figures, for the planner alone; in place of `cluster.network`."""

    gbps_per_nic: Annotated[float, Field(gt=0, le=1e6)] = Field(
        description="Gb/s of one network card of a node, in one direction"
    )
    nics_per_node: Annotated[int, Field(ge=1, le=1024)] = Field(
        default=1, description="network cards of a node that training uses"
    )
    latency_us: Annotated[float, Field(ge=0, le=1e6)] = Field(
        description="microseconds that an empty message takes from node to node inside NCCL"
    )
    reached: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.95,
        description="share of the rate that large collectives reach: 0.95 was measured on InfiniBand",
    )
    oversubscription: Annotated[float, Field(ge=1, le=1000)] = Field(
        default=1.0,
        description="by how much the switches' links are less than the nodes'; every message between nodes gets that much less",
    )


class ParallelSection(Section):
    """How one model is divided among ranks. Missing sizes are 1; a missing `shard` takes the remaining ranks."""

    tensor: Ranks = Field(default=1, description="ranks that split each matrix; inside one node")
    pipeline: Ranks = Field(default=1, description="ranks among which the layers are divided")
    context: Ranks = Field(default=1, description="ranks that split each sequence")
    expert: Ranks = Field(
        default=1, description="ranks of `shard` among which the experts of each layer are divided"
    )
    replicate: Ranks = Field(
        default=1, description="copies of the sharded model, each with its part of the batch"
    )
    shard: Ranks | None = None
    schedule: Annotated[str, NameIn(SCHEDULES)] = Field(
        default="1f1b",
        description="order of forward and backward passes in the pipeline; installed packages can add others",
    )
    stages_per_rank: Annotated[int, Field(ge=1, le=10_000)] = Field(
        default=1, description="pipeline stages on each rank: 2 or more for interleaved-1f1b and zero-bubble"
    )
    reshard_after_forward: bool | None = Field(
        default=None,
        description="free the gathered weights between forward and backward: less memory, more communication; "
        "if missing, true without a pipeline and false with one, which would gather them for every microbatch",
    )
    async_tensor: bool = Field(
        default=False,
        description="split tensor-parallel products into parts, and send one part while the next is computed",
    )
    ring_attention: bool | None = Field(
        default=None,
        description="with context parallel, pass keys and values from rank to rank while attention is computed, and gather "
        f"none; if missing, where a rank has at least {RING_POSITIONS:,} positions of a sequence and NVLink does not reach all ranks",
    )

    @property
    def reshards(self) -> bool:
        """`reshard_after_forward`, or its default for this layout if it is missing."""
        return self.pipeline == 1 if self.reshard_after_forward is None else self.reshard_after_forward


class RampSection(Section):
    """A phase of `train.batch_ramp`."""

    steps: Count = Field(description="steps of this phase")
    global_batch: Count = Field(description="sequences a step in it")


class TrainSection(Section):
    """How many steps over how many tokens, in which precision."""

    steps: Count = Field(description="optimizer steps of the whole run")
    sequence_length: Count = Field(description="tokens a sequence")
    global_batch: Count = Field(description="sequences a step, whatever the layout")
    batch_ramp: list[RampSection] = Field(
        default=[],
        description="phases with a smaller batch at the beginning of training, one after the other; global_batch follows them",
    )
    microbatch: Count = Field(default=1, description="sequences a rank works on at once")
    precision: Precision = Field(
        default="bf16",
        description="of matrix products; weights stay fp32, and optimizer state has the precision that optimizer.name says; "
        "fp8: products of decoder layers, the rest in bf16",
    )
    fp8_scaling: Fp8Scaling = Field(
        default="rowwise",
        description="what has a scale of its own: rowwise: each vector of a product; tensorwise: each tensor; mxfp8: every 32 "
        "values of a vector, on Blackwell GPUs; with fp8 only",
    )
    attention: AttentionKernel = Field(
        default="auto",
        description="attention's kernel on GPUs: FlashAttention-2, cuDNN's or the memory-efficient one; auto: torch's choice of "
        "these; never one that keeps all scores",
    )
    activation_checkpointing: Literal["none", "selective", "full"] = Field(
        default="none",
        description="full: keep each layer's input only and recompute the rest; selective: also keep the outputs of matrix "
        "products and attention",
    )
    recompute_every_layers: Annotated[int, Field(ge=1, le=10_000)] = Field(
        default=1,
        description="which layers activation_checkpointing applies to: 1: all; 2: every second one of a stage",
    )
    offload_activations: bool = Field(
        default=False,
        description="inputs of recomputed layers are in host memory until their backward pass; with full recomputation",
    )
    accumulate: Literal["auto", "whole", "sharded"] = Field(
        default="auto",
        description="how gradients of microbatches add up: whole, reduced over ranks once a step, or sharded, reduced in "
        "each microbatch: less memory, more communication; auto: the planner chooses",
    )
    compile: bool | None = Field(
        default=None,
        description="torch.compile of each decoder layer; if missing, on GPUs, but not with zero-bubble",
    )
    deterministic: bool = Field(
        default=False,
        description="only kernels and reductions that give the same bits every time, for GPUs; CPU ranks are so anyway",
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(
        default=1234, description="of the weights and of the order of the data"
    )
    sample_prompt: str = Field(
        default="def ", description="the trained model continues this text at the end of the run"
    )
    sample_tokens: Annotated[int, Field(ge=0, le=1_000_000)] = Field(
        default=160, description="tokens it generates at the end; 0: none"
    )
    validate_every_steps: Count | None = Field(
        default=None,
        description="steps between measurements of the loss on data.validation; also after the last step",
    )
    validate_samples: Count | None = Field(
        default=None,
        description="samples of data.validation that are measured, always the same; "
        f"if missing all of them, at most {VALIDATION_BATCHES} global batches",
    )
    callbacks: Annotated[list[Annotated[str, NameIn(CALLBACKS)]], Field(min_length=1)] | None = Field(
        default=None,
        description="what rank 0 calls with the record of each step; installed packages add them",
    )
    metrics: Annotated[list[Annotated[str, NameIn(METRICS)]], Field(min_length=1)] | None = Field(
        default=None,
        description="further values of each step in metrics.jsonl; installed packages add them",
    )
    on_callback_error: Literal["warn", "stop"] | None = Field(
        default=None,
        description="what to do if a callback or metric raises an exception; if missing, warn and continue without it",
    )
    profile_ranks: (
        Annotated[list[Annotated[int, Field(ge=0, le=999_999)]], Field(min_length=1, max_length=64)] | None
    ) = Field(
        default=None, description="ranks that record a torch.profiler trace, to ranks/ of the run folder"
    )
    profile_first_step: Count = Field(default=10, description="the first step of these traces")
    profile_steps: Annotated[int, Field(ge=1, le=20)] = Field(
        default=2, description="steps in a trace; in each generation one is recorded if it runs these steps"
    )

    @property
    def batches(self) -> BatchSizes:
        """The global batch of each step."""
        return BatchSizes.of(
            self.global_batch, ((phase.steps, phase.global_batch) for phase in self.batch_ramp)
        )

    @property
    def tokens(self) -> int:
        """Of all steps."""
        return self.batches.total(self.steps) * self.sequence_length

    def validation_samples(self, available: int) -> int:
        """How many of the `available` validation samples are measured."""
        return min(available, self.validate_samples or VALIDATION_BATCHES * self.global_batch)


class GroupSection(Section):
    """Parameters with a learning rate or weight decay of their own: an entry of `optimizer.groups`."""

    match: Text = Field(
        description='names of the model\'s parameters, `*` for any characters: "*norm.weight", "model.embed_tokens.weight"'
    )
    lr_factor: Annotated[float, Field(ge=0, le=1000)] = Field(
        default=1.0, description="factor on the learning rate of the schedule; 0: they stay as they are"
    )
    weight_decay: Annotated[float, Field(ge=0, le=100)] | None = Field(
        default=None,
        description="in place of optimizer.weight_decay, also for norms and biases; if missing, theirs as without a group",
    )


MUON_KEYS = ("momentum", "nesterov", "adjust_lr", "adamw_lr_factor")  # of [optimizer]


class OptimizerSection(Section):
    """The optimizer and its learning-rate schedule."""

    name: Annotated[str, NameIn(OPTIMIZERS)] = Field(
        default=ADAMW.name,
        description="how weights are updated: adamw; adamw_bf16, with moments in bf16; lion; muon, with adamw for what is no matrix of a "
        "layer; or one that an installed package adds. It reads the keys below",
    )
    lr: Annotated[float, Field(ge=1e-12, le=1)] = Field(description="peak learning rate")
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.1, description="final learning rate / lr"
    )
    warmup_steps: CountOrNone = Field(
        default=0, description="steps over which the learning rate rises from 0 to lr"
    )
    decay: Literal["cosine", "linear", "wsd", "inverse_sqrt", "constant"] = Field(
        default="cosine",
        description="after the warm-up; wsd: constant, then a decay over decay_steps; inverse_sqrt: lr x sqrt(warmup_steps / step)",
    )
    decay_steps: Count | None = Field(
        default=None, description="wsd: length of the final decay; a tenth of the steps if missing"
    )
    decay_form: Literal["linear", "cosine", "1-sqrt"] = Field(
        default="linear", description="wsd: form of the final decay"
    )
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Field(ge=1e-30, le=1)] = 1e-8  # smaller is 0 in fp32: 0 / 0 if a moment is 0
    weight_decay: Annotated[float, Field(ge=0, le=100)] = Field(
        default=0.1, description="decoupled, as in AdamW"
    )
    momentum: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.95, description="muon: decay of the momentum of matrices"
    )
    nesterov: bool = Field(default=True, description="muon: Nesterov momentum")
    adjust_lr: Literal["match_rms_adamw", "original"] = Field(
        default="match_rms_adamw",
        description="muon: factor on lr for an A x B matrix; match_rms_adamw: 0.2 sqrt(max(A, B)), so that updates are as large as "
        "adamw's; original: sqrt(max(1, A / B))",
    )
    adamw_lr_factor: Annotated[float, Field(ge=1e-6, le=1000)] = Field(
        default=1.0, description="muon: factor on lr for what adamw updates: embedding, head, norms, biases"
    )
    router_bias_update_rate: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.001,
        description="sigmoid_router: what a step adds to the bias of each expert that got fewer tokens than the mean, and takes from "
        "the others",
    )
    clip_norm: Annotated[float, Field(ge=0, le=1_000_000)] = Field(
        default=1.0, description="largest global gradient norm; 0: no clipping"
    )
    groups: list[GroupSection] = Field(
        default=[],
        description="parameters with a learning rate or weight decay of their own: of several groups that match, the first",
    )

    def group_of(self, name: str) -> GroupSection | None:
        """The group of the parameter called `name`."""
        return next((group for group in self.groups if fnmatchcase(name, group.match)), None)

    @model_serializer(mode="wrap")
    def _named_if_another(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # Runs that were made before these keys existed must be able to resume, and do not report that they changed.
        values: dict[str, Any] = handler(self)
        without = {"name"} if self.name == ADAMW.name else set()
        without |= set() if self.name == MUON.name else set(MUON_KEYS)
        usual = {"decay_form": "linear", "router_bias_update_rate": 0.001}
        without |= {key for key, value in usual.items() if getattr(self, key) == value}
        without |= set() if self.groups else {"groups"}
        return {key: value for key, value in values.items() if key not in without}


class CheckpointSection(Section):
    """When and where to save, and how many to keep."""

    every_steps: StepsOrAuto = Field(
        description='save after this many steps, and at the end; "auto": at the interval with the least time lost to saving and failures'
    )
    keep: Annotated[int, Field(ge=1, le=1_000_000)] = Field(
        default=3, description="newest verified checkpoints that are kept"
    )
    keep_every_steps: CountOrNone = Field(
        default=0, description="the checkpoint of every multiple of this many steps is never deleted; 0: none"
    )
    folder: Text | None = Field(
        default=None,
        description="checkpoints go to a folder with the run's name in this folder, or s3://BUCKET/PREFIX; "
        "if missing, into the run folder",
    )
    fallback: Text | None = Field(
        default=None,
        description="second location, in the same form, for checkpoints that cannot be written to `folder`",
    )
    max_unsaved_s: Annotated[float, Field(gt=0, le=2_678_400)] = Field(
        default=14400.0,
        description="seconds of training that may be unsaved; then training waits for a checkpoint, or the run stops",
    )
    read_back: bool = Field(
        default=True,
        description="written files are read back from the storage and compared before a checkpoint is complete",
    )


class ResilienceSection(Section):
    """How a run handles failures. Every limit applies to the whole run; when one is used up, the run ends."""

    max_restarts: CountOrNone = Field(
        default=100, description="recoveries in one start; 0: the first failure ends the run"
    )
    max_same_failure: Count = Field(
        default=3, description="stop after this many equal failures at the same step, without progress"
    )
    in_place: bool = Field(
        default=True,
        description="surviving CPU ranks rebuild their process groups and keep their state; false: every rank restarts",
    )
    shrink: bool = Field(
        default=True,
        description="without a node to replace a lost one, continue with fewer data-parallel replicas; "
        "the global batch stays the same",
    )
    grow: bool = Field(default=True, description="take the lost replicas back when nodes return")
    snapshot_every_steps: CountOrNone = Field(
        default=10,
        description="steps between copies of each rank's state in memory, here and on another node; 0: none",
    )
    snapshot_copies: CopiesOrAuto = Field(
        default="auto",
        description="2: on the rank's own node and on the next one; 1: on its own node; 0: none; "
        '"auto": the most that the host\'s memory holds',
    )
    verify_every_steps: CountOrNone = Field(
        default=10,
        description="steps between comparisons of weights that several ranks hold; 0: no check of the state at all",
    )
    max_skipped_steps: CountOrNone = Field(
        default=3,
        description="steps of the whole run whose update may be skipped (not finite, or a spike); another one ends the run",
    )
    on_spike: Literal["warn", "skip"] = Field(
        default="warn", description="what to do on a spike of the loss or gradient norm"
    )
    spike_factor: Times = Field(
        default=3.0, description="a loss or gradient norm this many times the recent one is a spike"
    )
    heartbeat_s: Annotated[float, Field(ge=0.05, le=60)] = Field(
        default=0.25, description="seconds between an agent's heartbeats"
    )
    silence_s: Annotated[float, Field(ge=0.5, le=3600)] = Field(
        default=3.0, description="seconds without a heartbeat after which a node counts as lost"
    )
    hang_min_s: Seconds = Field(
        default=30.0, description="a step is overdue after at least this many seconds"
    )
    hang_factor: Times = Field(
        default=5.0, description="and after this many times the median step, if that is longer"
    )
    first_step_s: Seconds = Field(
        default=1800.0,
        description="seconds for the first step after a start: loading, compilation, connections",
    )
    straggler_factor: Times = Field(
        default=2.0,
        description="a rank whose own work takes this many times longer than its peers' is a straggler",
    )
    join_wait_s: SecondsOrNone = Field(
        default=600.0,
        description="seconds to wait for the nodes at the start, and for enough of them later; 0: no limit",
    )
    node_wait_s: SecondsOrNone = Field(
        default=0.0, description="seconds to wait for a node to return before the run shrinks"
    )
    preempt_grace_s: Seconds = Field(
        default=60.0,
        description="seconds from SIGTERM to the end: the step is finished and the state is saved",
    )
    evict_after: Annotated[int, Field(ge=2, le=1_000_000_000)] = Field(
        default=2, description="failures blamed on a node before it is excluded for the rest of this start"
    )
    allow_gpu_reset: bool = Field(
        default=False, description="allow `nvidia-smi --gpu-reset` on a node that runs nothing"
    )
    allow_node_drain: bool = Field(
        default=False, description="allow draining an evicted node through the scheduler"
    )

    @property
    def copies(self) -> int:
        """Number of nodes that keep a rank's state in memory; "auto" means two until it is compared with the memory."""
        if not self.snapshot_every_steps:
            return 0
        return 2 if self.snapshot_copies == "auto" else self.snapshot_copies


class ScaleSection(Section):
    """Reserved for the scaling test; no key yet."""


class WatchSection(Section):
    """Monitoring: what is recorded, served and alerted."""

    telemetry_every_s: Annotated[float, Field(ge=1, le=3600)] = Field(
        default=10.0, description="seconds between two samples of each node's hardware in telemetry/"
    )
    metrics_port: Annotated[int, Field(ge=1024, le=65535)] | None = Field(
        default=None,
        description="TCP port on which each node's agent serves /metrics to Prometheus; on a virtual cluster, and where "
        "ssh.hosts repeats a host, plus the number of the node; if missing, none",
    )
    trackers: Annotated[list[Annotated[str, NameIn(TRACKERS)]], Field(min_length=1)] | None = Field(
        default=None,
        description="where steps and events are pushed while the run runs: tensorboard, wandb, mlflow, or what installed packages add",
    )
    alerts_off: list[Text] = Field(default=[], description="alert rules that are turned off, by name")
    alerts: dict[Text, dict[Text, float]] = Field(
        default={},
        description="other numbers for an alert rule: { throughput_drop = { limit = 0.9, for_s = 30 } }",
    )
    alert_command: Annotated[list[Text], Field(min_length=1)] | None = Field(
        default=None,
        description="program and arguments, started without a shell for each alert: JSON on stdin, SEATRIAL_ALERT_* in its environment",
    )
    alert_webhook_file: Text | None = Field(
        default=None,
        description="a file on the coordinator's node whose first line is the address of a webhook; it is secret",
    )
    alert_webhook_env: Text | None = Field(
        default=None, description="the same, in an environment variable of the agents: its name"
    )
    alertmanager: Text | None = Field(
        default=None, description="address of an Alertmanager, such as http://alertmanager:9093"
    )


class JobFile(Section):
    """The whole job file."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")] = Field(
        description="the run folder is runs/NAME"
    )
    model: ModelSection
    data: DataSection
    cluster: ClusterSection = ClusterSection()
    gpu: GpuSection | None = None
    network: NetworkSection | None = None
    parallel: ParallelSection | Literal["auto"] = Field(
        default=ParallelSection(), description='the layout; "auto": the planner chooses it'
    )
    train: TrainSection
    optimizer: OptimizerSection
    checkpoint: CheckpointSection
    resilience: ResilienceSection = ResilienceSection()
    scale: ScaleSection = ScaleSection()
    watch: WatchSection = WatchSection()
    slurm: SlurmSection | None = None
    ssh: SshSection | None = None
    kubernetes: KubernetesSection | None = None
