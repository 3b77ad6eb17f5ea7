"""Damages what Seatrial reads, one file at a time, and sees what its verbs make of it.

What must hold for every mutation: no exit 3, no traceback, no hang; JSON output is JSON; and nothing that was damaged is
said to be verified. `python tests/record_fuzz.py --count 20000 --seed 1` plays many and prints what came of them; a
failure names its number, and `--only NUMBER` plays that one again. `tests/cli/test_record_fuzz.py` plays a few.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from saving import new_manifest, save_whole
from seatrial.base.errors import SeatrialError
from seatrial.checkpoint.manifest import MANIFEST, Progress
from seatrial.cli.main import main as seatrial
from seatrial.control.coordinator.handover import recall
from seatrial.control.net.lease import Lease, Leases, last_term
from seatrial.control.node.spec import AgentSpec
from seatrial.data.manifest import read_manifest
from seatrial.data.prepare import prepare
from seatrial.job import Job, job_from_text, preset_text
from seatrial.job.huggingface import config_from_architecture
from seatrial.job.shapes import shapes
from seatrial.model.hf import INDEX, HuggingFaceWeights
from seatrial.record import events
from seatrial.record.failure import RankError
from seatrial.record.folder import RunFolder
from seatrial.record.ledger import LedgerRecord, LedgerWriter, each_ledger_line
from seatrial.record.metrics import MetricsRecord, MetricsWriter
from seatrial.record.run import open_run
from seatrial.record.secret import read_secret

BATCH, LENGTH, STEPS = 32, 256, 8
HANG_S = 120
_MACHINE = {
    "phase": "running", "generation": 2, "highest": 2, "shape": 0, "slots": [[0, 0], [1, 1]], "started": True,
    "finished": [], "reason": "first start", "saved": False, "progressed": True, "leaving": None, "preempting": False,
    "outgoing": [], "ending": None, "counts": {"restarts": 1, "best": 8, "seen": [], "same": [["hang", "rank 1", 4, 1]]},
    "roster": {"nodes": [[0, None, "", 0, -1], [1, None, "", 1, 1]], "running": [[0, 2], [1, 2]]},
}  # fmt: skip
STATE = {
    "launch": 2,
    "world": {"generation": 2, "index": 0, "slots": {"0": 0, "1": 1}},
    "roster": {"0": ["127.0.0.1", 9000], "1": ["127.0.0.1", 9001]},
    "machine": _MACHINE,
}


class World:
    """A run, a token store, a Megatron pair and a Hugging Face folder, all whole, in a folder of their own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        text = preset_text("first-voyage")
        of_folder, n = re.subn(r"(?m)^preset = .*$", 'hf = "hf"', text)
        assert n == 1
        (root / "hf.toml").write_text(of_folder)
        self.job: Job = job_from_text(
            text, name="job.toml", base_folder=root, overrides=["train.steps=8", "optimizer.warmup_steps=2"]
        )
        self.run = self._run()
        (root / "corpus.txt").write_text("one two three\n" * 40)
        prepare([str(root / "corpus.txt")], "bytes", root / "store", shard_tokens=200)
        assert seatrial(["data", "export", str(root / "store"), "--out", str(root / "pair")]) == 0
        self._weights(root / "hf")
        self.spec = AgentSpec(self.run.path, 2, node=1, nodes=2, ranks_per_node=4, device="cpu")

    def _run(self) -> RunFolder:
        with open_run(self.job, self.root / "runs") as opened:
            folder = opened.folder
        metrics, ledger = MetricsWriter(folder), LedgerWriter(folder)
        for generation, start, end in ((1, 0, 7), (2, 5, 8)):
            data = {"layout": self.job.layout.as_dict()}
            events.append(folder, "run_started", "8 ranks", generation=generation, data=data)
            events.append(folder, "rank_started", "", generation=generation, node=0, rank=0, data={"pid": 1})
            if start:
                where = {"step": start, "checkpoint": str(folder.checkpoints / "step-00000005")}
                events.append(folder, "resumed", "from step 5", generation=generation, data=where)
            for n in range(start + 1, end + 1):
                ledger.write(LedgerRecord(n, (n - 1) * BATCH, n * BATCH, generation))
                tokens = n * BATCH * LENGTH
                metrics.write(MetricsRecord(n, tokens, 5.0 - n / 9, 0.5, 1e-3, 0.25, 0.0, 64.0, 32.0, None, 1 << 28, 1e9 + n, generation))  # fmt: skip
            if generation == 1:
                why = {"node": 0, "rank": 3, "status": -9, "log": "x", "told": "a-1"}
                events.append(
                    folder, "rank_failed", "rank 3 was killed", severity="error", generation=1, data=why
                )
                again = {"signal": "worker_killed", "step": 7, "action": "restart", "restarts": 1}
                events.append(folder, "recovering", "rank 3", severity="warning", generation=1, data=again)
        events.append(
            folder, "checkpoint_saved", "", generation=2, data={"step": 8, "folder": "x", "bytes": 9}
        )
        events.append(folder, "sample", "", generation=2, data={"prompt": "def", "text": "def f():"})
        events.append(folder, "run_finished", "all 8 steps are done", generation=2)
        metrics.close()
        ledger.close()
        folder.generation_file.write_text("2\n")
        for step, generation in ((5, 1), (8, 2)):
            self._checkpoint(folder.checkpoints, step, generation)
        for node in range(2):
            hold = Leases(folder.leases).claim(Lease(node + 1, node, "127.0.0.1", 9000 + node, 1e9), 3.0)
            assert hold is not None
        hold.state.write_text(json.dumps(STATE))
        error = RankError(1e9, 3, 0, "ValueError", "x", "Trace", consequence=False, exit_code=1, hint=None)
        path = folder.rank_error(1, 0, 3)
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(vars(error)))
        return folder

    def _checkpoint(self, place: Path, step: int, generation: int) -> None:
        manifest = new_manifest(
            Progress(step, step * BATCH * LENGTH, step * BATCH, generation),
            time=1e9,
            layout={"world_size": 1},
        )
        values = torch.arange(64, dtype=torch.float32) + step
        save_whole(place, manifest, {"model/a": values})

    def _weights(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config_from_architecture(self.job.architecture)))
        for n in (1, 2):
            save_file({f"w{n}": torch.ones(4)}, folder / f"model-{n}.safetensors")
        index = {"metadata": {}, "weight_map": {f"w{n}": f"model-{n}.safetensors" for n in (1, 2)}}
        (folder / INDEX).write_text(json.dumps(index))


# -- damage

_VALUES = (
    "null", "true", "-1", "0", "1e400", "-0.0", "NaN", "Infinity", "1" * 30, "1" * 5000, '""', '"\\ud800"', '"\\u001b]0;x\\u0007"',
    '"' + "a" * 400 + '"', "[]", "{}", "[[[]]]", "[" * 3000 + "]" * 3000, '{"a":' * 3000 + "1" + "}" * 3000, '"²"', "3.5", '"../../x"',
    '"NaN"', "9223372036854775808", "18446744073709551616", "x",
)  # fmt: skip
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?|true|false|null')


def _token(data: bytes, rng: random.Random) -> bytes:
    """Another value in the place of one of a JSON or TOML text."""
    found = list(_TOKEN.finditer(data))
    if not found:
        return _bytes(data, rng)
    at = rng.choice(found)
    return data[: at.start()] + rng.choice(_VALUES).encode() + data[at.end() :]


def _near(data: bytes, rng: random.Random) -> bytes:
    """One number a little different: what is still a number is the harder to notice."""
    found = list(re.finditer(rb"\d+", data))
    if not found:
        return _bytes(data, rng)
    at = rng.choice(found)
    return (
        data[: at.start()]
        + str(max(0, int(at[0]) + rng.choice((-1, 1, 7, 1000)))).encode()
        + data[at.end() :]
    )


def _lines(data: bytes, rng: random.Random) -> bytes:
    lines = data.splitlines(keepends=True)
    if len(lines) < 2:
        return _token(data, rng)
    a, b = rng.randrange(len(lines)), rng.randrange(len(lines))
    match rng.randrange(4):
        case 0:
            del lines[a]
        case 1:
            lines.insert(b, lines[a])
        case 2:
            lines[a], lines[b] = lines[b], lines[a]
        case _:
            lines[a] = lines[a][: rng.randrange(len(lines[a]))]
    return b"".join(lines)


def _bytes(data: bytes, rng: random.Random) -> bytes:
    made = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at, n = rng.randrange(len(made) + 1), rng.randint(1, 16)
        match rng.randrange(5):
            case 0 if made:
                made[at % len(made)] ^= 1 << rng.randrange(8)
            case 1:
                del made[at : at + n]
            case 2:
                made[at:at] = rng.randbytes(n)
            case 3:
                made[at:at] = made[at : at + n]
            case _:
                made[at : at + 8] = rng.choice((b"\0" * 8, b"\xff" * 8, b"\x7f" + b"\xff" * 7))
    return bytes(made)


def _cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def damage(path: Path, rng: random.Random) -> str:
    """Damage the file at `path`; how."""
    if rng.random() < 0.06:
        path.unlink()
        match kind := rng.choice(("missing", "folder", "pipe", "link", "device", "large")):
            case "folder":
                path.mkdir()
            case "pipe":
                os.mkfifo(path)
            case "link":
                path.symlink_to(path.name)
            case "device":
                path.symlink_to("/dev/zero")
            case "large":
                path.touch()
                os.truncate(path, 20 << 30)
        return kind
    data = path.read_bytes()
    text = data.isascii()
    how = rng.choice(
        (_token, _token, _near, _near, _lines, _bytes, _cut) if text else (_bytes, _bytes, _near, _cut)
    )
    made = how(data, rng)
    path.write_bytes(made)
    return how.__name__.strip("_") if made != data else "nothing"


# -- what is done with it


@dataclass
class Seen:
    """What a verb did."""

    code: int
    out: str = ""
    err: str = ""


def run(*words: str) -> Seen:
    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.TextIOWrapper(io.BytesIO(), "utf-8")
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = seatrial(list(words))
    texts = []
    for stream in (out, err):
        stream.flush()
        texts.append(stream.buffer.getvalue().decode("utf-8"))  # type: ignore[attr-defined]
    return Seen(code, *texts)


def call(function: Callable[[], object]) -> Seen:
    """A function of ours, whose errors are told as a verb's would be."""
    try:
        function()
    except SeatrialError as error:
        return Seen(error.exit_code, err=error.render())
    return Seen(0)


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")


@dataclass
class Target:
    """Files of one kind, what reads them, and what is meant by them (equal meaning is no damage)."""

    name: str
    files: list[str]
    acts: list[Callable[[World], Seen]]
    meaning: Callable[[World], object] | None = None  # without: nothing is proven of them
    proves: list[Callable[[World], Seen]] = field(default_factory=list)  # 0 is a promise that they are whole


def verb(*words: str) -> Callable[[World], Seen]:
    return lambda world: run(
        *(word.replace("ROOT", str(world.root)).replace("RUN", str(world.run.path)) for word in words)
    )


def _start(world: World) -> Seen:
    def start() -> None:
        with open_run(world.job, world.root / "runs"):
            pass

    return call(start)


def _lease(world: World) -> Seen:
    def look() -> None:
        with contextlib.suppress(OSError):
            found = Leases(world.run.leases).newest()
            assert found is None or (type(found.term), type(found.port)) == (int, int)
        last_term(world.run.leases)

    return call(look)


def _state(world: World) -> Seen:
    state = world.run.leases / "00000002.state"
    return call(lambda: recall(world.spec, shapes(world.job), state))


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() and path.stat().st_size < 1 << 20 else None


def _json_of(path: Path) -> object:
    try:
        return json.loads(_content(path) or b"")
    except (ValueError, RecursionError) as error:
        return type(error).__name__


def _ledger(world: World) -> object:
    """By generation: one that was given up may write a line when the next one has begun, and it counts for nothing."""
    return sorted((asdict(r) for _, r in each_ledger_line(world.run, [])), key=lambda r: r["generation"])


def _manifests(world: World) -> object:
    return [_json_of(path) for path in sorted(world.run.checkpoints.glob(f"*/{MANIFEST}"))]


def _parts(world: World) -> object:
    return [_content(path) for path in sorted(world.run.checkpoints.glob("*/rank-*"))]


def _store(world: World) -> object:
    """What `data verify` can know to be wrong: not the names in it, nor what it says of a tokenizer."""
    try:
        told = read_manifest(world.root / "store").model_dump(exclude={"source", "tokenizer"})
    except SeatrialError as error:
        return error.render()
    for shard in told["shards"]:  # of one chunk it does not matter how long it could be
        if shard["chunks"] is not None:
            shard["chunks"]["chunk_bytes"] = min(shard["chunks"]["chunk_bytes"], shard["bytes"])
    return told


WATCH = [
    verb("watch", "RUN", "--once"),
    verb("watch", "RUN", "--once", "--json"),
    verb("checkpoints", "RUN", "--json"),
]
VERIFY = [verb("verify", "RUN"), verb("verify", "RUN", "--json")]
STEPS_OF = ("checkpoints/step-00000005", "checkpoints/step-00000008")
TARGETS = [
    Target("ledger", ["RUN/ledger.jsonl"], WATCH, _ledger, VERIFY),
    Target("checkpoint manifest", [f"RUN/{s}/{MANIFEST}" for s in STEPS_OF], WATCH, _manifests, VERIFY),
    Target("checkpoint part", [f"RUN/{s}/rank-00000.safetensors" for s in STEPS_OF], WATCH, _parts, VERIFY),
    Target("metrics", ["RUN/metrics.jsonl"], WATCH + VERIFY),
    Target("events", ["RUN/events.jsonl"], WATCH + VERIFY),
    Target("job of the run", ["RUN/job.toml"], [*WATCH, *VERIFY, _start]),
    Target(
        "small records",
        ["RUN/plan.json", "RUN/control/identity.json", "RUN/control/generation", "RUN/control/lock", "RUN/checkpoints/latest",
         "RUN/logs/000001/node0/rank3.error.json"],
        [*WATCH, _start],
    ),
    Target("secret", ["RUN/control/secret"], [lambda world: call(lambda: read_secret(world.run))]),
    Target("lease", ["RUN/control/leases/00000001.json", "RUN/control/leases/00000002.json", "RUN/control/lease.json"], [_lease]),
    Target("state", ["RUN/control/leases/00000002.state"], [_state]),
    Target(
        "store manifest",
        ["ROOT/store/manifest.json"],
        [verb("data", "show", "ROOT/store", "--json")],
        _store,
        [verb("data", "verify", "ROOT/store", "--json")],
    ),
    Target("Megatron index", ["ROOT/pair.idx"], [verb("data", "import", "ROOT/pair", "--tokenizer", "bytes", "--out", "ROOT/made", "--force")]),
    Target("config.json", ["ROOT/hf/config.json"], [verb("plan", "ROOT/hf.toml", "--own", "--json")]),
    Target("index of weights", [f"ROOT/hf/{INDEX}"], [lambda world: call(lambda: HuggingFaceWeights(world.root / "hf"))]),
]  # fmt: skip
WEIGHTS = {
    "ledger": 4,
    "checkpoint manifest": 3,
    "events": 3,
    "metrics": 2,
    "small records": 2,
    "store manifest": 2,
}


class _HangError(BaseException):  # the last resort of a verb must not take it for a bug
    pass


@contextlib.contextmanager
def _in_time() -> Iterator[None]:
    def over(signum: int, frame: object) -> None:
        raise _HangError

    before = signal.signal(signal.SIGALRM, over)
    signal.alarm(HANG_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _wrong(seen: Seen, *, as_json: bool) -> str | None:
    if seen.code not in (0, 1, 2):
        return f"exit code {seen.code}"
    if "Traceback" in seen.err:
        return "a traceback"
    if "\x1b" in seen.out + seen.err:
        return "an escape sequence"
    if as_json and seen.code == 0:
        try:
            json.loads(seen.out, parse_constant=_refuse_constant)
        except ValueError as error:
            return f"no JSON: {error}"
    return None


def play(pristine: World, number: int, seed: int, counts: Counter[str]) -> str | None:
    """One mutation; what is wrong with what came of it."""
    rng = random.Random(f"{seed}/{number}")
    target = rng.choices(TARGETS, [WEIGHTS.get(t.name, 1) for t in TARGETS])[0]
    with tempfile.TemporaryDirectory(dir=pristine.root.parent) as folder:
        root = Path(folder) / "w"
        shutil.copytree(pristine.root, root, symlinks=True)
        world = _World(pristine, root)
        before = None if target.meaning is None else target.meaning(world)
        name = rng.choice(target.files).replace("RUN", str(world.run.path)).replace("ROOT", str(root))
        how = damage(Path(name), rng)
        counts[f"{target.name}: {how}"] += 1
        meant = target.meaning is None or target.meaning(world) == before
        for act in [*target.acts, *target.proves]:
            try:
                with _in_time():
                    seen = act(world)
            except _HangError:
                return f"{target.name}, {how} of {name}: hangs"
            except Exception:  # noqa: BLE001  whatever escapes is what we look for
                return f"{target.name}, {how} of {name}: {traceback.format_exc()}"
            problem = _wrong(seen, as_json=seen.out.startswith("{"))
            if problem is None and act in target.proves and seen.code == 0 and not meant:
                problem = "verified, though it is damaged"
            counts[f"exit {seen.code}"] += 1
            if problem is not None:
                return f"{target.name}, {how} of {name}: {problem}\n{seen.out[-800:]}\n{seen.err[-1500:]}"
    return None


class _World(World):
    """A copy of another world."""

    def __init__(self, other: World, root: Path) -> None:
        self.root, self.job = root, other.job
        self.run = RunFolder(root / other.run.path.relative_to(other.root))
        self.spec = AgentSpec(self.run.path, 2, node=1, nodes=2, ranks_per_node=4, device="cpu")


def campaign(root: Path, count: int, seed: int, only: int | None = None) -> tuple[Counter[str], list[str]]:
    """Play `count` mutations; what was done and came of it, and every failure with its number."""
    (root / "whole").mkdir()
    pristine = World(root / "whole")
    for act in {id(act): act for t in TARGETS for act in [*t.acts, *t.proves]}.values():
        seen = act(pristine)
        assert seen.code == 0, seen  # what is whole is verified
    counts: Counter[str] = Counter()
    failures = []
    for number in range(count) if only is None else [only]:
        if (problem := play(pristine, number, seed, counts)) is not None:
            failures.append(f"mutation {number} of seed {seed}: {problem}")
    return counts, failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, metavar="NUMBER")
    args = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        counts, failures = campaign(Path(folder), args.count, args.seed, args.only)
    for name, n in sorted(counts.items()):
        print(f"{n:7,}  {name}")
    for failure in failures[:20]:
        print(failure, file=sys.stderr)
    print(f"{args.count:,} mutations in {time.monotonic() - began:.0f} s, {len(failures)} failures")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
