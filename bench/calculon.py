"""Comparison with Calculon: its published validation, published step times that its inputs can express, and layouts per second.

    git clone https://github.com/calculon-ai/calculon
    python bench/calculon.py calculon [--published published.csv] [--write bench/calculon.json]

Calculon (Isaev et al., SC23) predicts training with TP, PP and DP from a GPU's rates. Its validation compares with
arXiv:2205.05198: the step times of table 5, the bytes of figure 1, the activations of figure 7. Both tools predict each case here, in
one process. That paper is not among the sources of our calibration.

`--published` takes the CSV of bench/plan_accuracy.py. Calculon can express a row if the GPU is an A100, the attention stores its
scores, there are as many key heads as query heads, tensor parallel stays within a node (a dimension has one network in Calculon),
and the vocabulary is about 51,200 (Calculon has no output head). Its A100 is used as shipped, except for the network rate, which is the
row's. Our predictions do not use rows of the same source.

Speed: the same layouts of GPT-3 175B, alternating, CPU seconds of one process. Both give time, memory and communication.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from calculon_peer import RECOMPUTED, VOCABULARY, Calculon, Refused, app_of, execution_of, model_of, recipe_of
from plan_accuracy import score, settled
from plan_fit import Lines, calibrate, line, predicted
from plan_rows import Guessed, Row, read
from seatrial.hardware.catalogue import find_gpu
from seatrial.hardware.networks import find_network
from seatrial.job.layout import Layout
from seatrial.job.numbers import divisors
from seatrial.job.schedules import schedule_named
from seatrial.plan.cost.calibration import shipped
from seatrial.plan.cost.memory import GIB, layer_activations, rank_memory
from seatrial.plan.cost.predict import predict
from seatrial.plan.cost.stacks import stacks
from seatrial.plan.model.cluster import Cluster
from seatrial.plan.model.recipe import Recipe

STACK = "megatron-2021"
# Seconds a step of arXiv:2205.05198, table 5: everything recomputed; sequence parallel with attention recomputed.
STEP_S = {
    "megatron-22B": {"full": 1.42, "seqsel": 1.10},
    "gpt3-175B": {"full": 18.13, "seqsel": 13.75},
    "turing-530B": {"full": 49.05, "seqsel": 37.83},
    "megatron-1T": {"full": 94.42, "seqsel": 71.49},
}
# GiB a GPU of its figure 1 as Calculon quotes them: states; activations without and with both of its techniques.
FIGURE_1 = {
    "megatron-22B": {"states": 45.5625, "none": 59.25, "seqsel": 9.5625},
    "gpt3-175B": {"states": 45.5625, "none": 66.84375, "seqsel": 12.3515625},
    "turing-530B": {"states": 31.640625, "none": 114.0234375, "seqsel": 23.076171875},
    "megatron-1T": {"states": 32.958984375, "none": 131.25, "seqsel": 26.5625},
}
# Per cent of the activations without any of its techniques, figure 7.
FIGURE_7 = {
    "megatron-22B": {"seq": 66.84, "sel": 49.42, "seqsel": 16.18, "full": 7.64},
    "gpt3-175B": {"seq": 62.04, "sel": 56.53, "seqsel": 18.49, "full": 8.71},
    "turing-530B": {"seq": 58.31, "sel": 62.04, "seqsel": 20.27, "full": 9.42},
    "megatron-1T": {"seq": 58.31, "sel": 62.04, "seqsel": 20.27, "full": 9.42},
}


def selene(gpus: int) -> Cluster:
    """The cluster of arXiv:2205.05198."""
    gpu, network = find_gpu("A100-80GB SXM"), find_network("InfiniBand HDR 8x200")
    assert gpu is not None
    return Cluster(gpu, -(-gpus // 8), min(gpus, 8), network)


def compared(cases: list[tuple[str, float, float, float]]) -> dict[str, Any]:
    """Scores of (case, published, Calculon's, ours), and the cases themselves."""
    return {
        "calculon": score([abs(theirs / truth - 1) for _, truth, theirs, _ in cases]),
        "ours": score([abs(mine / truth - 1) for _, truth, _, mine in cases]),
        "cases": {
            name: {"published": truth, "calculon": round(theirs, 3), "ours": round(mine, 3)}
            for name, truth, theirs, mine in cases
        },
    }


def step_times(peer: Calculon) -> dict[str, Any]:
    """Table 5. Ours twice: with the shipped pace, and with the pace fitted to the table's other models."""
    shipped_ones, tuned, inside = [], [], 0
    rows = []
    for name, modes in STEP_S.items():
        app = peer.json("models", f"{name}.json")
        for mode, truth in modes.items():
            execution = peer.json("validation", "seqsel", "tab5", f"{name}_{mode}.json")
            theirs = peer.run(app, execution, peer.system())["total_time"]
            row = _row(name, app, execution, truth)
            found = predict(row.model, row.recipe, row.cluster, stack=STACK)
            inside += found.low_s <= truth <= found.high_s
            shipped_ones.append((f"{name} {mode}", truth, theirs, found.step_s))
            rows.append((row, theirs))
    lines: Lines = {i: line(row) for i, (row, _) in enumerate(rows)}
    for row, theirs in rows:
        others = ((i, r) for i, (r, _) in enumerate(rows) if r.name != row.name)
        pace = calibrate(others, lines, shipped()).pace(STACK, row.cluster.gpu)
        assert row.step_s is not None
        tuned.append((row.name, row.step_s, theirs, predicted(row, pace)))
    result = compared(shipped_ones)
    result["ours"]["inside_interval_%"] = round(100 * inside / len(rows), 1)
    result["ours_paced_by_the_other_models"] = compared(tuned)["ours"]
    return result


def _row(name: str, app: dict[str, Any], execution: dict[str, Any], step_s: float) -> Row:
    """A case of table 5 as bench/plan_accuracy.py has published results."""
    recipe = recipe_of(app, execution)
    cluster = selene(recipe.world)
    return Row(
        source="arXiv:2205.05198 table 5",
        name=name,
        gpu=cluster.gpu.name,
        model=model_of(app),
        recipe=recipe,
        cluster=cluster,
        stack=STACK,
        free_microbatch=False,
        free_recompute=False,
        step_s=step_s,
        memory_bytes=None,
        memory_kind="allocated",
        fits=True,
    )


def _activations(app: dict[str, Any], execution: dict[str, Any]) -> float:
    """Activation bytes on the first rank as the paper counts them: layers only, without working memory."""
    model, recipe = model_of(app), recipe_of(app, execution)
    layout = recipe.layout
    at = (layout.pipeline, layout.stages_per_rank, recipe.microbatches, 0)
    held = schedule_named(layout.schedule).in_flight(*at) if layout.pipeline > 1 else layout.stages_per_rank
    layers = held * model.num_hidden_layers / layout.stages
    if recipe.recompute == "full":
        return layers * 2.0 * recipe.tokens * model.hidden_size
    return layers * layer_activations(model, recipe, stacks()[STACK])


def _states(app: dict[str, Any], execution: dict[str, Any]) -> float:
    """Bytes of weights, gradients and optimizer state on the first rank; the figure leaves the embedding out."""
    model = replace(model_of(app), vocab_size=0, learned_positions=0)
    return rank_memory(model, recipe_of(app, execution), stacks()[STACK], 0).states


def memory_figures(peer: Calculon) -> dict[str, Any]:
    """Figures 1 and 7, which the paper has from formulas: they test that a tool knows what is kept, not how well it allocates."""
    system = peer.system(roomy=True)
    states, activations, relative = [], [], []
    for name, truth in FIGURE_1.items():
        app = peer.json("models", f"{name}.json")
        for mode in ("none", "seqsel"):
            execution = peer.json("validation", "seqsel", "fig1", f"{name}_{mode}.json")
            theirs = peer.run(app, execution, system)
            held = sum(theirs[k] for k in ("weight_space", "weight_grad_space", "optimizer_space"))
            mine = _states(app, execution)
            states.append((f"{name} {mode}", truth["states"], held / GIB, mine / GIB))
            kept = _activations(app, execution) / GIB
            activations.append((f"{name} {mode}", truth[mode], theirs["act_space"] / GIB, kept))
    for name, modes in FIGURE_7.items():
        app = peer.json("models", f"{name}.json")
        bytes_of: dict[str, tuple[float, float]] = {}
        for mode in ("none", *modes):
            execution = peer.json("validation", "seqsel", "fig7", f"{name}_{mode}.json")
            found = peer.run(app, execution, system)
            theirs_bytes = found["act_space"] + found["act_checkpoint_size"]
            bytes_of[mode] = theirs_bytes, _activations(app, execution)
        for mode, per_cent in modes.items():
            theirs_part, mine_part = (
                100 * a / b for a, b in zip(bytes_of[mode], bytes_of["none"], strict=True)
            )
            relative.append((f"{name} {mode}", per_cent, theirs_part, mine_part))
    return {
        "figure_1_states_gib": compared(states),
        "figure_1_activations_gib": compared(activations),
        "figure_7_activations_%": compared(relative),
    }


def expressible(row: Row) -> bool:
    r, m = row.recipe, row.model
    return (
        row.gpu.startswith("A100")
        and stacks()[row.stack].attention == "unfused"
        and not m.gated
        and m.num_key_value_heads == m.num_attention_heads
        and abs(m.vocab_size - VOCABULARY) < 2000
        and r.context == 1
        and r.layout.tensor <= row.cluster.gpus_per_node
        and r.precision == "bf16"
        and r.sharding in ("none", "optimizer")
        and r.recompute in RECOMPUTED
    )


def published(peer: Calculon, path: Path) -> dict[str, Any]:
    """Errors of both tools by source, on rows that Calculon can express."""
    rows = [settled(r) for r in read(path)[0] if not isinstance(r, Guessed)]
    timed = [r for r in rows if r.step_s is not None and r.fits]
    lines: Lines = {i: line(r) for i, r in enumerate(timed)}
    errors: dict[str, list[tuple[float, float]]] = {}
    refused = asked = 0
    for source in sorted({r.source for r in timed if expressible(r)}):
        known = calibrate(((i, r) for i, r in enumerate(timed) if r.source != source), lines, shipped())
        for row in (r for r in timed if r.source == source and expressible(r)):
            asked += 1
            network = row.cluster.network
            assert network is not None
            assert row.step_s is not None
            system = peer.system(network.gb_s_per_gpu, roomy=True)
            execution = execution_of(row.recipe, row.cluster.gpus_per_node)
            try:
                theirs = peer.run(app_of(row.model, row.recipe.sequence), execution, system)["total_time"]
            except Refused:
                refused += 1
                continue
            mine = predicted(row, known.pace(row.stack, row.cluster.gpu, row.recipe.precision))
            errors.setdefault(source, []).append((abs(theirs / row.step_s - 1), abs(mine / row.step_s - 1)))

    def both(found: list[tuple[float, float]]) -> dict[str, Any]:
        return {"calculon": score([t for t, _ in found]), "ours": score([m for _, m in found])}

    everything = list(itertools.chain(*errors.values()))
    return {
        "rows": asked,
        "refused_by_calculon": refused,
        "all": both(everything) if everything else None,
        "by_source": {source: both(found) for source, found in errors.items()},
    }


def layouts(app: dict[str, Any], gpus: int, batch: int) -> Iterator[Recipe]:
    """Layouts of a GPT in terms of both tools."""
    layers = app["num_blocks"]
    for tensor, pipeline in itertools.product((1, 2, 4, 8), divisors(layers, most=gpus)):
        if gpus % (tensor * pipeline) or batch % (gpus // tensor // pipeline):
            continue
        data = gpus // tensor // pipeline
        for per_rank in divisors(layers // pipeline, most=4) if pipeline > 1 else (1,):
            for micro in (1, 2, 4, 8):
                each = batch // data
                if each % micro or (per_rank > 1 and each // micro % pipeline):
                    continue
                for again, parallel, cut in itertools.product(RECOMPUTED, (False, True), (False, True)):
                    if (cut and data == 1) or (parallel and tensor == 1):
                        continue
                    yield Recipe(
                        layout=Layout(
                            tensor=tensor,
                            shard=data,
                            pipeline=pipeline,
                            stages_per_rank=per_rank,
                            schedule="interleaved-1f1b" if per_rank > 1 else "1f1b",
                        ),
                        sequence=app["seq_size"],
                        global_batch=batch,
                        microbatch=micro,
                        sharding="optimizer" if cut else "none",
                        recompute=again,  # type: ignore[arg-type]
                        sequence_parallel=parallel,
                    )


def speed(peer: Calculon, gpus: int, batch: int, rounds: int, most: int) -> dict[str, Any]:
    """CPU seconds per layout of both tools, best of `rounds`, alternating, on layouts that Calculon can express."""
    app = peer.json("models", "gpt3-175B.json")
    model, cluster, system = model_of(app), selene(gpus), peer.system(roomy=True)
    every = list(layouts(app, gpus, batch))
    jobs: list[tuple[dict[str, Any], Recipe]] = []
    for recipe in every[:: math.ceil(len(every) / most)]:
        execution = execution_of(recipe, 8)
        with contextlib.suppress(Refused):
            peer.run(app, execution, system)
            jobs.append((execution, recipe))

    def timed(one: Callable[[dict[str, Any], Recipe], object]) -> float:
        start = time.process_time()
        for execution, recipe in jobs:
            one(execution, recipe)
        return (time.process_time() - start) / len(jobs)

    theirs, mine = [], []
    for _ in range(rounds):
        theirs.append(timed(lambda execution, _: peer.run(app, execution, system)))
        mine.append(timed(lambda _, recipe: predict(model, recipe, cluster, stack=STACK)))
    return {
        "gpus": gpus,
        "layouts": len(jobs),
        "calculon_layouts_per_s": round(1 / min(theirs)),
        "ours_layouts_per_s": round(1 / min(mine)),
        "ratio": round(statistics.median(t / m for t, m in zip(theirs, mine, strict=True)), 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("calculon", type=Path, help="a checkout of Calculon")
    parser.add_argument("--published", type=Path, help="published.csv")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layouts", type=int, default=100, help="the most that are timed")
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    peer = Calculon(options.calculon)
    result: dict[str, Any] = {
        "calculon": peer.commit,
        "table_5_step_s": step_times(peer),
        **memory_figures(peer),
    }
    if options.published:
        result["published_rows"] = published(peer, options.published)
    result["speed"] = [speed(peer, n, 1536, options.rounds, options.layouts) for n in (128, 1024)]
    text = re.sub(r"\{[^{}]*\}", lambda m: " ".join(m.group().split()), json.dumps(result, indent=1))
    if options.write:
        options.write.write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
