"""Tensor-parallel communication behind matrix products, part by part: what of it stays in plain sight.

With `async_tensor` our trainer cuts what goes into a product, or comes out of it, into p equal parts (`parallel/overlap.py`). Links
and processors work side by side, each on one part at a time, in order; a part takes c on the links and k in the product:

    gather, then product     links     c c c c          c + (p-1) max(c, k) + k, of which p k is computation
                             product     k k k k
    product, then scatter    product   k k k k W        k + (p-1) max(c, k) + c; beside it the weights' gradients W,
                             links       c c c c        which need nothing that is under way

What is left over computation is exposed: c + (p-1) max(0, c - k), less W.
"""

from __future__ import annotations

from seatrial.job.parts import parts
from seatrial.plan.model import Model
from seatrial.plan.recipe import Recipe
from seatrial.plan.stacks import Stack

# Stacks that are this trainer; what others hide is their `hide_tensor`.
OURS = ("seatrial", "seatrial-compiled")
SOURCE = (
    "async_tensor: what it hides is derived, part by part, and was never measured on GPUs; assumed: nothing else is lost, and "
    "computation beside it is slowed as beside any other communication. The only published pair of runs, of another implementation, "
    "gained 5.7 % where this says 14 %, and 23 % with the copies that only our plain way makes (Llama 3 70B on 256 H100, 829 and 876 tokens/s/GPU, "
    "pytorch/torchtitan@b5bcd76 benchmarks/llama3_h100_202412_torchtitan.md), so it may gain less than half of what is told"
)


def able(recipe: Recipe, stack: Stack) -> bool:
    """Whether this stack could hide tensor-parallel communication of the recipe in this way, if it was asked to."""
    return stack.name in OURS and recipe.tensor > 1 and recipe.sequence_parallel and cut(recipe) > 1


def overlaps(recipe: Recipe, stack: Stack) -> bool:
    """Whether it does."""
    return recipe.async_tensor and able(recipe, stack)


def cut(recipe: Recipe) -> int:
    """Into how many parts a microbatch's gathers and scatters are cut."""
    return parts(recipe.microbatch, recipe.sequence // recipe.context // recipe.tensor)


def copied(model: Model, recipe: Recipe, stack: Stack) -> float:
    """Bytes that our trainer's layer reads and writes in one pass to put positions in another order for its collectives.

    Plain ones need all ranks' parts of each sequence side by side, and a collective has them rank by rank: a copy at each of the
    four places, unless there is one sequence (`parallel/collectives.py`). Parts stay as they come, and only attention needs
    positions in order: copies of what enters and leaves it, unless parts are single sequences (`parallel/overlap.py`).
    """
    if stack.name not in OURS or recipe.tensor == 1 or not recipe.sequence_parallel:
        return 0.0
    each = 2 * 2.0 * recipe.tokens
    if not overlaps(recipe, stack):
        return 4 * each * model.hidden if recipe.microbatch > 1 else 0.0
    return each * 2 * (model.query_width + model.kv_width) / recipe.tensor if reorders(recipe, stack) else 0.0


def reorders(recipe: Recipe, stack: Stack) -> bool:
    """Whether attention's output is copied into the order of parts: its product keeps that copy beside attention's own."""
    return overlaps(recipe, stack) and recipe.microbatch != cut(recipe)


def gathered(parts: int, send_s: float, compute_s: float) -> float:
    """Exposed seconds of gathers before a product; both times of one part."""
    return send_s + (parts - 1) * max(0.0, send_s - compute_s)


def scattered(parts: int, compute_s: float, send_s: float, then_s: float = 0.0) -> float:
    """Exposed seconds of scatters after a product; times of one part, and of what is computed after all parts beside them."""
    return max(0.0, gathered(parts, send_s, compute_s) - then_s)
