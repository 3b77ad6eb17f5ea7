"""The environment of a rank: what is chosen, why, and what the user's own values change."""

from __future__ import annotations

import dataclasses
import json

from seatrial.control.node.environment import Facts, NodeEnvironment, Variable, assignments, node_variables
from seatrial.hardware.topology import Gpu, Ports

CUDA = Facts(
    device="cuda",
    ranks=8,
    cores=100,
    address="10.1.0.7",
    interface="eth1",
    route_reason="the route to n2",
    collective_timeout_s=2100,
    dumps="/runs/x/logs/000001/node0/flight-rank",
    ports=Ports(("mlx5_0:1", "mlx5_1:1"), "near the GPUs"),
)
CPU = dataclasses.replace(CUDA, device="cpu")


def by_name(facts: Facts, yours: dict[str, str] | None = None) -> dict[str, Variable]:
    return {v.name: v for v in node_variables(facts, yours or {})}


def test_each_variable_has_a_reason() -> None:
    for facts in (CPU, CUDA):
        variables = node_variables(facts, {})
        assert len({v.name for v in variables}) == len(variables)
        assert all(v.reason and v.source == "chosen" for v in variables)


def test_ranks_on_gpus() -> None:
    assert assignments(node_variables(CUDA, {})) == {
        "SEATRIAL_DEVICE": "cuda",
        "PYTHONUNBUFFERED": "1",
        "TORCH_FR_BUFFER_SIZE": "2000",
        "GLOO_SOCKET_IFNAME": "eth1",
        "NCCL_SOCKET_IFNAME": "=eth1",
        "NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1",
        "OMP_NUM_THREADS": "12",
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "2100",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": "/runs/x/logs/000001/node0/flight-rank",
        "TORCH_NCCL_ENABLE_TIMING": "1",
        "TORCH_NCCL_HIGH_PRIORITY": "1",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    }
    assert "the route to n2" in by_name(CUDA)["NCCL_SOCKET_IFNAME"].reason


def test_deterministic_ranks_on_gpus() -> None:
    def more(facts: Facts) -> dict[str, str]:
        plain = assignments(node_variables(facts, {}))
        key = assignments(node_variables(dataclasses.replace(facts, deterministic=True), {}))
        return {name: value for name, value in key.items() if name not in plain}

    assert more(CUDA) == {
        "NCCL_ALGO": "Ring",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "TORCHINDUCTOR_DETERMINISTIC": "1",
    }
    assert more(CPU) == {}


def test_ranks_on_cpu_have_one_thread_whatever_the_user_sets() -> None:
    variables = by_name(CPU, {"OMP_NUM_THREADS": "5"})
    assert {name: v.value for name, v in variables.items()} == {
        "SEATRIAL_DEVICE": "cpu",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "TORCH_FR_BUFFER_SIZE": "2000",
        "GLOO_SOCKET_IFNAME": "eth1",
    }
    assert variables["OMP_NUM_THREADS"].reason.endswith("overrides your 5")
    assert "yours" not in variables["MKL_NUM_THREADS"].reason


def test_the_user_s_own_values_are_kept_and_reported() -> None:
    yours = {
        "NCCL_SOCKET_IFNAME": "ib",
        "GLOO_SOCKET_IFNAME": "ib0",
        "NCCL_IB_HCA": "^mlx5_4",
        "OMP_NUM_THREADS": "3",
        "HOME": "/h",
    }
    variables = by_name(CUDA, yours)
    for name in yours.keys() - {"HOME"}:
        assert (variables[name].value, variables[name].source) == (yours[name], "yours")
    assert variables["NCCL_SOCKET_IFNAME"].reason.endswith("Seatrial would set NCCL_SOCKET_IFNAME==eth1")
    assert "HOME" not in variables
    assert variables["PYTORCH_ALLOC_CONF"].source == "chosen"


def test_an_older_name_of_a_variable_is_the_users_decision_too() -> None:
    variables = by_name(CUDA, {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"})
    assert "PYTORCH_ALLOC_CONF" not in variables
    assert variables["PYTORCH_CUDA_ALLOC_CONF"].source == "yours"


def test_nccl_is_configured_for_ipv6() -> None:
    assert "NCCL_SOCKET_FAMILY" not in by_name(CUDA)
    six = dataclasses.replace(CUDA, address="fd00::7")
    assert by_name(six)["NCCL_SOCKET_FAMILY"].value == "AF_INET6"


def test_nothing_is_set_of_what_is_not_known() -> None:
    unknown = dataclasses.replace(CUDA, interface=None, ports=Ports((), "left to NCCL"), cores=4)
    variables = by_name(unknown)
    assert not variables.keys() & {"NCCL_IB_HCA", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"}
    assert variables["OMP_NUM_THREADS"].value == "1"


def test_what_is_written_down() -> None:
    gpu = Gpu("0", "0000:18:00.0", 1, frozenset({4, 5, 6, 9}), "near")
    made = NodeEnvironment([Variable("A", "1", "because")], [gpu], ["a fact"])
    assert json.loads(json.dumps(made.as_dict())) == {
        "variables": [{"name": "A", "value": "1", "reason": "because", "source": "chosen"}],
        "binding": [
            {
                "device": "0",
                "pci": "0000:18:00.0",
                "numa": 1,
                "cpus": "4-6,9",
                "reason": "near",
                "local_rank": 0,
            }
        ],
        "facts": ["a fact"],
    }
