"""One node's measurements of itself, in order and within its time: JSON facts for judge_node.py and columns.py.

Nothing here judges, and nothing here blocks without limit: whatever may hang runs in a process of its own
(run_tool.py). First what is read from an idle node, then the load, then what the load has changed.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from seatrial.base.files import parse_json
from seatrial.base.kernel_files import KMSG
from seatrial.base.process import python
from seatrial.check.node import node_gpu
from seatrial.check.node.node_clock import read_clock
from seatrial.check.node.node_inventory import read_inventory
from seatrial.check.node.node_kernel import read_kernel_log
from seatrial.check.node.node_limits import read_limits
from seatrial.check.node.node_ports import fabric_of, mlxlink_orders, read_interface, read_ports
from seatrial.check.node.node_storage import read_storage
from seatrial.check.node.probe_ports import ROOT
from seatrial.check.node.run_tool import Order, Result, run_tool, run_tools
from seatrial.hardware.devices import visible_devices

_STORAGE_S = 2.0
_CPU_S = 30.0  # most of it waiting for the machine's lock if several nodes share one machine
_LOADING_S = 10.0  # torch and CUDA, before the rates' own time begins
_AFTER_S = 3.0  # reserved of the node's time for what is read after the load
# Of the facts of measure(); other versions are from another seatrial and not read.
FACTS_VERSION = 2
# Minimum for a part, however little time is left: with less, nothing could be measured there at all.
_LEAST_S = 10.0

T = TypeVar("T")


@dataclass(frozen=True)
class NodeOptions:
    """What a node is asked. All fields are JSON: `seatrial.check.live.agent` gets `asdict(options)` and uses `**`.

    `gpus` is the plan's number, None if unknown, and `port_gbit_s` the required rate of the fabric's ports: both are
    only for the judges, and kept in the facts for them. `storage` is the checkpoint folder, None to measure none.
    `seconds` is the limit of the whole stage. `rates` False omits what puts load on CPU, GPU or storage.
    """

    gpus: int | None = None
    storage: str | None = None
    seconds: float = 60.0
    rates: bool = True
    port_gbit_s: float | None = None
    interface: str | None = None  # the network device for ranks if there is no RDMA
    device: Literal["auto", "cpu", "cuda"] = "auto"


@dataclass(frozen=True)
class Places:
    """Paths to read from; replaced in tests."""

    root: str = "/"
    infiniband: str = ROOT
    kernel_log: str = str(KMSG)


def measure(
    options: NodeOptions, progress: Callable[[str], None] = lambda text: None, places: Places | None = None
) -> dict[str, Any]:
    """Collect everything that this node knows of itself. Never raises for what hardware, tools or permissions do.

    `progress` is called with the name of each part before it starts. Leaves no process and no file.

    Keys: "version", "options", "seconds", "parts" (part -> seconds); "inventory", "limits", "clock", "interface",
    "storage", "kernel", "gpus" and, after the load, "gpus_after" as their readers return them (node_*.py,
    probe_nvml.py; None if not asked); "ports" with "before" and "after" the load (name -> hardware.counters.Port),
    "link_errors" likewise (texts of `nvidia-smi nvlink -e`), "load_s" between them; "rates" (collect_rates(), with
    "device", "ended", "problem", "seconds"); "outputs" of tools for judge_pieces(), each a "text" or, of NVML, "states"; "calls": how each tool call ended.
    """
    return _Stage(options, progress, places or Places()).run()


class _Stage:
    def __init__(self, options: NodeOptions, progress: Callable[[str], None], places: Places) -> None:
        self.options, self.progress, self.places = options, progress, places
        self.started_at = time.monotonic()
        self.parts: dict[str, float] = {}
        self.calls: list[Result] = []
        self.outputs: list[dict[str, Any]] = []

    def left(self) -> float:
        return self.options.seconds - (time.monotonic() - self.started_at)

    def part(self, name: str, work: Callable[[], T]) -> T:
        self.progress(name)
        started_at = time.monotonic()
        try:
            return work()
        finally:
            self.parts[name] = round(time.monotonic() - started_at, 3)

    def run(self) -> dict[str, Any]:
        options, root = self.options, Path(self.places.root)
        inventory = self.part("inventory", lambda: read_inventory(root))
        facts: dict[str, Any] = {
            "version": FACTS_VERSION,
            "options": asdict(options),
            "inventory": inventory,
            "limits": self.part("limits", lambda: read_limits(root)),
            "clock": self.part("clock", read_clock),
            "interface": read_interface(options.interface),
        }
        ports = self.part("ports", lambda: self._ports(keep=True))
        read_at = time.monotonic()
        gpus = None
        links: list[str | None] = [None, None]
        if options.device != "cpu" and (self._driver(inventory) or inventory["pci_gpus"]):
            gpus, links[0] = self.part("GPUs", self._gpus)
        facts["gpus"] = gpus
        facts["storage"] = None
        if options.storage is not None:
            folder = options.storage
            budget = max(0.5, min(_STORAGE_S, self.left() / 4))
            facts["storage"] = self.part("storage", lambda: read_storage(folder, budget, rates=options.rates))
        facts["rates"] = None
        if options.rates:
            device = "cuda" if gpus is not None and visible_devices() else "cpu"
            device = options.device if options.device != "auto" else device
            # More threads than the CPU quota would be throttled within what is timed.
            quota = facts["limits"]["cpu_quota"]
            threads = min(facts["limits"]["cpus"], math.ceil(quota) if quota is not None else 1 << 20)
            facts["rates"] = self.part("rates", lambda: self._rates(device, threads))
        facts["gpus_after"] = None
        # A driver that has hung once is not asked again.
        if gpus is not None and gpus["ended"] not in ("hung", "stuck"):
            facts["gpus_after"], links[1] = self.part("GPUs after the load", self._after)
        facts["link_errors"] = links
        facts["ports"] = {"before": ports, "after": self._ports(keep=False) if ports else {}}
        facts["load_s"] = round(time.monotonic() - read_at, 3)
        # Last, because the load may have caused driver messages.
        facts["kernel"] = self.part("kernel log", lambda: read_kernel_log(Path(self.places.kernel_log)))
        facts["outputs"], facts["calls"] = self.outputs, [c.facts() for c in self.calls]
        facts["parts"], facts["seconds"] = self.parts, round(time.monotonic() - self.started_at, 3)
        return facts

    def _driver(self, inventory: dict[str, Any]) -> bool:
        """Whether there may be NVIDIA GPUs; otherwise NVML and nvidia-smi need not be tried."""
        return bool(
            inventory["nvidia_driver"] or inventory["gpu_files"] or shutil.which("nvidia-smi") is not None
        )

    def _keep(self, result: Result) -> str | None:
        """Record the call, and its output for the readers; returns the output, None if it is not an answer."""
        self.calls.append(result)
        if not result.ok or not result.out.strip():
            return None
        self.outputs.append({"tool": result.name, "text": result.out})
        return result.out

    def _ports(self, *, keep: bool) -> dict[str, Any]:
        """The fabric's ports with their counters by name; the first reading is kept as an output, mlxlink follows."""
        found = read_ports(self.places.infiniband)
        if found is None:
            return {}
        text = found.out if found.ok else ""
        if keep or not found.ok:
            text = self._keep(found) or ""
        if keep and text:
            for link in run_tools(mlxlink_orders(text)):
                self._keep(link)
        return {name: asdict(port) for name, port in fabric_of(text).items()}

    def _gpus(self) -> tuple[dict[str, Any], str | None]:
        # A quarter, so that a hanging driver leaves time to report it.
        facts, texts = node_gpu.read_gpus(min(node_gpu.SLOWEST_S, self.options.seconds / 4))
        states = node_gpu.states_of(facts)
        if states is not None:
            self.outputs.append({"tool": "NVML", "states": states})
        errors = None
        for result in texts:
            if result.name == node_gpu.LINK_ERRORS:
                # The reading after the load is judged; this one is its baseline.
                self.calls.append(result)
                errors = result.out if result.ok else None
            else:
                self._keep(result)
        for gpu in facts.get("gpus", ()):
            gpu.pop("state", None)  # it is in the outputs
        return facts, errors

    def _after(self) -> tuple[dict[str, Any], str | None]:
        facts, links = node_gpu.read_after(max(_AFTER_S, self.left()))
        for gpu in facts.get("gpus", ()):
            gpu.pop("state", None)
        return facts, self._keep(links)

    def _rates(self, device: str, threads: int) -> dict[str, Any]:
        limit = max(_LEAST_S, self.left() - _AFTER_S)
        seconds = limit - min(_LOADING_S, limit / 3)
        seconds = min(_CPU_S, seconds) if device == "cpu" else seconds
        options = ("--device", device, "--seconds", f"{seconds:.2f}", "--threads", str(threads))
        # The program sets its threads itself; a launcher's setting for ranks would only slow down its start.
        environment = {"OMP_NUM_THREADS": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        order = Order("rates", python("seatrial.check.node.probe_rates", *options), limit, environment)
        done = run_tool(order)
        return {
            "device": device,
            **collect_rates(done.out),
            "ended": done.ended,
            "problem": done.why,
            "seconds": done.seconds,
        }


def collect_rates(text: str) -> dict[str, Any]:
    """Parse probe_rates' output: all that was measured before its end, and what it was doing then."""
    found: dict[str, Any] = {"cpu": None, "gpus": {}, "pairs": [], "skipped": [], "failed": [], "doing": None}
    whole = False
    for line in text.splitlines():
        try:
            message = parse_json(line)
        except ValueError:
            continue  # a line that was cut off by the end, or a library's message
        match message:
            case {"doing": str(doing)}:
                found["doing"] = doing
            case {"cpu": dict(rates)}:
                found["cpu"] = rates
            case {"gpu": {"pci": str(pci), **rates}}:
                found["gpus"].setdefault(pci, {}).update(rates)
            case {"pair": dict(pair)}:
                found["pairs"].append(pair)
            case {"skipped": str(name)}:
                found["skipped"].append(name)
            case {"failed": str(name), "problem": str(problem), "hardware": bool(hardware)}:
                found["failed"].append({"part": name, "problem": problem, "hardware": hardware})
            case {"done": True}:
                whole = True
    return found | {"whole": whole}
