"""What `seatrial train` is to its agents: a process that calls the launcher and prints the outcome as JSON."""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

from seatrial.base.errors import InputError
from seatrial.job import job_from_text
from seatrial.launch import LocalLauncher, local
from seatrial.record.folder import RunFolder
from seatrial.record.inputs import freeze
from seatrial.record.secret import make_secret

JOB = """
name = "driven"

[model]
vocab_size = 264
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 4

[data]
train = "builtin:python-library"

[train]
steps = 100
sequence_length = 32
global_batch = 64

[optimizer]
lr = 1e-2

[checkpoint]
every_steps = 50
"""


def main() -> int:
    # Under nohup or as a background job they would come in ignored.
    for signum in (signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_DFL)
    request: dict[str, Any] = json.loads(sys.argv[1])
    folder = RunFolder(Path(request["run"]))
    job = job_from_text(JOB, name="job.toml", base_folder=folder.path, overrides=request["overrides"])
    if job.cluster.device == "cuda":  # ranks as processes of their own, without the hardware
        local.choose_device = lambda _: ("cuda", "pretended")
        local.visible_devices = lambda: [str(i) for i in range(64)]
    folder.control.mkdir(parents=True)
    folder.job_toml.write_text(job.to_toml())
    folder.plan_json.write_text("{}")
    freeze(folder)
    folder.generation_file.write_text(f"{request['generation']}\n")
    make_secret(folder)

    def tick() -> None:
        if (folder.path / "break").exists():
            raise RuntimeError("the console has failed")

    start = time.monotonic()
    try:
        returns = {int(n): s for n, s in request["returns"].items()}
        launcher = LocalLauncher(returns=returns, worker_module=request["worker_module"])
        outcome = launcher.launch(job, folder, request["generation"], tick=tick)
    except InputError as e:
        print(json.dumps({"error": e.render()}))
        return e.exit_code
    answer = {
        "outcome": dataclasses.asdict(outcome),
        "end": time.time(),
        "wall_s": time.monotonic() - start,
    }
    print(json.dumps(answer, default=str))
    return outcome.exit_code


if __name__ == "__main__":
    sys.exit(main())
