"""Exposed tensor-parallel communication where it is overlapped with matrix products, part by part.

Our trainer splits the input or output of a product into p equal parts (`parallel/overlap.py`): one, or with `async_tensor`
several. Communication and computation run in parallel, one part at a time, in order; a part is sent in c, multiplied in k:

    all-gather, matmul       links     c c c c          c + (p-1) max(c, k) + k, of which p k is computation
                             product     k k k k
    matmul, reduce-scatter   product   k k k k W        k + (p-1) max(c, k) + c; in parallel the weight gradients W,
                             links       c c c c        which depend on nothing in flight

The excess over the computation is exposed: c + (p-1) max(0, c - k), less W. In a backward pass the second also has
p all-gathers, for the weight gradients, before its reduce-scatters: it takes at least 2 p c. Plain tensor parallel is p = 1.
"""

from __future__ import annotations

from seatrial.job.architecture import Architecture
from seatrial.job.parts import parts
from seatrial.plan.cost.stacks import Stack
from seatrial.plan.model.recipe import Recipe

# The stacks of this trainer; others overlap the share `hide_tensor`.
OURS = ("seatrial", "seatrial-compiled")
SOURCE = (
    "async_tensor: its overlap is modelled part by part and was never measured on GPUs; assumed: no other losses, and computation "
    "slowed as by any other overlapped communication. The only published pair of runs, with another implementation, "
    "gained 5.7 % where 11 % is predicted, 18 % with the copies that only our plain tensor parallel makes (Llama 3 70B on 256 H100, 829 and 876 tokens/s/GPU, "
    "pytorch/torchtitan@b5bcd76 benchmarks/llama3_h100_202412_torchtitan.md), so the gain may be half of the predicted one, or less"
)


def can_overlap(recipe: Recipe, stack: Stack) -> bool:
    """Whether this stack could overlap the recipe's tensor-parallel communication, if it were enabled."""
    return (
        stack.name in OURS
        and recipe.layout.tensor > 1
        and recipe.sequence_parallel
        and part_count(recipe) > 1
    )


def overlaps(recipe: Recipe, stack: Stack) -> bool:
    """Whether it does: possible and enabled."""
    return recipe.async_tensor and can_overlap(recipe, stack)


def part_count(recipe: Recipe) -> int:
    """Number of parts that a microbatch's all-gathers and reduce-scatters are split into."""
    return parts(recipe.microbatch, recipe.sequence // recipe.context // recipe.layout.tensor)


def reorder_bytes(model: Architecture, recipe: Recipe, stack: Stack) -> float:
    """Bytes that a layer of our trainer reads and writes in one pass to reorder positions for its collectives.

    Collectives have positions rank by rank, but each sequence must be contiguous: a copy at each of the four, unless
    there is one sequence (`parallel/overlap.py`). Overlapped parts stay in that order except for attention: copies of its
    input and output, unless parts are single sequences.
    """
    if stack.name not in OURS or recipe.layout.tensor == 1 or not recipe.sequence_parallel:
        return 0.0
    each = 2 * 2.0 * recipe.tokens
    if not overlaps(recipe, stack):
        return 4 * each * model.hidden_size if recipe.microbatch > 1 else 0.0
    if not reorders(recipe, stack):
        return 0.0
    return each * 2 * (model.query_width + model.kv_width) / recipe.layout.tensor


def reorders(recipe: Recipe, stack: Stack) -> bool:
    """Whether attention's output is copied into the order of parts: then it is kept in both orders."""
    return overlaps(recipe, stack) and recipe.microbatch != part_count(recipe)


def exposed_gather(parts: int, send_s: float, compute_s: float) -> float:
    """Exposed seconds of all-gathers before a product; both times are of one part."""
    return send_s + (parts - 1) * max(0.0, send_s - compute_s)


def exposed_scatter(
    parts: int, compute_s: float, send_s: float, then_s: float = 0.0, *, regathered: bool = False
) -> float:
    """Exposed seconds of reduce-scatters after a product; times of one part, `then_s` of compute that follows all parts.

    `regathered`: all parts are all-gathered before, in parallel with the products.
    """
    exposed = exposed_gather(parts, send_s, compute_s)
    if regathered:
        exposed = max(exposed, parts * (2 * send_s - compute_s))
    return max(0.0, exposed - then_s)
