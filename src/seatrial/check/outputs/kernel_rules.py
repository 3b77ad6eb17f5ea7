"""Lines of a kernel log or syslog, beside the GPU driver's codes, that tell of hardware: what each means.

The texts are the kernel's, systemd's and the drivers' own. Which of them matter: leptonai/gpud (components/*/kmsg_matcher.go),
Azure/azurehpc-health-checks (customTests), NVIDIA's lists of driver messages.
"""

from __future__ import annotations

import re

from seatrial.check.findings import Verdict

Rule = tuple[str, Verdict, re.Pattern[str], str]


def _rule(code: str, verdict: Verdict, what: str, pattern: str) -> Rule:
    return code, verdict, re.compile(pattern, re.IGNORECASE), what


# Code, verdict, pattern, what it is. The first that a line matches counts.
OTHERS: tuple[Rule, ...] = (
    _rule(
        "SYS002",
        "WARN",
        "ended processes for lack of memory",
        r"\bOut of memory: Kill|\boom-kill:|\binvoked oom-killer:|\bMemory cgroup out of memory",
    ),
    _rule(
        "SYS003",
        "FAIL",
        "uncorrected hardware error",
        r"\bAER: .{0,40}Uncorrect(?:ed|able)|severity=Uncorrect(?:ed|able)|\[Hardware Error\]:.{0,60}\b(?:fatal|uncorrected)"
        r"|\bEDAC \S{1,20}: \d{1,9} UE\b|\bMemory failure: 0x",
    ),
    _rule(
        "SYS003",
        "WARN",
        "hardware error",
        r"\[Hardware Error\]|\bMachine check events logged|\bAER: .{0,40}Correct(?:ed|able) error|severity=Corrected"
        r"|\bEDAC \S{1,20}: \d{1,9} CE\b|\bAER: aer_status: ",
    ),
    _rule(
        "SYS003",
        "WARN",
        "a PCIe card has left its slot",
        r"\bpciehp: Slot\(\S{1,20}\): (?:Link Down|Card not present)",
    ),
    _rule(
        "SYS003",
        "WARN",
        "the processor is too hot",
        r"\btemperature above threshold, cpu clock throttled",
    ),
    _rule(
        "SYS004",
        "FAIL",
        "GPU cannot be started",
        r"\bNVRM: .{0,120}(?:RmInitAdapter failed|rm_init_adapter failed|failed to copy vbios|probe routine failed)"
        r"|\bNVRM: None of the NVIDIA (?:\w{1,20} )?devices were (?:probed|initialized)",
    ),
    _rule(
        "SYS004",
        "FAIL",
        "the GPU driver's parts are of different versions",
        r"\bNVRM: API mismatch",
    ),
    _rule(
        "SYS004",
        "FAIL",
        "the GPU's own processor does not answer",
        r"\bNVRM: .{0,80}(?:GSP Timeout|_kgspIsHeartbeatTimedOut|Heartbeat timed out|Rate limiting GSP RPC error prints)",
    ),
    _rule(
        "GPU007",
        "WARN",
        "a GPU is too hot",
        r"\bNVRM: GPU at .{0,60}has overheated",
    ),
    _rule(
        "NVL001",
        "WARN",
        "NVLinks of a GPU cannot be found",
        r"\bNVRM: knvlink\w{0,80}: (?:Failed to update Rx Detect Link mask|Getting peer\d{1,3}\S{0,4} postRxDetLinkMask failed)",
    ),
    _rule(
        "NVL007",
        "WARN",
        "the fabric manager has failed",
        r"\bnv-fabricmanager\[\d+\]: .{0,200}\b(?:failed|error)\b|\bnvidia-fabricmanager\.service: (?:Failed|Main process exited, code=exited, status=[1-9]|Control process exited, code=exited, status=[1-9])",
    ),
    _rule(
        "SYS005",
        "WARN",
        "the kernel itself has failed",
        r"\bKernel panic - not syncing|\bBUG: unable to handle|\bOops: [0-9a-f]{4} \[",
    ),
    _rule(
        "SYS006",
        "WARN",
        "a process or a processor hung",
        r"\bsoft lockup - CPU#\d+ stuck|\bhard LOCKUP on cpu|\bblocked for more than \d{2,6} seconds|\bdetected stalls? on CPUs|\bself-detected stall on CPU",
    ),
    _rule(
        "SYS007",
        "FAIL",
        "a disk or its file system has failed",
        r"\bRemounting filesystem read-only|\bnvme\d+: Disabling device after reset failure|\bnvme\w+: no available path - failing I/O"
        r"|\bmd/raid\S{0,20}: Disk failure on",
    ),
    _rule(
        "SYS007",
        "WARN",
        "errors of a disk",
        r"\bI/O error, dev (?!fd\d|sr\d|loop)|\bBuffer I/O error on dev (?!fd\d|sr\d|loop)|\bnvme nvme\d+: I/O .{0,40}timeout|\bI/O error while writing superblock"
        r"|\battempt to access beyond end of device|\b(?:EXT4-fs|XFS|BTRFS) ?(?:error| \(\S{1,40}\): (?:Corruption|metadata I/O error))",
    ),
    _rule(
        "SYS007",
        "WARN",
        "a file server does not answer",
        r"\bnfs: server \S{1,120} not responding",
    ),
    _rule(
        "NET013",
        "FAIL",
        "the adapter's firmware has failed",
        r"\bmlx5_core .{0,80}(?:device's health compromised|Health issue observed, firmware internal error|health recovery flow aborted|Fatal error \d+ detected)",
    ),
    _rule(
        "NET013",
        "WARN",
        "the adapter does not answer its driver",
        r"\bmlx5_core .{0,160}(?:No done completion|timeout\. Will cause a leak of a command resource)",
    ),
    _rule(
        "NET013",
        "WARN",
        "trouble with a cable or a transceiver",
        r"\bmlx5_core .{0,40}Port module event(?:\[error\]|: module \d+, Cable error)",
    ),
    _rule(
        "NET013",
        "WARN",
        "the slot has too little power for the adapter",
        r"\bDetected insufficient power on the PCIe slot",
    ),
    _rule(
        "NCC005",
        "WARN",
        "a program died inside NCCL",
        r"\bsegfault at .{0,120} in libnccl\.so",
    ),
    _rule(
        "NCC005",
        "WARN",
        "GPUDirect RDMA lost its memory while it was in use",
        r"\bnvidia-peermem \S{1,60} ERROR detected invalid context",
    ),
    _rule("SYS002", "WARN", "no more files can be opened", r"\bVFS: file-max limit \d+ reached"),
)  # fmt: skip

# One of these is in every line that a rule can match, in small letters: most lines have none, and a log can have millions.
_WORDS = (
    *("oom", "out of memory", "memory failure", "file-max", "aer: ", "severity=", "hardware error", "machine check"),
    *("edac ", "pciehp", "throttled", "nvrm: ", "fabricmanager", "kernel panic", "bug: ", "oops: ", "lockup", "stall"),
    *("blocked for more", "read-only", "nvme", "md/raid", "i/o error", "beyond end", "ext4-fs", "xfs", "btrfs"),
    *("not responding", "mlx5_core", "insufficient power", "libnccl", "nvidia-peermem"),
)  # fmt: skip


def rule_of(line: str) -> Rule | None:
    """The first rule that the line matches."""
    small = line.lower()
    if not any(word in small for word in _WORDS):
        return None
    return next((rule for rule in OTHERS if rule[2].search(line)), None)
