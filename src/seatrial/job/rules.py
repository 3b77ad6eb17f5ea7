"""Rules between the keys of a job file.

A rule is a generator of findings; a rule that needs a value which could not be read is skipped. Rules about
the layout of ranks are in `rules_layout.py`, about the data in `rules_data.py`.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from urllib.parse import urlsplit

from seatrial.base.errors import InputError
from seatrial.job.alert_rules import rules
from seatrial.job.architecture import DEEPSEEK_MIXTURE, MIXTURE
from seatrial.job.families import FAMILIES, family_named
from seatrial.job.finding import Facts, RuleViolation
from seatrial.job.huggingface import read_config
from seatrial.job.lora import LORA_TARGETS
from seatrial.job.numbers import divisors, either, near_multiples
from seatrial.job.optimizers import MUON, optimizer_named
from seatrial.job.parameters import trained_names
from seatrial.job.partial import UnreadableError
from seatrial.job.resolve import SIZES
from seatrial.job.rules_data import DATA_RULES
from seatrial.job.rules_layout import LAYOUT_RULES
from seatrial.job.schema import MUON_KEYS, OptimizerSection
from seatrial.storage import is_remote, open_store
from seatrial.storage.names import FILE

_LEAST_BF16_CHANGE = 2**-8  # spacing of bf16 values, relative
_LEAST_CLIP = 1e-12
BEATS_BEFORE_LOST = 4  # heartbeat intervals of silence that a node must be allowed

Rule = Callable[[Facts], Iterator[RuleViolation]]


def check(facts: Facts, more: Sequence[Rule] = ()) -> list[RuleViolation]:
    """All violations that can be judged, of the rules of the job file and of `more`."""
    found: list[RuleViolation] = []
    for rule in (*RULES, *DATA_RULES, *LAYOUT_RULES, *more):
        try:
            found += rule(facts)
        except UnreadableError:
            continue
    return found


def _heads(facts: Facts) -> Iterator[RuleViolation]:
    heads, kv_heads = facts.architecture.num_attention_heads, facts.architecture.num_key_value_heads
    if heads % kv_heads:
        yield RuleViolation(
            ("model.num_key_value_heads", "model.num_attention_heads", "model"),
            f"num_attention_heads {heads} is not divisible by num_key_value_heads {kv_heads}: each key/value head must "
            "serve the same number of query heads",
            f"use num_key_value_heads = {either(divisors(heads))}",
        )


def _head_dim(facts: Facts) -> Iterator[RuleViolation]:
    d = facts.architecture.head_dim
    if d % 2:
        yield RuleViolation(
            ("model.head_dim", "model.hidden_size", "model"),
            f"head_dim {d} is odd: rotary position embedding rotates pairs of dimensions",
            f"use head_dim = {d - 1 or 2} or {d + 1}",
        )
    elif (width := d * facts.architecture.partial_rotary_factor) < 2 or width % 2:
        yield RuleViolation(
            ("model.partial_rotary_factor", "model.head_dim", "model"),
            f"partial_rotary_factor {facts.architecture.partial_rotary_factor:g} of head_dim {d} is {width:g}: rotary position "
            "embedding rotates pairs of dimensions",
            f"use partial_rotary_factor = {max(2, 2 * int(width / 2)) / d:g}",
        )


def _family(facts: Facts) -> Iterator[RuleViolation]:
    a = facts.architecture
    for key, usual in family_named(a.family).fixed_switches.items():
        if (value := getattr(a, key)) != usual:
            owner = next(name for name, family in FAMILIES.own.items() if family.switches[key])
            shown = str(value).lower()
            yield RuleViolation(
                (f"model.{key}", "model.family", "model"),
                f'{key} = {shown} with family "{a.family}": no published model of it has this, so it could not be exported',
                f'remove {key}, or set family = "{owner}"'
                if value
                else f"remove {key}: it is always true for {a.family}",
            )

    if a.partial_rotary_factor != 1 and family_named(a.family).partial_rotary_factor == 1:
        yield RuleViolation(
            ("model.partial_rotary_factor", "model.family", "model"),
            f'partial_rotary_factor {a.partial_rotary_factor:g} with family "{a.family}": no published model of it has this, so it '
            "could not be exported",
            "remove partial_rotary_factor",
        )


def _experts(facts: Facts) -> Iterator[RuleViolation]:
    a = facts.architecture
    sizes = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
    if not family_named(a.family).experts:
        given = [key for key in MIXTURE if getattr(a, key)]
        if given := given + _only_deepseek(facts):
            owners = [name for name, family in FAMILIES.own.items() if family.experts]
            yield RuleViolation(
                tuple(f"model.{key}" for key in given),
                f'{given[0]} with family "{a.family}": its models have no experts',
                f'remove {", ".join(given)}, or set family = "{owners[0]}"',
            )
        return
    missing = [key for key in sizes if not getattr(a, key)]
    if missing:
        yield RuleViolation(
            ("model.family", "model"),
            f'missing in [model]: {", ".join(missing)}: models of family "{a.family}" have experts',
            f"give {', '.join(missing)}",
        )
    elif a.num_experts_per_tok > a.num_experts:
        yield RuleViolation(
            ("model.num_experts_per_tok", "model.num_experts", "model"),
            f"num_experts_per_tok {a.num_experts_per_tok} is more than num_experts {a.num_experts}: a token is sent to different "
            "experts",
            f"use num_experts_per_tok = {a.num_experts} or less",
        )
    elif not family_named(a.family).sigmoid_router:
        if given := _only_deepseek(facts):
            owner = next(name for name, family in FAMILIES.own.items() if family.sigmoid_router)
            yield RuleViolation(
                tuple(f"model.{key}" for key in given),
                f'{given[0]} with family "{a.family}": no published model of it has this, so it could not be exported',
                f'remove {", ".join(given)}, or set family = "{owner}"',
            )
    elif a.first_k_dense_replace >= a.num_hidden_layers:
        yield RuleViolation(
            ("model.first_k_dense_replace", "model.num_hidden_layers", "model"),
            f"first_k_dense_replace {a.first_k_dense_replace} leaves no layer with experts: the model has {a.num_hidden_layers} layers",
            f"use first_k_dense_replace = {a.num_hidden_layers - 1} or less",
        )
    else:
        yield from _expert_groups(facts)


def _only_deepseek(facts: Facts) -> list[str]:
    """Keys that only families with a sigmoid router have."""
    a = facts.architecture
    return [key for key, usual in DEEPSEEK_MIXTURE.items() if getattr(a, key) != usual]


def _expert_groups(facts: Facts) -> Iterator[RuleViolation]:
    a = facts.architecture
    keys = ("model.n_group", "model.topk_group", "model.num_experts", "model")
    if a.num_experts % a.n_group or a.num_experts < 2 * a.n_group:
        fits = [n for n in divisors(a.num_experts) if 2 * n <= a.num_experts]
        yield RuleViolation(
            keys,
            f"num_experts {a.num_experts} is not {a.n_group} equal groups of two or more experts: a group's score is the sum of its "
            "two best",
            f"use n_group = {either(fits[-3:] or [1])}",
        )
    elif a.topk_group > a.n_group:
        yield RuleViolation(
            keys[1:2] + keys,
            f"topk_group {a.topk_group} is more than n_group {a.n_group}",
            f"use topk_group = {a.n_group} or less",
        )
    elif a.num_experts_per_tok > (within := a.topk_group * (a.num_experts // a.n_group)):
        yield RuleViolation(
            keys[1:2] + keys,
            f"num_experts_per_tok {a.num_experts_per_tok} is more than the {within} experts of topk_group {a.topk_group} groups",
            f"use num_experts_per_tok = {within} or less, or a larger topk_group",
        )


def _router_bias(facts: Facts) -> Iterator[RuleViolation]:
    optimizer, usual = facts.job.optimizer, OptimizerSection.model_fields["router_bias_update_rate"].default
    if optimizer.router_bias_update_rate == usual:
        return
    why = "[model.lora] trains only adapters" if facts.architecture.lora is not None else None
    if not facts.architecture.sigmoid_router:
        why = f'routers of family "{facts.architecture.family}" have no bias'
    if why is not None:
        keys = ("optimizer.router_bias_update_rate",)
        yield RuleViolation(keys, f"router_bias_update_rate has no effect: {why}", "remove it")


def _rope_scaling(facts: Facts) -> Iterator[RuleViolation]:
    scaling = facts.architecture.rope_scaling
    if scaling is not None and scaling.high_freq_factor <= scaling.low_freq_factor:
        yield RuleViolation(
            ("model.rope_scaling.high_freq_factor", "model.rope_scaling", "model"),
            f"high_freq_factor {scaling.high_freq_factor:g} is not greater than low_freq_factor {scaling.low_freq_factor:g}: "
            "frequencies between the two are interpolated",
            "Llama 3.1 uses low_freq_factor = 1.0 and high_freq_factor = 4.0",
        )


def _update_size(facts: Facts) -> Iterator[RuleViolation]:
    optimizer = facts.job.optimizer
    lr = optimizer.lr * max(1.0, optimizer.adamw_lr_factor)
    shown = f"lr {lr:g}{' (with adamw_lr_factor)' if lr > optimizer.lr else ''}"
    yield from _removed(("optimizer.weight_decay", "optimizer.lr"), shown, lr, optimizer.weight_decay)
    for number, group in enumerate(optimizer.groups):
        with contextlib.suppress(UnreadableError):
            keys = tuple(f"optimizer.groups.{number}.{key}" for key in ("weight_decay", "lr_factor"))
            factor, decay = group.lr_factor, group.weight_decay
            decay = optimizer.weight_decay if decay is None else decay
            yield from _removed(keys, f"{shown} x lr_factor {factor:g}", lr * factor, decay)


def _removed(keys: tuple[str, ...], shown: str, lr: float, decay: float) -> Iterator[RuleViolation]:
    if lr * decay >= 1:
        yield RuleViolation(
            keys,
            f"{shown} x weight_decay {decay:g} = {lr * decay:g} must be less than 1: it is the fraction of each weight that one "
            "update removes",
            "a common value is weight_decay = 0.1",
        )


def _groups(facts: Facts) -> Iterator[RuleViolation]:
    groups, arch = facts.job.optimizer.groups, facts.architecture
    patterns: dict[int, str] = {}
    for number, group in enumerate(groups):
        with contextlib.suppress(UnreadableError):
            patterns[number] = group.match
            if not group.model_fields_set & {"lr_factor", "weight_decay"}:
                yield RuleViolation(
                    (f"optimizer.groups.{number}.match",),
                    "a group without lr_factor and weight_decay has no effect",
                    "give one of them; lr_factor = 1.0 leaves the parameters as they are without groups",
                )
    matched: set[int] = set()
    empty = set(patterns)
    for name in trained_names(arch):
        if not empty:
            break
        found = [number for number, pattern in patterns.items() if fnmatchcase(name, pattern)]
        matched.update(found)
        empty.difference_update(found[:1])
    for number in sorted(empty):
        pattern, keys = patterns[number], (f"optimizer.groups.{number}.match",)
        if number in matched:
            yield RuleViolation(
                keys,
                f'earlier groups have all parameters that are named "{pattern}": the first that matches decides',
                "put it before them, or remove it",
            )
            continue
        what = "no parameter" if arch.lora is None else "[model.lora] trains only adapters, and none"
        part = pattern.strip("*")
        yield RuleViolation(
            keys,
            f'{what} is named "{pattern}"',
            f'names are compared whole: did you mean "*{part}*"?'
            if any(part in name for name in trained_names(arch))
            else _similar(pattern, list(trained_names(arch, "*"))),
        )


def _muon(facts: Facts) -> Iterator[RuleViolation]:
    optimizer = facts.job.optimizer
    if optimizer.name != MUON.name:
        for key in MUON_KEYS:
            if getattr(optimizer, key) != OptimizerSection.model_fields[key].default:
                yield RuleViolation(
                    (f"optimizer.{key}",),
                    f'{key} is only used with name = "muon", not "{optimizer.name}"',
                    f'remove {key}, or set name = "muon"',
                )
    elif facts.job.model.lora is not None:
        yield RuleViolation(
            ("optimizer.name",),
            "muon with [model.lora] is not supported in this version: it would orthogonalise A and B, not the change of the weight, "
            "which is their product",
            'use name = "adamw", or remove [model.lora]',
        )


def _clip(facts: Facts) -> Iterator[RuleViolation]:
    norm = facts.job.optimizer.clip_norm
    if 0 < norm < _LEAST_CLIP:
        yield RuleViolation(
            ("optimizer.clip_norm",),
            f"clip_norm {norm:g} is too small: clipped gradients would vanish in fp32",
            "a common value is clip_norm = 1.0; 0 disables clipping",
        )


def _moments(facts: Facts) -> Iterator[RuleViolation]:
    optimizer = facts.job.optimizer
    if optimizer_named(optimizer.name).state_precision != "bf16":
        return
    for key in ("beta1", "beta2"):
        beta = getattr(optimizer, key)
        if 1 - beta < _LEAST_BF16_CHANGE:
            yield RuleViolation(
                (f"optimizer.{key}", "optimizer.name"),
                f"{key} {beta:g} is too close to 1 for {optimizer.name}: an update moves a moment by {100 * (1 - beta):.2g} % of its "
                "distance to the new value, and bf16 cannot store changes of less than 0.4 %",
                f'use {key} = 0.99 or less, or name = "adamw"',
            )


def _sequence_positions(facts: Facts) -> Iterator[RuleViolation]:
    length, limit = facts.job.train.sequence_length, facts.architecture.max_position_embeddings
    if length > limit:
        yield RuleViolation(
            ("train.sequence_length",),
            f"sequence_length {length} is more than the model's max_position_embeddings {limit}",
            f"use sequence_length = {limit} or less, or set model.max_position_embeddings = {length}",
        )


def _init_from(facts: Facts) -> Iterator[RuleViolation]:
    given = facts.job.model.init_from
    if given is None:
        return
    keys, folder = ("model.init_from",), Path(given)
    hint = "give the folder of a Hugging Face checkpoint, with config.json and *.safetensors"
    if not os.path.isdir(folder):  # False also for a name that is too long
        yield RuleViolation(keys, f"init_from: no folder {folder}", hint)
        return
    if not any(folder.glob("*.safetensors")):
        yield RuleViolation(keys, f"init_from: no *.safetensors in {folder}", hint)
    if not os.path.isfile(folder / "config.json"):
        yield RuleViolation(keys, f"init_from: no config.json in {folder}", hint)
        return
    try:
        theirs = read_config(folder)
    except InputError as error:
        for d in error.diagnostics:
            yield RuleViolation(keys, f"init_from: {d.file}: {d.message}", d.hint or hint)
        return
    differing = [
        f"{key} is {getattr(theirs, key)} in the checkpoint and {getattr(facts.architecture, key)} in [model]"
        for key in SIZES
        # The initialisation of fresh weights does not matter for weights that are loaded, and adapters are added to them.
        if key not in ("initializer_range", "lora")
        and getattr(theirs, key) != getattr(facts.architecture, key)
    ]
    if differing:
        yield RuleViolation(
            keys,
            f"init_from: the checkpoint is of a different model: {'; '.join(differing)}",
            f'read the model sizes from the same folder: hf = "{given}"',
        )


def _lora(facts: Facts) -> Iterator[RuleViolation]:
    given = facts.job.model.lora
    if given is None:
        return
    of_mlp = [target for target in given.targets if target in LORA_TARGETS[4:]]
    if of_mlp and facts.architecture.num_experts:
        yield RuleViolation(
            ("model.lora.targets", "model.lora"),
            f"targets has {either(of_mlp)} of a model with experts: only attention can have adapters there, in this version",
            f"use targets = {json.dumps(LORA_TARGETS[:4])}",
        )
    for number, target in enumerate(given.targets):
        if target in given.targets[:number]:
            yield RuleViolation(
                (f"model.lora.targets.{number}", "model.lora.targets", "model.lora"),
                f"targets has {target} twice",
                "remove one",
            )
    widths = facts.architecture.projections()
    most, narrowest = min((min(widths[target]), target) for target in given.targets)
    if given.rank > most:
        yield RuleViolation(
            ("model.lora.rank", "model.lora"),
            f"rank {given.rank} is more than the {most} of {narrowest}: an adapter of that layer would have a higher rank than "
            "its weight",
            f"use rank = {most} or less, or leave {narrowest} out of targets",
        )


def _lora_weights(facts: Facts) -> Iterator[RuleViolation]:
    if facts.job.model.lora is not None and facts.job.model.init_from is None:
        yield RuleViolation(
            ("model.lora",),
            "[model.lora] without init_from: the frozen weights would be random",
            "set model.init_from to the folder of a Hugging Face checkpoint",
        )


def _batch_ramp(facts: Facts) -> Iterator[RuleViolation]:
    train = facts.job.train
    before = 0
    for number, phase in enumerate(train.batch_ramp):
        size = phase.global_batch
        if not before < size < train.global_batch:
            than = f"more than the {before:,} before it, and " if before else ""
            yield RuleViolation(
                (f"train.batch_ramp.{number}.global_batch",),
                f"a batch of {size:,} in a ramp to global_batch {train.global_batch:,}: it must be {than}less than global_batch",
                "the batch grows from phase to phase; global_batch itself follows the last one",
            )
        before = max(before, size)
    ramp = sum(phase.steps for phase in train.batch_ramp)
    if ramp >= train.steps:
        yield RuleViolation(
            ("train.batch_ramp.0.steps", "train.batch_ramp", "train.steps"),
            f"batch_ramp has {ramp:,} steps, the job {train.steps:,}: global_batch would never be reached",
            "use fewer steps in its phases, or more in train.steps; train.batch_ramp=[] leaves the ramp out",
        )


def _warmup(facts: Facts) -> Iterator[RuleViolation]:
    warmup, steps = facts.job.optimizer.warmup_steps, facts.job.train.steps
    if warmup > steps:
        yield RuleViolation(
            ("optimizer.warmup_steps", "train.steps"),
            f"warmup_steps {warmup} is more than train.steps {steps}: the peak learning rate would never be reached",
            f"use warmup_steps = {steps} or less; 5 % of the run is {max(1, steps // 20)}",
        )


def _decay(facts: Facts) -> Iterator[RuleViolation]:
    optimizer = facts.job.optimizer
    decay, decay_steps = optimizer.decay, optimizer.decay_steps
    if decay != "wsd":
        form = None if optimizer.decay_form == "linear" else optimizer.decay_form
        for key, value in (("decay_steps", decay_steps), ("decay_form", form)):
            if value is not None:
                yield RuleViolation(
                    (f"optimizer.{key}",),
                    f'{key} is only used with decay = "wsd", not "{decay}"',
                    'remove it, or set decay = "wsd"',
                )
        if decay == "inverse_sqrt" and not optimizer.warmup_steps:
            yield RuleViolation(
                ("optimizer.decay", "optimizer.warmup_steps"),
                "inverse_sqrt without a warm-up: its learning rate is lr x sqrt(warmup_steps / step)",
                "give warmup_steps: after four times as many steps the learning rate is half of lr",
            )
        return
    warmup, steps = optimizer.warmup_steps, facts.job.train.steps
    length = max(1, steps // 10) if decay_steps is None else decay_steps
    if warmup <= steps < warmup + length:
        shown = f"decay_steps {length}" + (" (a tenth of the steps)" if decay_steps is None else "")
        yield RuleViolation(
            ("optimizer.decay_steps", "optimizer.warmup_steps", "optimizer.decay"),
            f"warmup_steps {warmup} + {shown} is more than train.steps {steps}",
            f"use warmup_steps = {max(0, steps - length)} or less"
            if length < steps
            else f"use fewer than {steps} decay_steps",
        )


def _silence(facts: Facts) -> Iterator[RuleViolation]:
    resilience = facts.job.resilience
    beat, silence = resilience.heartbeat_s, resilience.silence_s
    if silence < BEATS_BEFORE_LOST * beat:
        yield RuleViolation(
            ("resilience.silence_s", "resilience.heartbeat_s"),
            f"silence_s {silence:g} is less than {BEATS_BEFORE_LOST} x heartbeat_s {beat:g}: one late heartbeat "
            "would make a node count as lost",
            f"use silence_s = {BEATS_BEFORE_LOST * beat:g}, or heartbeat_s = {max(0.05, silence / BEATS_BEFORE_LOST):g}",
        )


def _first_step(facts: Facts) -> Iterator[RuleViolation]:
    resilience = facts.job.resilience
    first, least = resilience.first_step_s, resilience.hang_min_s
    if first < least:
        yield RuleViolation(
            ("resilience.first_step_s", "resilience.hang_min_s"),
            f"first_step_s {first:g} is less than hang_min_s {least:g}: the first step after a start takes longer than "
            "the others",
            f"use first_step_s = {least:g} or more",
        )


def _never_recovers(facts: Facts) -> Iterator[RuleViolation]:
    resilience = facts.job.resilience
    if resilience.max_restarts > 0:
        return
    used = {
        "cluster.spares": facts.job.cluster.spares > 0,
        "resilience.allow_gpu_reset": resilience.allow_gpu_reset,
        "resilience.allow_node_drain": resilience.allow_node_drain,
    }
    for key, is_set in used.items():
        if is_set:
            yield RuleViolation(
                (key,),
                f"{key.partition('.')[2]} has no effect: max_restarts is 0, so the first failure ends the run",
                "remove it, or set resilience.max_restarts = 1 or more",
            )


def _namespaces(facts: Facts) -> Iterator[RuleViolation]:
    cluster = facts.job.cluster
    if cluster.namespaces and cluster.launcher != "local":
        yield RuleViolation(
            ("cluster.namespaces", "cluster.launcher"),
            f'namespaces is for the nodes of one machine, but launcher is "{cluster.launcher}"',
            'remove it, or set launcher = "local"',
        )


def _stated_twice(facts: Facts) -> Iterator[RuleViolation]:
    for key in ("gpu", "network"):
        if getattr(facts.job, key) is not None and getattr(facts.job.cluster, key) is not None:
            yield RuleViolation(
                (f"cluster.{key}", key),
                f"{key} is named in [cluster] and described in [{key}]: which of them applies is unknown",
                "remove one of them",
            )


def _metrics_ports(facts: Facts) -> Iterator[RuleViolation]:
    cluster, first = facts.job.cluster, facts.job.watch.metrics_port
    if first is None:
        return
    last = first + (cluster.nodes + cluster.spares - 1 if cluster.launcher == "local" else 0)
    if last > 65535:
        yield RuleViolation(
            ("watch.metrics_port",),
            f"node {last - first} would serve /metrics on port {last}: on a virtual cluster it is metrics_port plus the node",
            f"use metrics_port = {65535 - (last - first)} or less",
        )
    elif cluster.port is not None and first <= cluster.port <= last:
        yield RuleViolation(
            ("watch.metrics_port", "cluster.port"),
            f"metrics_port {first} takes port {cluster.port}, which is that of the process group's store",
            "use another port for one of them",
        )


def _alerts(facts: Facts) -> Iterator[RuleViolation]:
    watch, known = facts.job.watch, rules()
    for key, names in (("alerts_off", watch.alerts_off), ("alerts", list(watch.alerts))):
        for name in names:
            if name not in known:
                keys = (f"watch.{key}.{name}", f"watch.{key}")
                yield RuleViolation(keys, f"there is no alert rule `{name}`", _similar(name, list(known)))
    for name, own in watch.alerts.items():
        numbers = known[name].numbers if name in known else {}
        for number, value in own.items():
            where = (f"watch.alerts.{name}.{number}", f"watch.alerts.{name}", "watch.alerts")
            if numbers and number not in numbers:
                text = f"the alert rule {name} has no number `{number}`"
                yield RuleViolation(where, text, _similar(number, list(numbers)))
            elif not 0 <= value <= 1e9:
                yield RuleViolation(where, f"{name}.{number} is {value:g}", "use a number from 0 to 1e9")
        if {"limit", "clear"} <= numbers.keys() and {"limit", "clear"} & own.keys():
            limit, clear = ({**numbers, **own}[key] for key in ("limit", "clear"))
            if (limit - clear) * (numbers["limit"] - numbers["clear"]) < 0:
                side = "at most" if numbers["limit"] > numbers["clear"] else "at least"
                yield RuleViolation(
                    (f"watch.alerts.{name}.limit", f"watch.alerts.{name}", "watch.alerts"),
                    f"the alert rule {name} would be resolved at {clear:g} while it fires at {limit:g}",
                    f"use a `clear` of {side} {limit:g}",
                )


def _alert_delivery(facts: Facts) -> Iterator[RuleViolation]:
    watch = facts.job.watch
    if watch.alert_webhook_file is not None and watch.alert_webhook_env is not None:
        keys = ("watch.alert_webhook_file", "watch.alert_webhook_env")
        yield RuleViolation(keys, "two sources for one webhook", "remove one of them")
    if watch.alert_webhook_env is not None and not re.fullmatch(r"[A-Za-z_]\w*", watch.alert_webhook_env):
        yield RuleViolation(
            ("watch.alert_webhook_env",),
            "alert_webhook_env is not the name of an environment variable",
            "the address itself is a secret: put it into a variable, or a file that alert_webhook_file names",
        )
    if watch.alert_webhook_file is not None and "://" in watch.alert_webhook_file:
        yield RuleViolation(
            ("watch.alert_webhook_file",),
            "alert_webhook_file is an address, not a file",
            "the address is a secret, and job files are copied: write it to a file that only you can read, and name that",
        )
    if watch.alertmanager is not None:
        address = urlsplit(watch.alertmanager)
        if address.scheme not in ("http", "https") or not address.hostname:
            hint = 'use alertmanager = "http://HOST:9093"'
            yield RuleViolation(("watch.alertmanager",), "alertmanager is not an HTTP address", hint)
        elif address.username or address.password:
            text, hint = "alertmanager has a password in it, and job files are copied", "remove it"
            yield RuleViolation(("watch.alertmanager",), text, hint)


def _similar(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean `{close[0]}`?" if close else f"there are: {', '.join(known)}"


def _checkpoint_places(facts: Facts) -> Iterator[RuleViolation]:
    section = facts.job.checkpoint
    for key in ("folder", "fallback"):
        try:
            given = getattr(section, key)
            # Only checks that the location is valid. A folder is not accessed: every rank reads the job when it starts,
            # and a folder that hangs would delay a recovery that needs nothing from it.
            if given is not None and (is_remote(given) or given == FILE):
                open_store(given)
        except UnreadableError:
            continue
        except InputError as error:
            yield RuleViolation(
                (f"checkpoint.{key}",), error.message, error.hint or "give a path, or s3://BUCKET/PREFIX"
            )
    if section.fallback is not None and section.fallback == section.folder:
        yield RuleViolation(
            ("checkpoint.fallback",),
            "fallback is the same location as folder: a save that fails in one also fails in the other",
            "use another storage location, or remove it",
        )


def _keep_every(facts: Facts) -> Iterator[RuleViolation]:
    every, kept = facts.job.checkpoint.every_steps, facts.job.checkpoint.keep_every_steps
    if every != "auto" and kept % every:
        yield RuleViolation(
            ("checkpoint.keep_every_steps",),
            f"keep_every_steps {kept} is not a multiple of every_steps {every}: no checkpoint is saved at that step",
            f"use keep_every_steps = {either(near_multiples(kept, every))}",
        )


def _recompute_every(facts: Facts) -> Iterator[RuleViolation]:
    train = facts.job.train
    if train.recompute_every_layers > 1 and train.activation_checkpointing == "none":
        yield RuleViolation(
            ("train.recompute_every_layers",),
            f"recompute_every_layers {train.recompute_every_layers} has no effect: activation_checkpointing is none",
            'remove it, or set activation_checkpointing = "full" or "selective"',
        )


def _offload(facts: Facts) -> Iterator[RuleViolation]:
    train = facts.job.train
    if train.offload_activations and train.activation_checkpointing != "full":
        yield RuleViolation(
            ("train.offload_activations",),
            f'offload_activations with activation_checkpointing = "{train.activation_checkpointing}": only inputs of layers '
            "that are fully recomputed are offloaded",
            'set activation_checkpointing = "full", or remove offload_activations',
        )


RULES: tuple[Rule, ...] = (
    _heads,
    _head_dim,
    _family,
    _experts,
    _router_bias,
    _rope_scaling,
    _update_size,
    _groups,
    _batch_ramp,
    _muon,
    _clip,
    _moments,
    _sequence_positions,
    _lora,
    _warmup,
    _decay,
    _silence,
    _first_step,
    _never_recovers,
    _namespaces,
    _metrics_ports,
    _stated_twice,
    _alerts,
    _alert_delivery,
    _checkpoint_places,
    _keep_every,
    _recompute_every,
    _offload,
)

# Rules about this machine: a job for another machine can be read and planned without them.
HERE_RULES: tuple[Rule, ...] = (_init_from, _lora_weights)
