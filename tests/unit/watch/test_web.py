"""The web server in process: who is answered, what is never done, and what the pages say."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import queue
import random
import re
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.testclient import TestClient

from record_fuzz import World, damage
from seatrial.base.errors import InputError
from seatrial.record import events
from seatrial.record.folder import RunFolder
from seatrial.record.ledger import LedgerRecord, LedgerWriter
from seatrial.record.metrics import MetricsRecord, MetricsWriter
from seatrial.record.stages import STAGES, StageWriter
from seatrial.record.telemetry_writer import TelemetryWriter
from seatrial.watch.web import heat, watched
from seatrial.watch.web.access import COOKIE, Access, answers_to, make_token
from seatrial.watch.web.app import Static, application
from seatrial.watch.web.feed import Feed, encode
from seatrial.watch.web.now import now
from seatrial.watch.web.pages import PAGES
from seatrial.watch.web.polled_run import PolledRun, PolledRunReader
from seatrial.watch.web.runs import Runs

SCRIPT = "<script>alert(1)</script>"
TOKEN = "correct-horse-battery-staple-0"


def write_run(folder: RunFolder) -> RunFolder:
    """Two nodes of two ranks, of which rank 1 is slow; three steps, and a failure."""
    folder.control.mkdir(parents=True)
    folder.job_toml.write_text("[train]\nsteps = 4\nglobal_batch = 2\nsequence_length = 8\n")
    folder.plan_json.write_text(json.dumps({"layout": {"pipeline": 1, "world_size": 4}}))
    layout = {"world_size": 4}
    events.append(folder, "run_started", "4 ranks", generation=1, data={"layout": layout})
    events.append(folder, "generation_started", SCRIPT, generation=1, data={"slots": {"0": 0, "1": 5}})
    metrics, ledger = MetricsWriter(folder), LedgerWriter(folder)
    for n in (1, 2, 3):
        metrics.write(
            MetricsRecord(n, n * 16, 5.0 - n, 0.5, 1e-3, 0.25, 0.0, 64.0, 32.0, 0.25, 2**30, 1e9 + n, 1)
        )
        ledger.write(LedgerRecord(n, n * 2 - 2, n * 2, 1))
    metrics.close()
    ledger.close()
    for rank in range(4):
        writer = StageWriter(folder, 1, rank, ranks=4, clock="cpu", first_step=1, not_separated={})
        for step in range(1, 9):
            of = {"forward": 0.2 if rank == 1 else 0.1, "backward": 0.1, "tensor": 0.1}
            writer.add(step, [of.get(stage, 0.0) for stage in STAGES])
        writer.close()
        log = folder.rank_log(1, 5 * (rank // 2), rank)
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("".join(f"{rank}: {n} {SCRIPT}\n" for n in range(1000)))
    telemetry = TelemetryWriter(folder, 5, 10.0)
    telemetry.add(1e9, {'gpu_temperature_celsius{gpu="0"}': 61.0, 'gpu_temperature_celsius{gpu="1"}': 55.0})
    telemetry.close()
    data = {"node": 5, "rank": 2, "cause": "ValueError: x", "hint": "look there", "tail": "Traceback"}
    events.append(folder, "run_failed", "rank 2 failed", severity="error", generation=1, data=data)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return write_run(RunFolder(tmp_path_factory.mktemp("runs") / SCRIPT.replace("/", "-")))


def client_of(folder: RunFolder, token: str | None = None, root: Path = Path("none")) -> TestClient:
    chosen = [] if root.exists() else [folder]
    app = application(lambda: Runs(chosen, root, asyncio.get_running_loop()), Access(token), [])
    return TestClient(app, base_url="http://localhost:8470")


@pytest.fixture(scope="module")
def client(run: RunFolder) -> Iterator[TestClient]:
    with client_of(run) as found:
        yield found


@pytest.fixture
def guarded(run: RunFolder) -> Iterator[TestClient]:
    with client_of(run, TOKEN) as found:
        yield found


def log_in(client: TestClient, token: str, **headers: str) -> Any:
    return client.post("/login", content=token, headers={"content-type": "text/plain", **headers})


@pytest.mark.parametrize(
    ("host", "answered"),
    [
        ("localhost:1", True), ("127.0.0.1", True), ("[::1]:80", True), ("10.1.2.3:8470", True),
        ("evil.example", False), ("localhost.evil.example", False), ("", False), ("127.0.0.1.evil.example:8470", False),
    ],
)  # fmt: skip
def test_an_unknown_host_name_is_refused(client: TestClient, host: str, answered: bool) -> None:
    assert answers_to(host) is answered
    assert client.get("/api/runs", headers={"host": host}).status_code == (200 if answered else 421)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_only_get_is_allowed(client: TestClient, method: str) -> None:
    for path in ("/", "/api/runs", "/static/app.css"):
        assert client.request(method, path).status_code == 405


def test_every_answer_forbids_foreign_scripts(client: TestClient) -> None:
    for path in ("/", "/api/runs", "/static/main.js", "/nothing", "/metrics"):
        headers = client.get(path).headers
        policy = headers["content-security-policy"]
        assert "script-src 'self';" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in headers


def test_the_page_has_no_inline_script_or_style() -> None:
    for name, (_, body) in Static().files.items():
        text = body.raw.decode()
        if name.endswith(".html"):
            assert re.findall(r"<script(?![^>]* src=)", text) == []
            assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:|https?://", text)
        elif name.endswith(".js") and not name.startswith("uplot/"):
            assert not re.search(
                r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|https?://", text
            )


def test_every_path_requires_the_token(guarded: TestClient) -> None:
    paths = ("/api/runs", "/static/main.js", "/metrics", "/api/run/x/stream", "/api/compare", "/nothing")
    for path in paths:
        assert guarded.get(path).status_code == 401, path
        assert guarded.get(path, headers={"cookie": f"{COOKIE}=x"}).status_code == 401
        assert guarded.get(path, headers={"authorization": "Bearer "}).status_code == 401
    assert b'id="token"' in guarded.get("/").content
    assert log_in(guarded, "wrong").status_code == 403
    assert log_in(guarded, TOKEN, **{"sec-fetch-site": "cross-site"}).status_code == 403
    assert log_in(guarded, "x" * 5000).status_code == 413
    assert guarded.post("/login", content=TOKEN).status_code == 415
    answer = log_in(guarded, TOKEN)
    assert answer.status_code == 200
    assert answer.headers["set-cookie"].endswith("; HttpOnly; Path=/; SameSite=strict")
    assert TOKEN not in answer.headers["set-cookie"]
    assert guarded.get("/api/runs").status_code == 200
    assert b'id="nav"' in guarded.get("/").content


def test_metrics_accept_the_token_as_bearer(guarded: TestClient) -> None:
    headers = {"authorization": f"Bearer {TOKEN}"}
    assert b"seatrial_run_step" in guarded.get("/metrics", headers=headers).content
    assert guarded.get("/api/runs", headers=headers).status_code == 401


def test_wrong_tokens_are_rate_limited(guarded: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [log_in(guarded, f"guess {n}").status_code for n in range(7)] == [403] * 5 + [429] * 2
    assert log_in(guarded, TOKEN).status_code == 429
    at = time.monotonic() + 61
    monkeypatch.setattr("seatrial.watch.web.access.time.monotonic", lambda: at)
    assert log_in(guarded, TOKEN).status_code == 200


def test_the_token_file_is_private(tmp_path: Path) -> None:
    path = tmp_path / "made" / "token"
    token, new = make_token(path)
    assert new
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert make_token(path) == (token, False)
    path.chmod(0o640)
    with pytest.raises(InputError, match="can be read by others"):
        make_token(path)
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError):
        make_token(path)


@pytest.mark.parametrize(
    "path",
    [
        "/static/../access.py", "/static/%2e%2e/access.py", "/static/uplot/../../access.py", "/static//etc/passwd",
        "/api/run/../page/plan", "/api/run/..%2f..%2fetc/page/plan", "/api/run/%2Fetc/page/plan", "/api/run/x/page/../plan",
        "/api/run/RUN/log?generation=1&id=../../job.toml", "/api/run/RUN/log?generation=1&id=0/../../../job.toml",
        "/api/run/RUN/log?generation=../..&id=/etc/passwd", "/api/run/RUN/page/..", "/api/run/RUN/page/%00",
    ],
)  # fmt: skip
def test_paths_cannot_escape_the_run_folder(client: TestClient, run: RunFolder, path: str) -> None:
    answer = client.get(path.replace("RUN", run.path.name))
    assert answer.status_code == 404
    assert b"global_batch" not in answer.content


def test_the_first_screen(client: TestClient, run: RunFolder) -> None:
    polled = PolledRunReader(run).poll()
    document = json.loads(encode(now(polled)))
    assert list(document)[1:8] == ["state", "moving", "attention", "lost", "reserve", "checkpoint", "heat"]
    (item,) = document["attention"]
    assert (item["node"], item["rank"], item["what"]) == (5, 2, "rank 2 failed")
    assert item["command"] == f"seatrial logs '{run.path}' --rank 2"
    assert document["moving"]["step"] == 3
    heat_map = document["heat"]
    assert (heat_map["nodes"], heat_map["columns"]) == ([0, 5], [0, 1])
    assert heat_map["values"] == [[0.0, 25.0], [0.0, 0.0]]  # 0.1 s of a step of 0.4 s


def test_any_metric_can_be_mapped(client: TestClient, run: RunFolder) -> None:
    name = run.path.name
    metrics = client.get(f"/api/run/{name}/page/ranks").json()["metrics"]
    assert {"own-work", "stage:forward", "telemetry:gpu_temperature_celsius"} <= {m["id"] for m in metrics}
    for metric in metrics:
        assert client.get(f"/api/run/{name}/heat", params={"metric": metric["id"]}).json()["values"]
    found = client.get(f"/api/run/{name}/heat?metric=telemetry:gpu_temperature_celsius").json()
    assert (found["nodes"], found["columns"], found["values"]) == ([5], ["0", "1"], [[61.0, 55.0]])
    assert client.get(f"/api/run/{name}/heat?metric=no").json()["why"]
    old = client.get(f"/api/run/{name}/series?node=5&metric=telemetry:gpu_temperature_celsius").json()
    assert old["missing"] == ["node 5 did not record it in the last 24 hours"]
    found = heat.over_time(run, 5, "telemetry:gpu_temperature_celsius", 1e9 + 60)["blocks"][0]
    assert (found["x"], [line["y"] for line in found["series"]]) == ([1e9], [[61.0], [55.0]])


def test_a_log_is_read_from_its_end_and_followed(client: TestClient, run: RunFolder) -> None:
    name, path = run.path.name, run.rank_log(1, 5, 2)
    logs = client.get(f"/api/run/{name}/logs").json()
    assert [log["id"] for log in logs["logs"]] == ["0/rank0.log", "0/rank1.log", "5/rank2.log", "5/rank3.log"]
    where = f"/api/run/{name}/log?generation=1&id=5/rank2.log"
    last = client.get(where).json()
    assert (len(last["lines"]), last["lines"][-1]) == (400, f"2: 999 {SCRIPT}")
    before = client.get(f"{where}&before={last['from']}").json()
    assert before["lines"][-1] == f"2: 599 {SCRIPT}"
    with open(path, "a") as file:
        file.write("new\nnot whole")
        file.flush()
        assert client.get(f"{where}&after={last['to']}").json()["lines"] == ["new"]


def test_only_the_end_of_a_large_log_is_read(client: TestClient, run: RunFolder) -> None:
    path = run.rank_log(1, 0, 0)
    with open(path, "r+b") as file:
        file.truncate(20 << 30)
        file.seek(20 << 30)
        file.write(b"\nlast\n")
    part = client.get(f"/api/run/{run.path.name}/log?generation=1&id=0/rank0.log").json()
    assert part["lines"][-1] == "last"
    assert part["to"] - part["from"] <= 256 << 10


def test_runs_of_a_folder_are_listed_and_compared(run: RunFolder) -> None:
    (run.path.parent / "broken").mkdir()
    (run.path.parent / "broken" / "plan.json").mkdir()
    with client_of(run, root=run.path.parent) as client:
        listed = {row["name"]: row["state"] for row in client.get("/api/runs").json()["runs"]}
        assert listed == {run.path.name: "failed", "broken": "unusable"}
        page = client.get("/api/compare", params={"run": [run.path.name, "broken"]}).json()
        assert [b["title"] for b in page["blocks"]] == ["Runs", "Loss"]
        assert page["missing"] == ["broken: job.toml cannot be read"]
        assert client.get("/api/compare?run=none").status_code == 404


def test_pages_are_cached_and_have_an_etag(client: TestClient, run: RunFolder) -> None:
    for path in (f"/api/run/{run.path.name}/page/events", "/static/main.js"):
        first = client.get(path)
        assert client.get(path, headers={"if-none-match": first.headers["etag"]}).status_code == 304
    assert first.headers["content-encoding"] == "gzip"


def test_a_stream_sends_only_changes_and_ends() -> None:
    async def watch() -> list[bytes]:
        feed = Feed(asyncio.get_running_loop())
        stream = feed.stream()
        feed.publish({"a": 1, "b": float("nan")})
        await asyncio.sleep(0)
        got = [await anext(stream)]
        feed.publish({"a": 1, "b": 2})
        feed.publish({"a": 1, "b": 2})
        await asyncio.sleep(0)
        got.append(await anext(stream))
        feed.end()
        assert [part async for part in stream] == []
        assert feed.readers == 0
        return got

    assert asyncio.run(watch()) == [b'data: {"a":1,"b":"NaN"}\n\n', b'data: {"b":2}\n\n']


def test_vendored_uplot_matches_its_hash() -> None:
    folder = Path(heat.__file__).parent / "static" / "uplot"
    vendored = json.loads((folder / "vendored.json").read_text())
    page = (folder.parent / "index.html").read_text()
    assert (vendored["name"], vendored["version"], vendored["license"]) == ("uplot", "1.6.32", "MIT")
    for name, digest in vendored["files"].items():
        found = "sha256-" + base64.b64encode(hashlib.sha256((folder / name).read_bytes()).digest()).decode()
        assert found == digest
        assert f'/static/uplot/{name}" integrity="{digest}"' in page
    assert "MIT License" in (folder / "LICENSE").read_text()


@pytest.mark.cluster  # for its time: it starts no cluster
def test_a_damaged_folder_is_still_shown(tmp_path: Path) -> None:
    (tmp_path / "world").mkdir()
    whole, path = World(tmp_path / "world").run, tmp_path / "runs" / "damaged"
    for rank in range(8):
        writer = StageWriter(whole, 2, rank, ranks=8, clock="cpu", first_step=1, not_separated={})
        for step in range(1, 9):
            writer.add(step, [0.1] * len(STAGES))
        writer.close()
    telemetry = TelemetryWriter(whole, 1, 10.0)
    telemetry.add(1e9, {'gpu_power_watts{gpu="0"}': 600.0})
    telemetry.close()
    whole.reports.mkdir(exist_ok=True)
    (whole.reports / "check.json").write_text('{"verdict": "FAIL", "findings": [{"code": "GPU001"}]}')
    (whole.reports / "drill-20260101-000000.json").write_text('{"verdicts": {"PASS": 1}, "scenarios": [{}]}')
    noticed = 0
    for number in range(40):
        chance = random.Random(number)
        shutil.copytree(whole.path, path)
        files = sorted(p for p in path.rglob("*") if p.is_file())
        for _ in range(chance.randint(1, 2)):
            there = [p for p in files if p.is_file() and p.stat().st_size < 1 << 20]
            damage(chance.choice(there), chance)
        polled = PolledRunReader(RunFolder(path)).poll()
        documents = [now(polled), *(make(polled) for make in PAGES.values())]
        documents += [heat.heat(polled, metric["id"]) for metric in heat.metrics(polled)]
        missing = [line for document in documents for line in document.get("missing", ())]
        noticed += len(missing) > 3
        assert all(json.loads(encode(document)) for document in documents), number
        shutil.rmtree(path)
    assert noticed > 8


def test_an_open_alert_needs_attention(tmp_path: Path) -> None:
    folder = write_run(RunFolder(tmp_path / "run"))
    folder.events.write_text("".join(folder.events.read_text().splitlines(True)[:-1]))  # it did not fail
    alert = {
        "rule": "hot_gpu",
        "key": "hot",
        "since": 1e9,
        "evidence": {"celsius": 91.5},
        "nodes": [5],
        "command": "drain 5",
    }
    for state in ("firing", "resolved"):
        polled = PolledRunReader(folder).poll()
        polled.view.state = "running"
        assert [item["what"] for item in now(polled)["attention"]] == (
            [] if state == "firing" else ["GPU is hot"]
        )
        events.append(
            folder, "alert", "GPU is hot", severity="warning", generation=1, data={**alert, "state": state}
        )
    assert "celsius 91.5" in str(now(polled)["attention"])
    assert now(PolledRunReader(folder).poll())["attention"][0]["what"].startswith("stopped")


def test_a_run_read_while_the_server_ends_is_not_an_error() -> None:
    """The threads that read runs are not waited for."""
    loop = asyncio.new_event_loop()
    feed = Feed(loop)
    loop.close()
    feed.publish({"step": 1})


def test_a_new_event_is_read_at_once_after_a_slow_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine a read may take long: the wait that it asks for afterwards ends with a new event."""
    folder, slow_s, polls = write_run(RunFolder(tmp_path / "run")), 0.0, queue.Queue[int]()

    class SlowReader(PolledRunReader):
        def poll(self) -> PolledRun:
            nonlocal slow_s
            slow_s += 3600.0
            polled = super().poll()
            polls.put(len(polled.view.events))
            return polled

    monkeypatch.setattr(watched, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + slow_s))
    monkeypatch.setattr(watched, "PolledRunReader", SlowReader)
    loop = asyncio.new_event_loop()
    reads = watched.Watched("run", folder, loop)
    reads.feed.readers = 1  # a browser that stays
    reads.want()
    before = polls.get(timeout=30)
    events.append(folder, "rank_failed", "rank 1 was killed", severity="error", generation=1)
    assert polls.get(timeout=30) > before
    reads.end()
    loop.close()
