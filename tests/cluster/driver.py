"""What `seatrial train` is to its agents: a process that calls the launcher and prints the outcome as JSON."""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from seatrial.base.errors import InputError
from seatrial.launch import LocalLauncher, local
from seatrial.record.folder import RunFolder


def main() -> int:
    for signum in (
        signal.SIGINT,
        signal.SIGHUP,
    ):  # under nohup or as a background job they would come in ignored
        signal.signal(signum, signal.SIG_DFL)
    request: dict[str, Any] = json.loads(sys.argv[1])
    cluster = SimpleNamespace(launcher="local", **request["cluster"])
    if cluster.device == "cuda":  # ranks as processes of their own, without the hardware
        local.choose_device = lambda _: ("cuda", "pretended")
        local.visible_devices = lambda: [str(i) for i in range(64)]
    reports: list[dict[str, Any]] = []

    def tick() -> None:
        if request["broken_tick"] and any(r["kind"] == "rank_exited" for r in reports):
            raise RuntimeError("the console has failed")

    start = time.monotonic()
    try:
        outcome = LocalLauncher().launch(
            SimpleNamespace(cluster=cluster),  # type: ignore[arg-type]
            RunFolder(Path(request["run"])),
            request["generation"],
            on_report=lambda r: reports.append(r.to_message()),
            tick=tick,
            worker_module=request["worker_module"],
        )
    except InputError as e:
        print(json.dumps({"error": e.render()}))
        return e.exit_code
    answer = {"outcome": dataclasses.asdict(outcome), "reports": reports, "end": time.time()}
    print(json.dumps(answer | {"wall_s": time.monotonic() - start}, default=str))
    return outcome.exit_code


if __name__ == "__main__":
    sys.exit(main())
