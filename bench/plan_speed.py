"""Speed of the planner: one prediction, the search for 128 and for 1,024 GPUs, the whole command.

    python bench/plan_speed.py [--rounds 3] [--write bench/plan_speed.json]

The job is the reference job (Qwen2.5-72B, 8 B300 per node). CPU and wall-clock seconds of one process; the minimum of
`rounds` (the mean for the command's CPU time), since other load only adds. A layout counts as tried if the rules of the job file allow it; those
without enough memory cost less than the others. Exit code 1 if a limit is exceeded.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import seatrial
from seatrial.hardware.catalogue import find_gpu
from seatrial.hardware.networks import find_network
from seatrial.job import Job, load_job
from seatrial.plan.cost.memory import memory
from seatrial.plan.cost.predict import predict
from seatrial.plan.model.cluster import Cluster
from seatrial.plan.model.recipe import Recipe
from seatrial.plan.search.search import predicted, search

# What each may take, seconds: a layout, a search by the number of GPUs, the verb on 128 GPUs by its option.
LAYOUT_S = 1e-3
SEARCH_S = {128: 5.0, 1024: 20.0}
VERB_S = {"--own": 1.0, "": 5.0}
PRESET = str(files("seatrial.job") / "presets" / "qwen2.5-72b-b300.toml")


def clocks(work: Callable[[], object], rounds: int) -> tuple[float, float]:
    """CPU and wall-clock seconds, minimum of several rounds."""
    found = []
    for _ in range(rounds):
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        found.append((time.process_time() - cpu, time.perf_counter() - wall))
    return min(c for c, _ in found), min(w for _, w in found)


def job_on(nodes: int) -> Job:
    return load_job(Path(PRESET), [f"cluster.nodes={nodes}"])


def cluster_of(nodes: int) -> Cluster:
    gpu, network = find_gpu("B300 SXM"), find_network("InfiniBand NDR 8x400")
    assert gpu is not None
    return Cluster(gpu, nodes, 8, network)


def layout(rounds: int) -> dict[str, Any]:
    """One prediction, each with another batch so that nothing is cached."""
    job, cluster = job_on(16), cluster_of(16)
    model, recipe = job.architecture, Recipe.of(job)
    batches = range(1024, 1024 + 8 * 200, 8)

    def work() -> None:
        for batch in batches:
            predict(model, replace(recipe, global_batch=batch), cluster)

    cpu, _ = clocks(work, rounds)
    each = cpu / len(batches)
    return {"cpu_s": round(each, 6), "layouts_per_s": round(1 / each), "limit_s": LAYOUT_S}


def search_of(gpus: int, rounds: int) -> dict[str, Any]:
    job, cluster = job_on(gpus // 8), cluster_of(gpus // 8)
    found = search(job, cluster)

    def work() -> None:
        memory.cache_clear()
        predicted.cache_clear()
        search(job, cluster)

    cpu, wall = clocks(work, rounds)
    best = found.choices[0]
    return {
        "gpus": gpus,
        "cpu_s": round(cpu, 2),
        "wall_s": round(wall, 2),
        "limit_s": SEARCH_S[gpus],
        "tried": found.tried,
        "too_large": found.too_large,
        "layouts_per_s": round(found.tried / cpu),
        "best": str(best.recipe.layout),
        "tokens_per_s_per_gpu": round(best.prediction.tokens_per_s_per_gpu),
    }


def verb(option: str, rounds: int) -> dict[str, Any]:
    """`seatrial plan` from the shell: Python start-up, search and output."""
    environment = {**os.environ, "PYTHONPATH": str(Path(seatrial.__file__).parents[1])}

    def work() -> None:
        subprocess.run(
            [sys.executable, "-m", "seatrial", "plan", PRESET, "--json", *option.split()],
            env=environment,
            stdout=subprocess.DEVNULL,
            check=True,
        )

    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    _, wall = clocks(work, rounds)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / rounds
    return {
        "option": option,
        "cpu_s": round(cpu, 2),
        "wall_s": round(wall, 2),
        "limit_s": VERB_S[option],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    one = layout(options.rounds)
    searches = [search_of(gpus, options.rounds) for gpus in SEARCH_S]
    verbs = [verb(option, options.rounds) for option in VERB_S]
    result = {"layout": one, "search": searches, "verb": verbs}
    text = re.sub(r"\{[^{}]*\}", lambda m: " ".join(m.group().split()), json.dumps(result, indent=1))
    print(text)
    if options.write:
        options.write.write_text(text + "\n", encoding="utf-8")
    # CPU seconds: others may use the machine.
    return int(any(t["cpu_s"] > t["limit_s"] for t in (one, *searches, *verbs)))


if __name__ == "__main__":
    sys.exit(main())
