"""Each rule between keys: that it refuses, with the reason, at the right value, with numbers that work."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from jobs import GOOD, load, only_problem, problems

from seatrial.job.schema import MUON_KEYS, JobFile
from seatrial.plan.model.recipe import Recipe


@pytest.mark.parametrize(
    ("overrides", "at", "message", "cure"),
    [
        (("model.num_attention_heads=3", "model.num_key_value_heads=3"), "parallel.tensor", "num_attention_heads 3 is not divisible by tensor 2", None),
        (("model.num_key_value_heads=1",), "parallel.tensor", "num_key_value_heads 1 is not divisible by tensor 2", "parallel.tensor=1"),
        (("model.vocab_size=265",), "parallel.tensor", "vocab_size 265 is not divisible by tensor 2", "model.vocab_size=266"),
        (("model.intermediate_size=383",), "parallel.tensor", "intermediate_size 383 is not divisible by tensor 2", "parallel.tensor=1"),
        (("model.num_key_value_heads=3", "parallel.tensor=1"), "--set model.num_key_value_heads=3", "num_attention_heads 4 is not divisible by num_key_value_heads 3", "model.num_key_value_heads=2"),
        (("model.head_dim=31",), "--set model.head_dim=31", "head_dim 31 is odd", "model.head_dim=32"),
        (("train.sequence_length=255",), "--set train.sequence_length=255", "sequence_length 255 is not divisible by 2 x tensor 2 = 4: an uneven sequence-parallel shard aborts the process", "train.sequence_length=256"),
        (("train.sequence_length=4096",), "--set train.sequence_length=4096", "sequence_length 4096 is more than the model's max_position_embeddings 2048", "train.sequence_length=2048"),
        (("model.num_hidden_layers=1",), "parallel.pipeline", "pipeline 2 needs 2 layers, but the model has only 1", "model.num_hidden_layers=2"),
        (("parallel.stages_per_rank=4", "parallel.schedule=interleaved-1f1b"), "parallel.pipeline", "pipeline 2 x stages_per_rank 4 = 8 stages, but the model has only 4 layers", "parallel.stages_per_rank=2"),
        (("parallel.shard=3",), "--set parallel.shard=3", "tensor 2 x pipeline 2 x shard 3 = 12 ranks, but 2 nodes x 4 GPUs = 8 ranks", "parallel.shard=2"),
        (("cluster.gpus_per_node=5",), "parallel.tensor", "tensor 2 does not divide gpus_per_node 5", None),
        (("cluster.gpu=H100 SXM", "gpu.bf16_tflops=900", "gpu.hbm_gb=80", "gpu.hbm_tb_s=3", "gpu.link_gb_s=450"), "--set cluster.gpu=H100 SXM", "gpu is named in [cluster] and described in [gpu]", None),
        (("cluster.network=Custom", "network.gbps_per_nic=100", "network.latency_us=20"), "--set cluster.network=Custom", "network is named in [cluster] and described in [network]", None),
        (("cluster.nvlink_domain=6",), "--set cluster.nvlink_domain=6", "nvlink_domain 6 is not a multiple of gpus_per_node 4", "cluster.nvlink_domain=8"),
        (("parallel.tensor=8", "parallel.pipeline=1", "model.num_attention_heads=8", "model.num_key_value_heads=8"), "--set parallel.tensor=8", "tensor 8 does not divide gpus_per_node 4: a tensor-parallel group must stay within one node", "cluster.nvlink_domain=8"),
        (("parallel.pipeline=3",), "--set parallel.pipeline=3", "tensor 2 x pipeline 3 = 6 does not divide 2 nodes x 4 GPUs = 8 ranks", "parallel.pipeline=4"),
        (("train.global_batch=30",), "--set train.global_batch=30", "global_batch 30 is not divisible by data-parallel size 2 x microbatch 4 = 8", "train.global_batch=32"),
        (("train.global_batch=8",), "--set train.global_batch=8", "global_batch 8 / data-parallel size 2 / microbatch 4 = 1 microbatches, fewer than the 2 pipeline ranks", "train.global_batch=16"),
        (("train.global_batch=24", "parallel.schedule=interleaved-1f1b", "parallel.stages_per_rank=2"), "--set train.global_batch=24", "3 microbatches, but schedule \"interleaved-1f1b\" needs a multiple of pipeline 2", "train.global_batch=32"),
        (("parallel.schedule=interleaved-1f1b",), "--set parallel.schedule=interleaved-1f1b", 'schedule "interleaved-1f1b" needs 2 or more stages on each rank, not 1', "parallel.stages_per_rank=2"),
        (("parallel.schedule=zero-bubble", "parallel.reshard_after_forward=false"), "--set parallel.schedule=zero-bubble", 'schedule "zero-bubble" needs 2 or more stages on each rank, not 1', "parallel.stages_per_rank=2"),
        (("train.accumulate=sharded", "parallel.schedule=zero-bubble", "parallel.stages_per_rank=2", "parallel.reshard_after_forward=false", "train.compile=false"), "--set train.accumulate=sharded", 'accumulate = "sharded" with schedule "zero-bubble"', "parallel.schedule=interleaved-1f1b"),
        (("train.activation_checkpointing=selective", "parallel.schedule=zero-bubble", "parallel.stages_per_rank=2", "parallel.reshard_after_forward=false", "train.compile=false"), "--set train.activation_checkpointing=selective", 'activation_checkpointing = "selective" with schedule "zero-bubble"', "parallel.schedule=interleaved-1f1b"),
        (("train.offload_activations=true", "train.activation_checkpointing=full", "parallel.schedule=zero-bubble", "parallel.stages_per_rank=2", "parallel.reshard_after_forward=false", "train.compile=false"), "--set train.offload_activations=true", 'offload_activations with schedule "zero-bubble"', "parallel.schedule=interleaved-1f1b"),
        (("train.offload_activations=true", "train.activation_checkpointing=selective"), "--set train.offload_activations=true", 'offload_activations with activation_checkpointing = "selective": only inputs of layers that are fully recomputed', "train.activation_checkpointing=full"),
        (("train.activation_checkpointing=none", "train.recompute_every_layers=2",), "--set train.recompute_every_layers=2", "recompute_every_layers 2 has no effect: activation_checkpointing is none", "train.activation_checkpointing=selective"),
        (("parallel.stages_per_rank=2",), "--set parallel.stages_per_rank=2", 'schedule "1f1b" allows one stage on each rank, not 2', "parallel.schedule=interleaved-1f1b"),
        (("parallel.schedule=gpipe", "parallel.stages_per_rank=2"), "--set parallel.stages_per_rank=2", 'schedule "gpipe" allows one stage on each rank, not 2', "parallel.stages_per_rank=1"),
        (("parallel.pipeline=1", "parallel.schedule=gpipe"), "--set parallel.schedule=gpipe", 'schedule "gpipe" has no effect: pipeline is 1', "parallel.schedule=1f1b"),
        (("parallel.pipeline=1", "parallel.stages_per_rank=2"), "--set parallel.stages_per_rank=2", "stages_per_rank 2 has no effect: pipeline is 1", "parallel.stages_per_rank=1"),
        (("parallel.tensor=1", "parallel.async_tensor=true"), "--set parallel.async_tensor=true", "async_tensor = true has no effect: tensor is 1", "parallel.async_tensor=false"),
        (("train.profile_ranks=[8]",), "--set train.profile_ranks=[8]", "rank 8 cannot be profiled: the job has 8 ranks", "train.profile_ranks=[7]"),
        (("train.profile_ranks=[0]", "train.profile_first_step=200"), "--set train.profile_first_step=200", "the trace needs steps 200 to 201, and the job has 200", "train.profile_first_step=199"),
        (("optimizer.warmup_steps=201",), "--set optimizer.warmup_steps=201", "warmup_steps 201 is more than train.steps 200", "optimizer.warmup_steps=200"),
        (("optimizer.decay=wsd", "optimizer.decay_steps=150", "optimizer.warmup_steps=51"), "--set optimizer.decay_steps=150", "warmup_steps 51 + decay_steps 150 is more than train.steps 200", "optimizer.warmup_steps=50"),
        (("optimizer.decay=wsd", "optimizer.warmup_steps=181"), "--set optimizer.warmup_steps=181", "warmup_steps 181 + decay_steps 20 (a tenth of the steps) is more than train.steps 200", "optimizer.warmup_steps=180"),
        (("optimizer.decay_steps=5",), "--set optimizer.decay_steps=5", 'decay_steps is only used with decay = "wsd", not "cosine"', "optimizer.decay=wsd"),
        (("parallel.expert=2",), "--set parallel.expert=2", "expert 2 has no effect: the model has no experts", "parallel.expert=1"),
        (("parallel.shard=1", "parallel.context=2", "train.sequence_length=252"), "--set train.sequence_length=252", "sequence_length 252 is not divisible by 2 x context 2 x tensor 2 = 8", "train.sequence_length=248"),
        (("cluster.spares=1", "resilience.max_restarts=0"), "--set cluster.spares=1", "spares has no effect: max_restarts is 0", "resilience.max_restarts=1"),
        (("resilience.allow_gpu_reset=true", "resilience.max_restarts=0"), "--set resilience.allow_gpu_reset=true", "allow_gpu_reset has no effect", "resilience.allow_gpu_reset=false"),
        (("resilience.silence_s=1.0", "resilience.heartbeat_s=0.5"), "--set resilience.silence_s=1.0", "silence_s 1 is less than 4 x heartbeat_s 0.5", "resilience.silence_s=2.0"),
        (("resilience.heartbeat_s=2.0",), "--set resilience.heartbeat_s=2.0", "silence_s 3 is less than 4 x heartbeat_s 2", "resilience.heartbeat_s=0.75"),
        (("resilience.first_step_s=20.0",), "--set resilience.first_step_s=20.0", "first_step_s 20 is less than hang_min_s 30", "resilience.first_step_s=30.0"),
        (("watch.metrics_port=65535",), "--set watch.metrics_port=65535", "node 1 would serve /metrics on port 65536", "watch.metrics_port=65534"),
        (("watch.metrics_port=9400", "cluster.port=9401"), "--set watch.metrics_port=9400", "metrics_port 9400 takes port 9401", None),
        (('watch.alerts_off=["stragler"]',), '--set watch.alerts_off=["stragler"]', "there is no alert rule `stragler`", 'watch.alerts_off=["straggler"]'),
        (("watch.alerts={gpu_hot={limit=70}}",), "--set watch.alerts={gpu_hot={limit=70}}", "the alert rule gpu_hot would be resolved at 82 while it fires at 70", "watch.alerts={gpu_hot={limit=70,clear=65}}"),
        (("watch.alerts={throughput_drop={limit=0.95}}",), "--set watch.alerts={throughput_drop={limit=0.95}}", "would be resolved at 0.93 while it fires at 0.95", "watch.alerts={throughput_drop={limit=0.95,clear=0.97}}"),
        (("watch.alerts={gpu_hot={max=70}}",), "--set watch.alerts={gpu_hot={max=70}}", "the alert rule gpu_hot has no number `max`", None),
        (("watch.alerts={gpu_hot={for_s=-1}}",), "--set watch.alerts={gpu_hot={for_s=-1}}", "gpu_hot.for_s is -1", None),
        (("watch.alert_webhook_env=https://hooks/x",), "--set watch.alert_webhook_env=https://hooks/x", "not the name of an environment variable", "watch.alert_webhook_env=HOOK"),
        (("watch.alert_webhook_file=https://hooks/x",), "--set watch.alert_webhook_file=https://hooks/x", "is an address, not a file", None),
        (("watch.alert_webhook_file=/f", "watch.alert_webhook_env=HOOK"), "--set watch.alert_webhook_file=/f", "two sources for one webhook", None),
        (("watch.alertmanager=alerts:9093",), "--set watch.alertmanager=alerts:9093", "alertmanager is not an HTTP address", "watch.alertmanager=http://alerts:9093"),
        (("watch.alertmanager=http://u:p@alerts",), "--set watch.alertmanager=http://u:p@alerts", "alertmanager has a password in it", None),
        (("model.vocab_size=256",), "--set model.vocab_size=256", "vocab_size 256 is too small for the byte tokenizer", "model.vocab_size=264"),
        (("model.qkv_bias=false",), "--set model.qkv_bias=false", 'qkv_bias = false with family "qwen2"', "model.qkv_bias=true"),
        (
            ("model.preset=llama3.1-8b", "model.rope_scaling={factor=8.0,low_freq_factor=4.0,high_freq_factor=4.0,original_max_position_embeddings=8192}"),
            "--set model.rope_scaling={factor=8.0,low_freq_factor=4.0,high_freq_factor=4.0,original_max_position_embeddings=8192}",
            "high_freq_factor 4 is not greater than low_freq_factor 4",
            None,
        ),
        (("model.lora.rank=65", "model.lora.alpha=16"), "--set model.lora.rank=65", "rank 65 is more than the 64 of k_proj", "model.lora.rank=64"),
        (('model.lora={rank=4, alpha=8, targets=["q_proj", "q_proj"]}',), '--set model.lora={rank=4, alpha=8, targets=["q_proj", "q_proj"]}', "targets has q_proj twice", None),
        (("optimizer.lr=0.5", "optimizer.weight_decay=2.0"), "--set optimizer.weight_decay=2.0", "lr 0.5 x weight_decay 2 = 1", "optimizer.weight_decay=1.9"),
        (("optimizer.name=adamw_bf16", "optimizer.beta2=0.999"), "--set optimizer.beta2=0.999", "beta2 0.999 is too close to 1 for adamw_bf16", "optimizer.beta2=0.99"),
        (("optimizer.momentum=0.9",), "--set optimizer.momentum=0.9", 'momentum is only used with name = "muon", not "adamw"', "optimizer.name=muon"),
        (("optimizer.nesterov=false", "optimizer.name=lion"), "--set optimizer.nesterov=false", 'nesterov is only used with name = "muon", not "lion"', "optimizer.name=muon"),
        (("optimizer.adjust_lr=original",), "--set optimizer.adjust_lr=original", "adjust_lr is only used", "optimizer.name=muon"),
        (("optimizer.name=muon", "model.lora.rank=4", "model.lora.alpha=16"), "--set optimizer.name=muon", "muon with [model.lora] is not supported", "optimizer.name=adamw"),
        (("optimizer.name=muon", "optimizer.lr=0.02", "optimizer.adamw_lr_factor=500.0"), "--set optimizer.lr=0.02", "lr 10 (with adamw_lr_factor) x weight_decay 0.1 = 1", "optimizer.adamw_lr_factor=0.5"),
        (("optimizer.decay_form=1-sqrt",), "--set optimizer.decay_form=1-sqrt", 'decay_form is only used with decay = "wsd", not "cosine"', "optimizer.decay=wsd"),
        (("optimizer.decay=inverse_sqrt", "optimizer.warmup_steps=0"), "--set optimizer.decay=inverse_sqrt", "inverse_sqrt without a warm-up", "optimizer.warmup_steps=5"),
        (("optimizer.clip_norm=1e-30",), "--set optimizer.clip_norm=1e-30", "clip_norm 1e-30 is too small", "optimizer.clip_norm=0"),
        (("model.qk_norm=true",), "--set model.qk_norm=true", 'qk_norm = true with family "qwen2"', "model.qk_norm=false"),
    ],
)  # fmt: skip
def test_a_broken_rule_is_refused(
    overrides: tuple[str, ...], at: str, message: str, cure: str | None
) -> None:
    found = [p for p in problems(GOOD, *overrides) if message in p.message]
    assert len(found) == 1, [p.message for p in problems(GOOD, *overrides)]
    problem = found[0]
    assert problem.hint
    if at.startswith("--set"):
        assert problem.file == at
    else:
        assert (problem.file, problem.source_line) == ("job.toml", f"{at.split('.')[1]} = 2")
    if cure is not None:
        load(GOOD, *overrides, cure)


def test_spares_and_the_defaults_of_resilience() -> None:
    job = load(GOOD, "cluster.spares=2")
    assert (job.cluster.spares, job.layout.world_size) == (2, 8)
    assert (job.resilience.max_restarts, job.resilience.snapshot_every_steps) == (100, 10)
    assert not job.resilience.allow_gpu_reset
    assert not job.resilience.allow_node_drain
    again = load(job.to_toml())
    assert again.resilience == job.resilience


def test_hints_give_numbers_that_work() -> None:
    hint = only_problem("train.sequence_length=254").hint or ""
    numbers = re.findall(r"\d+", hint)
    assert numbers == ["252", "256"]
    for number in numbers:
        load(GOOD, f"train.sequence_length={number}")


def test_an_odd_sequence_is_fine_without_tensor_parallel() -> None:
    assert (
        load(GOOD, "parallel.tensor=1", "train.sequence_length=255", "train.global_batch=64").layout.shard
        == 4
    )


class TestValidation:
    """[data] validation and the keys that go with it."""

    @pytest.mark.parametrize(
        ("overrides", "at", "message"),
        [
            (("data.validation=b",), "data.validation=b", "validation has no effect: train.validate_every_steps is missing"),
            (("train.validate_every_steps=5",), "train.validate_every_steps=5", "validate_every_steps has no effect: data.validation is missing"),
            (("train.validate_samples=5",), "train.validate_samples=5", "validate_samples has no effect: data.validation is missing"),
            (("data.validation=b", "train.validate_every_steps=201"), "train.validate_every_steps=201", "validate_every_steps 201 is more than train.steps 200"),
            (("data.validation=builtin:python-library", "train.validate_every_steps=5"), "data.validation=builtin:python-library", "builtin:python-library is also in data.train"),
        ],
    )  # fmt: skip
    def test_a_broken_rule_is_refused(self, overrides: tuple[str, ...], at: str, message: str) -> None:
        problem = only_problem(*overrides)
        assert problem.file == f"--set {at}"
        assert problem.message.startswith(message)
        assert problem.hint

    def test_all_at_once(self) -> None:
        found = problems(GOOD, "train.validate_every_steps=5", "train.validate_samples=5")
        assert len(found) == 2

    def test_how_many_samples(self) -> None:
        overrides = ("data.validation=/b", "train.validate_every_steps=5")
        job = load(GOOD, *overrides)
        assert job.identity() == load(GOOD).identity(), "it may change on resume"
        assert load(job.to_toml()).data.validation == "/b"
        batch = job.train.global_batch
        assert job.train.validation_samples(10 * batch) == 10 * batch
        assert job.train.validation_samples(1000 * batch) == 32 * batch
        assert load(GOOD, *overrides, "train.validate_samples=7").train.validation_samples(100) == 7


class TestBlend:
    """The sources of [data] and their weights."""

    def text(self, lines: str) -> str:
        return GOOD.replace('train = "builtin:python-library"', lines)

    @pytest.mark.parametrize(
        ("lines", "place", "message"),
        [
            ('train = ["a", "b"]', (7, 9), "train lists 2 sources, but weights is missing"),
            ('train = "a"\nweights = [1]', (8, 11), "weights has no effect: train lists one source"),
            ('train = ["a", "b"]\nweights = [1]', (8, 11), "weights has 1 number, but train lists 2 sources"),
            ('train = ["a"]\nweights = [1, 2]', (8, 11), "weights has 2 numbers, but train lists 1 source"),
            ('train = ["a", "b", "a"]\nweights = [1, 2, 3]', (7, 20), "/nowhere/a is listed twice"),
            (
                'train = ["a", "b"]\nweights = [1e6, 1]',
                (8, 17),
                "weight 1 is 1e-06 of the sum of the weights",
            ),
        ],
    )
    def test_a_broken_rule_is_refused(self, lines: str, place: tuple[int, int], message: str) -> None:
        problem = only_problem(text=self.text(lines))
        assert (problem.line, problem.column) == place
        assert problem.message.startswith(message)
        assert problem.hint

    def test_all_at_once(self) -> None:
        found = problems(self.text('train = ["a", "a", "b"]\nweights = [1, 1e-9]'), "train.seed=-1")
        assert [p.message.split(" ")[0] for p in found] == ["/nowhere/a", "weights", "weight", "train.seed"]

    def test_hints_give_what_works(self) -> None:
        hint = only_problem(text=self.text('train = ["a", "b", "c"]')).hint or ""
        weights = hint.split(" takes")[0]
        assert load(self.text(f'train = ["a", "b", "c"]\n{weights}')).data.weights == [1.0, 1.0, 1.0]
        hint = only_problem(text=self.text('train = ["a", "b"]\nweights = [1e6, 1]')).hint or ""
        least = hint.split("its weight to ")[1].split(" ")[0]
        load(self.text(f'train = ["a", "b"]\nweights = [1e6, {least}]'))

    def test_one_source_in_a_list(self) -> None:
        for lines in ('train = ["a"]', 'train = ["a"]\nweights = [3]'):
            job = load(self.text(lines))
            assert job.data.sources == ("/nowhere/a",)
            assert job.identity() == load(self.text('train = "a"')).identity()


class TestCheckpointPlaces:
    """Where checkpoints go, and which of them stay."""

    @pytest.mark.parametrize(
        ("lines", "place", "message", "hint"),
        [
            (
                'folder = "gs://bucket/x"',
                (28, 10),
                "gs://bucket/x: not an address of a store",
                "s3://BUCKET/PREFIX",
            ),
            (
                'folder = "s3://Bucket/x"',
                (28, 10),
                "s3://Bucket/x: 'Bucket' is not a bucket's name",
                "3 to 63",
            ),
            ('fallback = "s3://"', (28, 12), "s3://: '' is not a bucket's name", "s3://BUCKET/PREFIX"),
            (
                'folder = "/a"\nfallback = "/a"',
                (29, 12),
                "fallback is the same location as folder",
                "another storage",
            ),
            (
                "keep_every_steps = 75",
                (28, 20),
                "keep_every_steps 75 is not a multiple of every_steps 50",
                "50 or 100",
            ),
            (
                "keep_every_steps = 20",
                (28, 20),
                "keep_every_steps 20 is not a multiple of every_steps 50",
                "50",
            ),
        ],
    )
    def test_a_broken_rule_is_refused(
        self, lines: str, place: tuple[int, int], message: str, hint: str
    ) -> None:
        problem = only_problem(text=GOOD.replace("every_steps = 50", f"every_steps = 50\n{lines}"))
        assert (problem.line, problem.column) == place
        assert problem.message.startswith(message)
        assert hint in (problem.hint or "")

    @pytest.mark.parametrize(
        "overrides",
        [
            ("checkpoint.keep_every_steps=150",),
            ("checkpoint.every_steps=auto", "checkpoint.keep_every_steps=75"),
            ("checkpoint.folder=s3://bucket/runs", "checkpoint.fallback=/mnt/spare"),
            ("checkpoint.folder=saves",),
        ],
    )
    def test_these_are_fine(self, overrides: tuple[str, ...]) -> None:
        job = load(GOOD, *overrides)
        assert job.identity() == load(GOOD).identity(), "no part of the run's identity"


class TestSilentlyWrongInTorch:
    """Combinations that train with a right-looking loss over wrong gradients."""

    ZERO_BUBBLE = ("parallel.schedule=zero-bubble", "parallel.stages_per_rank=2")

    def test_zero_bubble_with_resharding(self) -> None:
        problem = only_problem(*self.ZERO_BUBBLE, "parallel.reshard_after_forward=true")
        assert "drops gradients" in problem.message
        assert "reshard_after_forward = false" in (problem.hint or "")
        assert problem.file == "--set parallel.reshard_after_forward=true"

    def test_zero_bubble_in_bf16_without_data_parallel(self) -> None:
        """bf16 goes through FSDP in a group of one, and lost a norm's gradient there."""
        one = (*self.ZERO_BUBBLE, "cluster.nodes=1", "parallel.reshard_after_forward=true")
        assert "drops gradients" in only_problem(*one, "train.precision=bf16").message
        load(GOOD, *one, "train.precision=fp32")

    def test_zero_bubble_does_not_reshard_of_itself(self) -> None:
        job = load(GOOD, *self.ZERO_BUBBLE)
        assert job.layout.data_parallel > 1
        assert not job.parallel.reshards

    def test_zero_bubble_with_resharding_error_points_at_the_key(self) -> None:
        text = GOOD.replace("pipeline = 2", "pipeline = 2\nreshard_after_forward = true")
        problem = only_problem(*self.ZERO_BUBBLE, text=text)
        assert (problem.line, problem.column, problem.length) == (16, 25, 4)

    def test_zero_bubble_without_resharding_is_allowed(self) -> None:
        load(GOOD, *self.ZERO_BUBBLE, "parallel.reshard_after_forward=false")

    def test_zero_bubble_without_data_parallel_is_allowed(self) -> None:
        load(GOOD, *self.ZERO_BUBBLE, "cluster.nodes=1")

    def test_zero_bubble_with_compile(self) -> None:
        problem = only_problem(*self.ZERO_BUBBLE, "cluster.nodes=1", "train.compile=true")
        assert "wrong gradients" in problem.message
        assert problem.file == "--set train.compile=true"

    def test_compile_is_the_default_on_gpus_but_not_here(self) -> None:
        job, split = load(GOOD), load(GOOD, *self.ZERO_BUBBLE)
        assert [job.compiles(device) for device in ("cuda", "auto", "cpu")] == [True, True, False]
        assert not split.compiles("cuda")
        assert not job.compiles("cuda", split.layout)
        for text, expected in (("true", True), ("false", False)):
            wrote = load(GOOD, f"train.compile={text}")
            assert (wrote.compiles("cuda"), wrote.compiles("cpu")) == (expected, expected)

    @pytest.mark.parametrize("schedule", ["zbv", "dualpipe-v"])
    def test_v_schedules_are_refused_with_every_reason(self, schedule: str) -> None:
        found = problems(
            GOOD,
            f"parallel.schedule={schedule}",
            "parallel.stages_per_rank=2",
            "parallel.reshard_after_forward=true",
            "train.compile=true",
        )
        text = " ".join(p.message for p in found)
        assert len(found) == 3
        for reason in ("not supported in this version", "drops gradients", "wrong gradients"):
            assert reason in text

    @pytest.mark.parametrize("schedule", ["zbv", "dualpipe-v"])
    def test_v_schedules_are_not_in_this_version(self, schedule: str) -> None:
        found = problems(GOOD, f"parallel.schedule={schedule}", "cluster.nodes=1")
        assert ["not supported in this version" in p.message for p in found] == [True]


def test_rules_that_need_an_unreadable_value_are_skipped() -> None:
    (problem,) = problems(GOOD, "model.num_attention_heads=true")
    assert problem.message.startswith("model.num_attention_heads: expected an integer")
    found = [p.message for p in problems(GOOD, "parallel.tensor=x", "optimizer.warmup_steps=300")]
    assert len(found) == 2
    assert "warmup_steps 300 is more than train.steps 200" in found[1] + found[0]


def test_absurd_numbers_are_refused_quickly() -> None:
    found = problems(GOOD, "model.num_attention_heads=9999991", "parallel.tensor=999983")
    assert len(found) >= 3


def test_every_number_has_a_least_and_a_largest_value() -> None:
    def bounds(schema: dict[str, Any], where: str) -> Iterator[str]:
        for kind in ("anyOf", "oneOf"):
            for part in schema.get(kind, ()):
                yield from bounds(part, where)
        if schema.get("type") == "array":
            yield from bounds(schema["items"], f"{where}[]")
        if schema.get("type") in ("integer", "number"):
            if not {"minimum", "exclusiveMinimum"} & set(schema):
                yield f"{where} has no least value"
            if not {"maximum", "exclusiveMaximum"} & set(schema):
                yield f"{where} has no largest value"

    whole = JobFile.model_json_schema()
    sections = {name: part["properties"] for name, part in whole["$defs"].items() if "properties" in part}
    assert sum(len(keys) for keys in sections.values()) > 80
    found = [
        text
        for name, keys in sections.items()
        for key, part in keys.items()
        for text in bounds(part, f"{name}.{key}")
    ]
    assert found == []


EXPERTS = (
    "model.family=qwen3_moe",
    "model.num_experts=8",
    "model.num_experts_per_tok=2",
    "model.moe_intermediate_size=64",
)


def test_a_model_with_experts_has_the_defaults_of_its_family() -> None:
    a = load(GOOD, *EXPERTS).architecture
    assert (a.qkv_bias, a.qk_norm, a.norm_topk_prob, a.router_aux_loss_coef) == (False, True, True, 0.001)
    assert load(load(GOOD, *EXPERTS).to_toml()).architecture == a
    # A job without experts says nothing of them: runs made before they existed resume.
    assert "expert" not in load(GOOD).to_toml().replace("expert = 1", "")
    assert not [key for key in load(GOOD).identity() if "expert" in key or "router" in key]


@pytest.mark.parametrize(
    ("overrides", "at", "message"),
    [
        (("cluster.gpu=A100-80GB SXM",), "--set cluster.gpu=A100-80GB SXM", "A100-80GB SXM has no FP8 matrix products"),
        (("cluster.gpu=MI300X",), "--set cluster.gpu=MI300X", "MI300X has other FP8 formats"),
        (("cluster.gpu=H100 SXM", "train.fp8_scaling=mxfp8"), "--set cluster.gpu=H100 SXM", "needs a Blackwell GPU"),
        (("cluster.gpu=MI355X", "train.fp8_scaling=mxfp8"), "--set cluster.gpu=MI355X", "needs a Blackwell GPU"),
        (("train.fp8_scaling=mxfp8", "train.microbatch=1", "train.sequence_length=48"), "--set train.precision=fp8", "in multiples of 32"),
        (EXPERTS, "--set train.precision=fp8", "with experts is not supported"),
        (("parallel.tensor=1", "model.intermediate_size=1000"), "--set train.precision=fp8", "the intermediate_size is 1000"),
        (("train.microbatch=1", "train.sequence_length=20"), "--set train.precision=fp8", "the microbatch x sequence_length is 20"),
        (("train.fp8_scaling=tensorwise", "train.precision=bf16"), "--set train.fp8_scaling=tensorwise", "fp8_scaling has no effect"),
    ],
)  # fmt: skip
def test_what_fp8_needs(overrides: tuple[str, ...], at: str, message: str) -> None:
    found = only_problem("train.precision=fp8", *overrides)
    assert message in found.message
    assert found.hint
    assert found.file == at


@pytest.mark.parametrize(
    ("kernel", "overrides", "message"),
    [
        ("flash", ("cluster.device=cpu",), "CPU ranks have one kernel"),
        ("flash", ("train.precision=fp32",), "it takes 16-bit values"),
        ("cudnn", ("train.precision=fp32",), "it takes 16-bit values"),
        ("cudnn", ("train.deterministic=true",), "may differ from run to run"),
        ("efficient", ("train.deterministic=true",), "may differ from run to run"),
        ("cudnn", ("data.attend_across_documents=false",), "documents need a mask"),
        ("cudnn", ("parallel.shard=1", "parallel.context=2"), "the masks of context parallel"),
        ("flash", ("model.head_dim=320",), "heads of up to 256"),
    ],
)
def test_what_a_kernel_of_attention_needs(kernel: str, overrides: tuple[str, ...], message: str) -> None:
    found = only_problem(f"train.attention={kernel}", *overrides)
    assert found.message.startswith(f'attention = "{kernel}" cannot be used: ')
    assert message in found.message
    assert "auto" in (found.hint or "")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("parallel.shard=2",), "has no effect: context is 1"),
        (("parallel.context=2", "data.attend_across_documents=false"), "attention within documents gathers"),
        (("parallel.context=2", "train.precision=fp32"), "its kernels take 16-bit values"),
        (("parallel.context=2", "train.attention=efficient"), 'flash or cuDNN attention, and attention is "efficient"'),
        (("parallel.context=2", "model.head_dim=320"), "heads of up to 256"),
    ],
)  # fmt: skip
def test_what_ring_attention_needs(overrides: tuple[str, ...], message: str) -> None:
    found = only_problem("parallel.ring_attention=true", "parallel.shard=1", *overrides)
    assert found.message.startswith("ring_attention = true ")
    assert message in found.message
    assert "remove it" in (found.hint or "")


@pytest.mark.parametrize(
    ("overrides", "rings"),
    [
        ((), True),
        (("train.sequence_length=8192",), False),
        (("cluster.nvlink_domain=8",), False),
        (("data.attend_across_documents=false",), False),
        (("train.precision=fp32",), False),
        (("train.precision=fp32", "cluster.device=cpu"), True),
        (("parallel.ring_attention=false",), False),
        (("train.sequence_length=8192", "parallel.ring_attention=true"), True),
    ],
)
def test_keys_go_around_a_ring_where_sequences_are_long(overrides: tuple[str, ...], rings: bool) -> None:
    long = ("model.max_position_embeddings=32768", "train.sequence_length=32768")
    across = ("parallel.tensor=2", "parallel.context=4", "parallel.shard=1", "parallel.pipeline=1")
    job = load(GOOD, *across, *long, *overrides)
    assert Recipe.of(job).rings == rings


def test_other_kernels_of_attention_are_for_what_they_take() -> None:
    for kernel, precision in (("flash", "bf16"), ("cudnn", "bf16"), ("efficient", "fp32"), ("auto", "fp32")):
        job = load(GOOD, f"train.attention={kernel}", f"train.precision={precision}", "cluster.device=cuda")
        assert job.train.attention == kernel


def test_fp8_is_multiplied_where_the_gpu_can() -> None:
    for gpu in ("H100 SXM", "B300 SXM", "MI355X"):
        assert load(GOOD, "train.precision=fp8", f"cluster.gpu={gpu}").train.fp8_scaling == "rowwise"
    for scaling in ("tensorwise", "mxfp8"):
        settings = ("train.precision=fp8", f"train.fp8_scaling={scaling}", "cluster.gpu=B300 SXM")
        assert load(GOOD, *settings).train.fp8_scaling == scaling


@pytest.mark.parametrize(
    ("overrides", "at", "message", "cure"),
    [
        (("model.num_experts_per_tok=9",), "--set model.num_experts_per_tok=9", "num_experts_per_tok 9 is more than num_experts 8", "model.num_experts_per_tok=8"),
        (("model.moe_intermediate_size=40",), "--set model.moe_intermediate_size=40", "moe_intermediate_size 40 is not divisible by 8 x tensor 2", "model.moe_intermediate_size=48"),
        (("model.num_experts=3",), "parallel.shard", "num_experts 3 is not divisible by shard 2: each rank's shard of a layer is whole experts", None),
        (("model.lora={rank=4, alpha=8}",), "--set model.lora={rank=4, alpha=8}", "targets has gate_proj, up_proj or down_proj of a model with experts", 'model.lora.targets=["q_proj", "k_proj", "v_proj", "o_proj"]'),
        (("model.lora={rank=4, alpha=8}", 'model.lora.targets=["q_proj", "up_proj"]'), '--set model.lora.targets=["q_proj", "up_proj"]', "targets has up_proj of a model with experts", 'model.lora.targets=["q_proj"]'),
        (("parallel.expert=4",), "--set parallel.expert=4", "expert 4 does not divide shard 2", "parallel.expert=2"),
    ],
)  # fmt: skip
def test_what_experts_need(overrides: tuple[str, ...], at: str, message: str, cure: str | None) -> None:
    found = only_problem(*EXPERTS, *overrides)
    assert message in found.message
    assert found.hint
    assert found.file == (at if at.startswith("--set") else "job.toml")
    if cure is not None:
        load(GOOD, *EXPERTS, *overrides, cure)


DEEPSEEK = (*EXPERTS, "model.family=glm4_moe", "model.n_group=4", "model.topk_group=2")


def test_deepseeks_routing_is_written_as_it_was_read() -> None:
    a = load(GOOD, *DEEPSEEK).architecture
    assert (a.sigmoid_router, a.n_shared_experts, a.routed_scaling_factor) == (True, 1, 1.0)
    assert (a.router_aux_loss_coef, a.partial_rotary_factor, a.qk_norm) == (0.0, 0.5, False)
    for more in ((), ("model.partial_rotary_factor=1.0",), ("model.qk_norm=true", "model.qkv_bias=true")):
        job = load(GOOD, *DEEPSEEK, *more)
        assert load(job.to_toml()).architecture == job.architecture
    assert load(GOOD, *DEEPSEEK, "model.partial_rotary_factor=1.0").architecture.rotary_width == a.head_dim


@pytest.mark.parametrize(
    ("overrides", "message", "cure"),
    [
        (("model.n_group=3",), "num_experts 8 is not 3 equal groups of two or more experts", "model.n_group=4"),
        (("model.n_group=8",), "num_experts 8 is not 8 equal groups of two or more experts", "model.n_group=2"),
        (("model.first_k_dense_replace=8",), "leaves no layer with experts", "model.first_k_dense_replace=1"),
        (("model.first_k_dense_replace=2", "parallel.pipeline=2"), "the first of 2 stages has only layers without experts", "model.first_k_dense_replace=1"),
        (("model.first_k_dense_replace=1", "model.intermediate_size=97"), "intermediate_size 97 is not divisible by tensor 2", "model.intermediate_size=96"),
        (("model.topk_group=5",), "topk_group 5 is more than n_group 4", "model.topk_group=4"),
        (("model.num_experts_per_tok=5",), "num_experts_per_tok 5 is more than the 4 experts of topk_group 2 groups", "model.topk_group=3"),
        (("model.sigmoid_router=false",), 'sigmoid_router = false with family "glm4_moe"', "model.sigmoid_router=true"),
        (("model.partial_rotary_factor=0.01",), "partial_rotary_factor 0.01 of head_dim", "model.partial_rotary_factor=0.5"),
    ],
)  # fmt: skip
def test_what_deepseeks_routing_needs(overrides: tuple[str, ...], message: str, cure: str) -> None:
    found = only_problem(*DEEPSEEK, *overrides)
    assert message in found.message
    assert found.hint
    load(GOOD, *DEEPSEEK, *overrides, cure)


@pytest.mark.parametrize(
    ("family", "override", "message"),
    [
        (EXPERTS, "model.n_group=4", 'n_group with family "qwen3_moe": no published model of it has this'),
        (EXPERTS, "model.n_shared_experts=1", 'n_shared_experts with family "qwen3_moe"'),
        (EXPERTS, "optimizer.router_bias_update_rate=0.01", "router_bias_update_rate has no effect"),
        (
            (*DEEPSEEK, 'model.lora={rank=4, alpha=8, targets=["q_proj"]}'),
            "optimizer.router_bias_update_rate=0.01",
            "no effect: [model.lora] trains only adapters",
        ),
        (EXPERTS, "model.sigmoid_router=true", 'sigmoid_router = true with family "qwen3_moe"'),
        ((), "model.n_shared_experts=2", 'n_shared_experts with family "qwen2": its models have no experts'),
        ((), "model.partial_rotary_factor=0.5", 'partial_rotary_factor 0.5 with family "qwen2"'),
    ],
)
def test_deepseeks_keys_belong_to_a_family_that_has_them(
    family: tuple[str, ...], override: str, message: str
) -> None:
    found = only_problem(*family, override)
    assert message in found.message
    assert found.hint


def test_experts_belong_to_a_family_that_has_them() -> None:
    found = only_problem("model.num_experts=8")
    assert 'num_experts with family "qwen2": its models have no experts' in found.message
    missing = only_problem("model.family=qwen3_moe")
    assert "missing in [model]: num_experts, num_experts_per_tok, moe_intermediate_size" in missing.message


def test_later_optimizer_keys_leave_older_runs_as_they_were() -> None:
    later = {f"optimizer.{key}" for key in ("name", "decay_form", "groups", *MUON_KEYS)}
    adamw, muon = load(GOOD), load(GOOD, "optimizer.name=muon")
    assert not later & adamw.identity().keys()
    assert later - {"optimizer.decay_form", "optimizer.groups"} <= muon.identity().keys()
    assert load(GOOD, "optimizer.name=muon", "optimizer.nesterov=false").identity() != muon.identity()
    groups = [
        load(GOOD, f"optimizer.groups=[{{match='*norm*', weight_decay={decay}}}]") for decay in (0.1, 0.2)
    ]
    assert groups[0].identity() != groups[1].identity()
    assert "optimizer.groups" in groups[0].identity()
    for job in (adamw, muon, groups[0], load(GOOD, "optimizer.decay=wsd", "optimizer.decay_form=1-sqrt")):
        assert load(job.to_toml()).identity() == job.identity()
