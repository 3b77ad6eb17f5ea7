"""Meaning of kernel log and syslog lines about hardware, other than the GPU driver's codes.

The texts are the kernel's, systemd's and the drivers' own. Selected as in leptonai/gpud (components/*/kmsg_matcher.go),
Azure/azurehpc-health-checks (customTests), NVIDIA's lists of driver messages.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from seatrial.check.judging.findings import Verdict

Rule = tuple[str, Verdict, re.Pattern[str], str]


# Code, verdict, meaning, pattern. The first rule that a line matches counts.
_RULES: tuple[tuple[str, Verdict, str, str], ...] = (
    ("SYS002", "WARN", "killed processes: out of memory",
     r"\bOut of memory: Kill|\boom-kill:|\binvoked oom-killer:|\bMemory cgroup out of memory"),
    ("SYS003", "FAIL", "uncorrected hardware error",
     r"\bAER: .{0,40}Uncorrect(?:ed|able)|severity=Uncorrect(?:ed|able)|\[Hardware Error\]:.{0,60}\b(?:fatal|uncorrected)"
     r"|\bEDAC \S{1,20}: \d{1,9} UE\b|\bMemory failure: 0x|\bDPC: (?:containment event|unmasked uncorrectable error)"
     r"|\bamdgpu: [1-9]\d{0,15} uncorrectable hardware errors|\b[Uu]nable to change power state .{0,60}inaccessible\)"),
    ("SYS003", "WARN", "hardware error",
     r"\[Hardware Error\]|\bMachine check events logged|\bAER: .{0,40}Correct(?:ed|able) error|severity=Corrected"
     r"|\bEDAC \S{1,20}: \d{1,9} CE\b|\bAER: aer_status: "),
    ("SYS003", "WARN", "a PCIe card was removed from its slot",
     r"\bpciehp: Slot\(\S{1,20}\): (?:Link Down|Card not present)"),
    ("SYS003", "WARN", "CPU overheated",
     r"\btemperature above threshold, cpu clock throttled"),
    ("SYS004", "FAIL", "GPU cannot be initialised",
     r"\bNVRM: .{0,120}(?:RmInitAdapter failed|rm_init_adapter failed|failed to copy vbios|probe routine failed)"
     r"|\bNVRM: None of the NVIDIA (?:\w{1,20} )?devices were (?:probed|initialized)"),
    ("SYS004", "FAIL", "version mismatch between GPU driver components",
     r"\bNVRM: API mismatch"),
    ("SYS004", "FAIL", "the GPU's GSP does not respond",
     r"\bNVRM: .{0,80}(?:GSP Timeout|_kgspIsHeartbeatTimedOut|Heartbeat timed out|Rate limiting GSP RPC error prints)"),
    ("GPU007", "WARN", "GPU overheated",
     r"\bNVRM: GPU at .{0,60}has overheated"),
    ("NVL001", "WARN", "NVLinks of a GPU cannot be found",
     r"\bNVRM: knvlink\w{0,80}: (?:Failed to update Rx Detect Link mask|Getting peer\d{1,3}\S{0,4} postRxDetLinkMask failed)"),
    ("NVL007", "WARN", "the fabric manager has failed",
     r"\bnv-fabricmanager\[\d+\]: .{0,200}\b(?:failed|error)\b|\bnvidia-fabricmanager\.service: (?:Failed|Main process exited, code=exited, status=[1-9]|Control process exited, code=exited, status=[1-9])"),
    ("SYS005", "WARN", "kernel panic or oops",
     r"\bKernel panic - not syncing|\bBUG: unable to handle|\bOops: [0-9a-f]{4} \["),
    ("SYS006", "WARN", "a process, a CPU or a GPU hung",
     r"\bsoft lockup - CPU#\d+ stuck|\bhard LOCKUP on cpu|\bblocked for more than \d{2,6} seconds|\bdetected stalls? on CPUs|\bself-detected stall on CPU"
     r"|\bamdgpu: (?:ring \S{1,30} timeout|GPU reset begin)"),
    ("SYS007", "FAIL", "a disk or its file system failed",
     r"\bRemounting filesystem read-only|\bnvme\d+: Disabling device after reset failure|\bnvme\w+: no available path - failing I/O"
     r"|\bmd/raid\S{0,20}: Disk failure on|\bnvme nvme\d+: Removing after probe failure"),
    ("SYS007", "WARN", "disk errors",
     r"\b(?:I/O|medium|target) error, dev |\bnvme nvme\d+: controller is down|\bBuffer I/O error on dev |\bnvme nvme\d+: I/O .{0,40}timeout|\bI/O error while writing superblock"
     r"|\battempt to access beyond end of device|\b(?:EXT4-fs|XFS|BTRFS) ?(?:error| \(\S{1,40}\): (?:Corruption|metadata I/O error))"),
    ("SYS007", "WARN", "a file server does not respond",
     r"\bnfs: server \S{1,120} not responding"),
    ("NET013", "FAIL", "adapter firmware failure",
     r"\bmlx5_core .{0,80}(?:device's health compromised|Health issue observed, firmware internal error|health recovery flow aborted|Fatal error \d+ detected)"),
    ("NET013", "WARN", "the adapter does not respond to its driver",
     r"\bmlx5_core .{0,160}(?:No done completion|timeout\. Will cause a leak of a command resource)|\bNETDEV WATCHDOG: .{0,40}timed out"),
    ("NET013", "WARN", "faulty or overheated cable or transceiver",
     r"\bmlx5_core .{0,60}High temperature on sensors|\bmlx5_core .{0,40}Port module event(?:\[error\]|: module \d+, Cable error)"),
    ("NET013", "WARN", "insufficient slot power for the adapter",
     r"\bDetected insufficient power on the PCIe slot"),
    ("NCC005", "WARN", "a program crashed inside NCCL",
     r"\bsegfault at .{0,120} in libnccl\.so"),
    ("NCC005", "WARN", "GPUDirect RDMA memory was invalidated while in use",
     r"\bnvidia-peermem \S{1,60} ERROR detected invalid context"),
    ("SYS002", "WARN", "the limit on open files was reached",
     r"\bVFS: file-max limit \d+ reached"),
)  # fmt: skip
OTHERS: tuple[Rule, ...] = tuple(
    (code, verdict, re.compile(text, re.IGNORECASE), what) for code, verdict, what, text in _RULES
)

# Subjects of a disk error: a device, a partition, an array member, a file server.
_DISK = re.compile(
    r"\bdev (?P<dev>[\w-]+)|\((?:device )?(?P<system>[a-z][\w-]{0,30})\)|(?:\\x0a|^\s*)(?P<access>[a-z][\w-]{0,30}): rw="
    r"|\bDisk failure on (?P<member>[\w-]+)|\bserver (?P<server>\S+) not|\b(?P<nvme>nvme\d+(?:n\d+(?:p\d+)?)?)\b"
)
_PART = re.compile(
    r"\bEDAC (?P<memory>MC\d+)|\bCPU#?(?P<cpu>\d+)|\b(?P<gpu>GPU\d+)\b|\bSlot\((?P<slot>[^)]{1,20})\)"
)
_PCI = re.compile(r"\b[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}(?:\.[0-9a-f])?\b", re.IGNORECASE)
# Loop devices, RAM disks, floppies and optical drives: not disks of the node.
_NO_DISK = re.compile(r"(?:loop|ram|fd|sr)\d+(?:p\d+)?")
_REMOVABLE = re.compile(r"\[(?P<disk>sd[a-z]+)\] Attached SCSI removable disk")
# The detail line below "attempt to access beyond end of device".
_ACCESS = re.compile(r"(?:^|: |\] )(?P<disk>[a-z][\w-]{0,30}): rw=\d+, ")

# Every line that is_relevant() matches contains one of WORDS, in lower case. A fast prefilter: most lines of a log have none.
_MANY = 1000  # lines from which importing pyarrow (0.3 s) pays off
WORDS = (
    *("oom", "memory", "file-max", "aer: ", "severity=", "error", "machine check", "edac ", "pciehp", "throttled", "nvrm"),
    *("fabricmanager", "panic", "bug: ", "oops: ", "lockup", "stall", "blocked for more", "read-only", "nvme", "md/raid"),
    *("beyond end", ": rw=", "removable", "corruption", "not responding", "mlx", "insufficient power", "libnccl"),
    *("dpc: ", "amdgpu", "inaccessible", "watchdog", "nvidia-peermem", "xid", "pcie bandwidth", "carrier", "link"),
)  # fmt: skip


def have_words(lines: Sequence[str]) -> Sequence[bool]:
    """For each line, whether it contains one of WORDS. Many lines go to pyarrow, which searches all words at once."""
    if len(lines) < _MANY:
        return [any(word in small for word in WORDS) for small in map(str.lower, lines)]
    import pyarrow as pa
    import pyarrow.compute as pc

    pattern = "|".join(map(re.escape, WORDS))
    found: list[bool] = pc.match_substring_regex(pa.array(lines), pattern, ignore_case=True).to_pylist()
    return found


def rule_of(line: str) -> Rule | None:
    """The first rule that matches; None also for errors of something that is not a disk of the node."""
    if not have_words([line])[0]:
        return None
    rule = next((rule for rule in OTHERS if rule[2].search(line)), None)
    return None if rule is not None and is_no_disk(device_of(rule, line)) else rule


def device_of(rule: Rule, text: str) -> str | None:
    """The subject named in the message: "sda1", "MC0", "CPU 24"; None if it names none."""
    found = (_DISK if rule[0] == "SYS007" else _PART).search(text)
    if found is None:
        return None
    name = found[found.lastgroup or 0]
    return {"cpu": f"CPU {name}", "slot": f"slot {name}"}.get(found.lastgroup or "", name)


def pci_of(text: str) -> str | None:
    """The PCI address in the message; the last of several, which is the device that sent the error."""
    found = _PCI.findall(text)
    return found[-1] if found else None


def is_no_disk(device: str | None) -> bool:
    """Whether a device is not one of the node's own disks."""
    return device is not None and _NO_DISK.fullmatch(device) is not None


def removable_disk(line: str) -> str | None:
    """The disk that a line reports as removable."""
    found = _REMOVABLE.search(line)
    return None if found is None else found["disk"]


def accessed_disk(line: str) -> str | None:
    """The device named in a detail line below an error."""
    found = _ACCESS.search(line)
    return None if found is None else found["disk"]
