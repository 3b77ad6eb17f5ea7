"""The policy: complete, with sources, and what it says of the signals that matter most."""

from __future__ import annotations

from importlib.resources import files

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seatrial.base.errors import InternalError
from seatrial.control.machine.policy import (
    drain_command,
    load,
    policy,
    reset_command,
    rule_for,
    signal_of_exception,
    signal_of_xid,
)
from seatrial.hardware.xid import catalogue, parse

TEXT = files("seatrial.control.machine").joinpath("policy.toml").read_text(encoding="utf-8")


def test_every_rule_has_a_source_and_a_class() -> None:
    for name, rule in policy().rules.items():
        assert rule.signal == name
        assert rule.source
        assert rule.cls


def test_every_code_of_the_catalogue_has_a_rule_of_its_own() -> None:
    for code in catalogue():
        assert rule_for(f"xid:{code}").cls != "unknown"
        assert f"xid:{code}" in policy().rules


@pytest.mark.parametrize(
    ("signal", "action", "repeat"),
    [
        ("worker_exit", "restart", "evict"),
        ("worker_killed", "restart", "evict"),
        ("oom", "restart", None),
        ("worker_crash", "restart", "evict"),
        ("app_error", "stop", None),
        ("bad_input", "stop", None),
        ("storage_error", "restart", None),
        ("peer_lost", "restart", None),
        ("hang", "restart", "evict"),
        ("straggler", "tolerate", "evict"),
        ("corruption", "restart", "evict"),
        ("congestion", "record", None),
        ("link_down", "tolerate", "evict"),
        ("cuda_error:out_of_memory", "stop", None),
        ("xid:79", "evict", None),
        ("xid:74", "reset", "evict"),
        ("xid:13", "restart", "evict"),
        ("xid:31", "restart", "evict"),
        ("xid:43", "restart", "evict"),
        ("xid:45", "record", None),
        ("xid:48", "reset", "evict"),
        ("xid:48:contained", "restart", "evict"),
        ("xid:63", "record", None),
        ("xid:92", "record", None),
        ("xid:94", "restart", "evict"),
        *((f"xid:{code}", "reset", "evict") for code in (64, 95, 109, 119, 120, 140, 143)),
        *((f"xid:{code}", "reset", "evict") for code in range(144, 151)),
        *((f"xid:{code}:fatal", "reset", "evict") for code in range(144, 151)),
        *((f"xid:{code}:nonfatal", "record", None) for code in range(144, 151)),
        ("xid:154:reset", "reset", "evict"),
        ("xid:154:reboot", "evict", None),
        ("xid:106", "ignore", None),
        ("sxid:fatal", "evict", None),
        ("sxid:nonfatal", "record", None),
    ],
)
def test_rules(signal: str, action: str, repeat: str | None) -> None:
    rule = rule_for(signal)
    assert (rule.signal, rule.action, rule.repeat) == (signal, action, repeat)


def test_congestion_has_a_hint_for_the_switch() -> None:
    hint = rule_for("congestion").hint or ""
    for word in ("PFC", "ECN", "CNP", "adaptive routing", "switch", "pause", "PortXmitWait"):
        assert word in hint


def test_another_opinion_is_kept_as_a_note() -> None:
    assert "gpud" in (rule_for("xid:63").note or "")
    assert "IGNORE" in (rule_for("xid:43").note or "")
    assert "gpud" in (rule_for("xid:121").note or "")


def test_what_is_unknown_is_recorded_as_unknown() -> None:
    assert (rule_for("xid:9999").action, rule_for("xid:9999").source) == (
        "record",
        rule_for("xid:unknown").source,
    )
    assert rule_for("a word of the future").cls == "unknown"
    assert rule_for("cuda_error:a new one").action == rule_for("cuda_error").action
    assert rule_for("xid:79:detail").action == "evict"


@given(st.text(max_size=30))
def test_any_signal_has_a_rule(word: str) -> None:
    assert rule_for(word).signal == word
    assert rule_for(f"xid:{word}").action
    assert signal_of_exception(word, word) in policy().rules


@pytest.mark.parametrize(
    ("kind", "message", "signal"),
    [
        ("ValueError", "tensors do not match", "app_error"),
        ("AssertionError", "", "app_error"),
        ("RunFailed", "the loss is not finite", "app_error"),
        ("InputError", "train.steps must be positive", "bad_input"),
        ("InputError", "shard-3.bin cannot be read: Input/output error", "storage_error"),
        ("OSError", "[Errno 28] No space left on device: '/run/checkpoints'", "storage_error"),
        ("SaveFailed", "rank 3 could not save: No space left on device", "storage_error"),
        ("OSError", "[Errno 116] Stale file handle", "storage_error"),
        ("FileNotFoundError", "[Errno 2] No such file or directory: 'x'", "app_error"),
        ("MemoryError", "", "oom"),
        ("RuntimeError", "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes", "oom"),
        (
            "OutOfMemoryError",
            "CUDA out of memory. Tried to allocate 20.00 MiB",
            "cuda_error:out_of_memory",
        ),
        ("AcceleratorError", "CUDA error: out of memory", "cuda_error:out_of_memory"),
        (
            "RuntimeError",
            "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate",
            "cuda_error:out_of_memory",
        ),
        ("AcceleratorError", "CUDA error: uncorrectable ECC error encountered", "cuda_error:ecc"),
        (
            "RuntimeError",
            "CUDA error: uncorrectable NVLink error detected during the execution",
            "cuda_error:nvlink",
        ),
        (
            "AcceleratorError",
            "CUDA error: Invalid access of peer GPU memory over nvlink or a hardware error",
            "cuda_error:contained",
        ),
        ("RuntimeError", "CUDA error: unspecified launch failure", "cuda_error:launch"),
        ("AcceleratorError", "CUDA error: an illegal memory access was encountered", "cuda_error:launch"),
        ("AcceleratorError", "CUDA error: device-side assert triggered", "cuda_error:assert"),
        ("RuntimeError", "No CUDA GPUs are available", "cuda_error:device"),
        ("AcceleratorError", "CUDA error: unknown error", "cuda_error"),
        (
            "DistBackendError",
            "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9) ran for 600000 ms",
            "collective_timeout",
        ),
        (
            "RuntimeError",
            "Timed out waiting 1800000ms for recv operation to complete",
            "collective_timeout",
        ),
        (
            "RuntimeError",
            "[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:99",
            "peer_lost",
        ),
        (
            "DistBackendError",
            "NCCL error in: ProcessGroupNCCL.cpp:1, remote process exited or there was a network error",
            "peer_lost",
        ),
        ("PeerSaveFailed", "rank 1 could not save: No space left on device", "peer_lost"),
        ("ConnectionResetError", "[Errno 104] Connection reset by peer", "peer_lost"),
        (
            "DistBackendError",
            "NCCL error: ncclSystemError: System call failed. IBV_WC_RETRY_EXC_ERR",
            "network_error",
        ),
        ("DistBackendError", "NCCL error: ncclInvalidUsage: duplicate GPU detected", "app_error"),
        ("DistBackendError", "ncclUnhandledCudaError: Call to CUDA function failed.", "cuda_error"),
    ],
)
def test_exceptions(kind: str, message: str, signal: str) -> None:
    assert signal_of_exception(kind, message) == signal


@pytest.mark.parametrize(
    ("rest", "other_codes", "signal"),
    [
        ("79, GPU has fallen off the bus.", (), "xid:79"),
        ("48, An uncorrectable double bit error", (), "xid:48"),
        ("48, An uncorrectable double bit error", (63, 94), "xid:48:contained"),
        ("48, An uncorrectable double bit error", (94, 95), "xid:48"),
        ("48, An uncorrectable double bit error", (63,), "xid:48"),
        ("145, RLW_REMAP Nonfatal XC0 i0 Link 02", (), "xid:145:nonfatal"),
        ("149, NETIR_LINK_EVT Fatal XC0 i0 Link 08 (0x004505c6 0x0)", (), "xid:149:fatal"),
        ("149, NETIR_LINK_EVT Fatal XC0 i0 Link 08 (0x028001c6 0x0)", (), "xid:149:benign"),
        ("149, unreadable", (), "xid:149"),
        (
            "154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)",
            (),
            "xid:154:reboot",
        ),
    ],
)
def test_driver_messages(rest: str, other_codes: tuple[int, ...], signal: str) -> None:
    message = parse(f"NVRM: Xid (PCI:0000:3b:00): {rest}")
    assert message is not None
    assert signal_of_xid(message, other_codes) == signal
    assert signal in policy().rules


def test_commands() -> None:
    assert reset_command("0000:3b:00").argv == ("nvidia-smi", "--gpu-reset", "-i", "0000:3b:00.0")
    assert reset_command("3").argv[-1] == "3"
    drain = drain_command("gpu-node-7", "Xid 79\non 0000:3b:00; reboot")
    assert drain.argv == (
        "scontrol",
        "update",
        "nodename=gpu-node-7",
        "state=drain",
        "reason=Xid 79 on 0000:3b:00; reboot",
    )
    assert drain.timeout_s > 0
    assert drain.source


@pytest.mark.parametrize("gpu", ["", "--help", "0,1", "all", "0000:3b:00; reboot", "GPU-x"])
def test_no_other_word_gets_into_a_reset(gpu: str) -> None:
    with pytest.raises(ValueError, match="not the index, UUID or PCI address"):
        reset_command(gpu)


@pytest.mark.parametrize(
    "node", ["", "ALL", "all", "ALL nodes", "node[1-99]", "a,b", "-x", "n state=down", "{gpu}"]
)
def test_no_second_node_gets_into_a_drain(node: str) -> None:
    with pytest.raises(ValueError, match="not the name of one node"):
        drain_command(node, "why")


def test_a_reason_is_text_and_no_template() -> None:
    assert drain_command("n1", "{node} {nothing}").argv[-1] == "reason={node} {nothing}"


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ('[signal.hang]\nclass = "process"', '[signal.hang]\nclas = "process"', "hang: `class` is missing"),
        ('action = "tolerate"', 'action = "hope"', "'hope', not one of"),
        ('repeat = "evict"', 'repeat = "record"', "`repeat` is not stronger than `action`"),
        ("[signal.unknown]", "[signal.unheard]", "no rule for `unknown`"),
        ("[signal.sxid]", "[signal.sxid_]", "`sxid:fatal` has no rule for `sxid`"),
        ('RESET_GPU = { action = "reset", repeat = "evict" }', "", "none for its bucket RESET_GPU"),
        ('signal = "oom", types', 'signal = "eom", types', "no rule for `eom`"),
        ("timeout_s = 30.0", "", "command drain: `timeout_s` is missing"),
        ("\n63 = {", "\n963 = {", "xid 963: not in the catalogue"),
    ],
)
def test_a_faulty_policy_is_not_loaded(old: str, new: str, fault: str) -> None:
    assert old in TEXT
    with pytest.raises(InternalError, match=r"policy\.toml: ") as told:
        load(TEXT.replace(old, new))
    assert fault in told.value.message
