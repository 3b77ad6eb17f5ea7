"""What Muon adds to a step, in closed form: seconds, bytes, FLOPs of orthogonalising matrices (`train/muon.py`)."""

from __future__ import annotations

import math

from seatrial.job.architecture import Architecture
from seatrial.plan.cost.collectives import Fabric
from seatrial.plan.cost.kernels import Kernels
from seatrial.plan.model.cluster import group
from seatrial.plan.model.recipe import Recipe, layer_kinds

_STEPS = 5  # of the Newton-Schulz iteration


def stage_ranks(recipe: Recipe) -> int:
    """The ranks among which a stage's matrices are divided."""
    return recipe.world // recipe.layout.pipeline


def matrix_parameters(model: Architecture, recipe: Recipe, rank: int) -> float:
    """Parameters in matrices of a pipeline rank's layers on one tensor-parallel rank, before data parallel shards them."""
    total = 0.0
    for kind in layer_kinds(model, recipe, rank):
        own = kind.model
        split = own.layer_parameters() - own.layer_vectors - own.router_parameters
        total += kind.layers * (split / recipe.layout.tensor + own.router_parameters)
    return total


def flops(model: Architecture, recipe: Recipe, rank: int) -> float:
    """FLOPs of matrix products of one rank of pipeline rank `rank`, of the ranks' mean."""
    total = 0.0
    for kind in layer_kinds(model, recipe, rank):
        for rows, columns, n in kind.model.hidden_matrices():
            small, large = sorted((rows, columns))
            total += kind.layers * n * (4.0 * small * small * large + 2.0 * small**3)
    return _STEPS * total / stage_ranks(recipe)


def sent_bytes(model: Architecture, recipe: Recipe, rank: int) -> float:
    """Bytes that a rank sends: momentum within its replica, results to all; both in bf16."""
    n = stage_ranks(recipe)
    own = 2.0 * matrix_parameters(model, recipe, rank) / recipe.shard_ranks
    return own * (1 + 1 / recipe.layout.replicate) * (n - 1) / n


def leaving(recipe: Recipe, fabric: Fabric) -> float:
    """Share of these bytes that leave the NVLink domain."""
    n = stage_ranks(recipe)
    at = group(fabric.cluster, stride=1, size=n)
    return (n - at.per_domain) / (n - 1) if at.domains > 1 else 0.0


def temporary_bytes(model: Architecture, recipe: Recipe, rank: int) -> float:
    """Bytes beside weights, gradients and states: the rank's part of all results, and a round's largest matrix.

    Of that five copies in bf16 (sent, received, whole, two of the iteration) and two squares of its smaller side.
    """
    largest = 0.0
    kinds = layer_kinds(model, recipe, rank)
    for rows, columns, n in (matrix for kind in kinds for matrix in kind.model.hidden_matrices()):
        small, large = sorted((rows, columns))
        together = 1 if n == 1 else math.ceil(model.num_experts / stage_ranks(recipe))
        largest = max(largest, together * (10.0 * small * large + 4.0 * small * small))
    return 2.0 * matrix_parameters(model, recipe, rank) / recipe.shard_ranks + largest


def seconds(model: Architecture, recipe: Recipe, fabric: Fabric, rank: int) -> float:
    """Seconds of preparing an update of a dense model: both exchanges of each round, and between them the products.

    Nothing overlaps with them. As in other models of experts, the speed of their products is unknown.
    """
    assert not model.num_experts
    n, kernels = stage_ranks(recipe), Kernels(fabric.cluster.gpu, "bf16")
    layers = sum(recipe.layout.rank_layers(rank, model.num_hidden_layers))
    one_of_each = 0.0
    for rows, columns, _ in model.hidden_matrices():
        small, large = sorted((rows, columns))
        one_of_each += kernels.product(small, small, large) + kernels.product(small, small, small)
        one_of_each += kernels.product(small, large, small)
    each = _STEPS * one_of_each / len(model.hidden_matrices())
    rounds = math.ceil(layers * len(model.hidden_matrices()) / n)
    if n == 1:
        return rounds * each
    sent, share = sent_bytes(model, recipe, rank), leaving(recipe, fabric)
    message = fabric.send(sent * (share or 1.0) / (2 * rounds), across=share > 0)
    return rounds * (each + 2 * message)
