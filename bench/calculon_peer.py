"""Calculon (github.com/calculon-ai/calculon) called from a checkout, and its terms as ours and back. Used by bench/calculon.py."""

from __future__ import annotations

import copy
import importlib
import json
import logging
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

from other_model import OtherModel
from seatrial.job.architecture import Architecture
from seatrial.job.layout import Layout
from seatrial.plan.model.recipe import Recipe

VOCABULARY = 51200  # of all models of arXiv:2205.05198; Calculon's count of parameters has it built in
RECOMPUTED = {"none": "none", "attention": "attn_only", "full": "full"}


class Refused(Exception):
    """Calculon's inputs cannot express the case, or Calculon rejects it."""


class Calculon:
    """A checkout of Calculon, called as in its own validation."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("pandas", "psutil"):
            # Only its command lines use them.
            try:
                importlib.import_module(name)
            except ImportError:
                stand_in = types.ModuleType(name)
                stand_in.__dict__["cpu_count"] = lambda logical=True: 1
                sys.modules[name] = stand_in
        sys.path.insert(0, str(folder))  # before this folder, in which this file has the same name
        top = importlib.import_module("calculon")
        self.llm, self.system_type = top.llm.Llm, top.System
        self.log = logging.Logger("calculon")

    @property
    def commit(self) -> str:
        done = subprocess.run(
            ["git", "-C", str(self.folder), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        )
        return done.stdout.strip() or "unknown"

    def json(self, *parts: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.folder.joinpath(*parts).read_text(encoding="utf-8"))
        return found

    def system(self, gb_s: float | None = None, *, roomy: bool = False) -> Any:
        """Its A100 as shipped; with another rate between nodes, and with memory without end."""
        config = copy.deepcopy(self.json("systems", "a100_80g.json"))
        if gb_s is not None:
            config["networks"][1]["bandwidth"] = gb_s
        if roomy:  # as its own a100_80e.json has it
            config["mem1"]["GiB"] = 80_000_000_000
        return self.system_type(config)

    def run(self, app: dict[str, Any], execution: dict[str, Any], system: Any) -> dict[str, Any]:
        """Its statistics. Raises Refused if it raises."""
        try:
            model = self.llm(self.llm.Application(app), self.log)
            model.compile(system, self.llm.Execution.from_json(execution))
            model.run(system)
        except (self.llm.Error, AssertionError) as error:
            raise Refused(str(error)) from error
        found: dict[str, Any] = model.get_stats_json(False)
        return found


def model_of(app: dict[str, Any]) -> Architecture:
    """Calculon's application as our model: a GPT without gate, tied embedding, learned positions."""
    return OtherModel(
        num_hidden_layers=app["num_blocks"],
        hidden_size=app["hidden"],
        intermediate_size=app["feedforward"],
        num_attention_heads=app["attn_heads"],
        num_key_value_heads=app["attn_heads"],
        head_dim=app["attn_size"],
        vocab_size=VOCABULARY,
        gated=False,
        tie_word_embeddings=True,
        layer_vectors=13 * app["hidden"],
        learned_positions=app["seq_size"],
    )


def recipe_of(app: dict[str, Any], execution: dict[str, Any]) -> Recipe:
    """Calculon's execution as our recipe."""
    per_rank = execution["pipeline_interleaving"]
    again = {v: k for k, v in RECOMPUTED.items()}[execution["activation_recompute"]]
    return Recipe(
        layout=Layout(
            tensor=execution["tensor_par"],
            shard=execution["data_par"],
            pipeline=execution["pipeline_par"],
            stages_per_rank=per_rank,
            schedule="interleaved-1f1b" if per_rank > 1 else "1f1b",
        ),
        sequence=app["seq_size"],
        global_batch=execution["batch_size"],
        microbatch=execution["microbatch_size"],
        sharding="optimizer" if execution["optimizer_sharding"] else "none",
        recompute=again,  # type: ignore[arg-type]
        sequence_parallel=execution["tensor_par_comm_type"] == "rs_ag",
    )


def app_of(model: Architecture, sequence: int) -> dict[str, Any]:
    return {
        "hidden": model.hidden_size,
        "feedforward": model.intermediate_size,
        "seq_size": sequence,
        "attn_heads": model.num_attention_heads,
        "attn_size": model.head_dim,
        "num_blocks": model.num_hidden_layers,
    }


def execution_of(recipe: Recipe, gpus_per_node: int) -> dict[str, Any]:
    """Our recipe as Calculon's execution: settings as in its validation, groups over NVLink where they fit into a node."""
    r = recipe
    parallel = r.sequence_parallel and r.layout.tensor > 1
    return {
        "num_procs": r.world,
        "tensor_par": r.layout.tensor,
        "pipeline_par": r.layout.pipeline,
        "data_par": r.layout.data_parallel,
        "tensor_par_net": int(r.layout.tensor > gpus_per_node),
        "pipeline_par_net": int(r.world > gpus_per_node),
        "data_par_net": int(r.layout.tensor * r.layout.data_parallel > gpus_per_node),
        "batch_size": r.global_batch,
        "microbatch_size": r.microbatch,
        "datatype": "float16",
        "fused_activation": False,
        "attention_type": "multihead",
        "activation_recompute": RECOMPUTED[r.recompute],
        "pipeline_interleaving": r.layout.stages_per_rank,
        "optimizer_sharding": r.sharding == "optimizer" and r.layout.data_parallel > 1,
        "tensor_par_comm_type": "rs_ag" if parallel else "ar",
        "tensor_par_overlap": "none",
        "seq_par_ag_redo": parallel and r.recompute != "full",
        "data_par_overlap": False,
        "weight_offload": False,
        "activations_offload": False,
        "optimizer_offload": False,
        "training": True,
    }
