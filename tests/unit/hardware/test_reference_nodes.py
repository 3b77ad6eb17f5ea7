"""The vendors' own nodes: GPUs and networks that the catalogues have, each with its source."""

from __future__ import annotations

import pytest

from seatrial.hardware.catalogue import find_gpu
from seatrial.hardware.networks import ReferenceNode, find_network, reference_node, reference_nodes


@pytest.mark.parametrize("node", reference_nodes(), ids=lambda n: f"{n.name} with {n.gpu}")
def test_names_are_those_of_the_catalogues(node: ReferenceNode) -> None:
    gpu, network = find_gpu(node.gpu), find_network(node.network)
    assert gpu is not None
    assert gpu.name == node.gpu
    if node.network:
        assert network is not None
        assert (network.name, network.gpus_per_node) == (node.network, node.gpus_per_node)
    assert node.source
    assert reference_node(node.gpu, node.gpus_per_node) == node


def test_a_gpu_has_one_and_other_sizes_have_none() -> None:
    names = [n.gpu for n in reference_nodes()]
    assert len(names) == len(set(names))
    assert reference_node("H100 SXM", 4) is None
    assert reference_node("H100 PCIe", 8) is None
