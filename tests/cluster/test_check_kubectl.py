"""`seatrial check --apply` with the real kubectl, against a stand-in for the API server that keeps two nodes."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from seatrial.cli.main import main

pytestmark = [
    pytest.mark.ci,
    pytest.mark.cluster,
    pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl"),
]
FIXTURES = Path(__file__).parents[1] / "fixtures" / "check"
APPLY = ["check", "--from", "out", "--scheduler", "kubernetes", "--apply"]


class Api(ThreadingHTTPServer):
    """What kubectl taint needs of the API: discovery, and reading and patching a node."""

    daemon_threads = True

    def __init__(self, names: tuple[str, ...]) -> None:
        self.nodes: dict[str, dict[str, Any]] = {
            n: {
                "kind": "Node",
                "apiVersion": "v1",
                "metadata": {"name": n, "resourceVersion": "1"},
                "spec": {},
            }
            for n in names
        }
        super().__init__(("127.0.0.1", 0), _Handler)

    def taints(self, node: str) -> list[dict[str, str]]:
        found: list[dict[str, str]] = self.nodes[node]["spec"].get("taints") or []
        return found


_NODE_RESOURCE = {
    "name": "nodes",
    "singularName": "node",
    "namespaced": False,
    "kind": "Node",
    "verbs": ["get", "list", "patch", "update"],
}
_DISCOVERY: dict[str, Any] = {
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": []},
    "/api/v1": {"kind": "APIResourceList", "groupVersion": "v1", "resources": [_NODE_RESOURCE]},
}


class _Handler(BaseHTTPRequestHandler):
    server: Api

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        name = path.removeprefix("/api/v1/nodes/")
        if path in _DISCOVERY:
            self._answer(200, _DISCOVERY[path])
        elif name in self.server.nodes:
            self._answer(200, self.server.nodes[name])
        else:
            text = f'nodes "{name}" not found'
            status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 404}
            self._answer(404, {**status, "reason": "NotFound", "message": text})

    def do_PATCH(self) -> None:
        name = self.path.partition("?")[0].removeprefix("/api/v1/nodes/")
        patch = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.nodes[name]["spec"].update(patch["spec"])
        self._answer(200, self.server.nodes[name])

    def _answer(self, code: int, document: Any) -> None:
        body = json.dumps(document).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    """The stand-in, and a kubectl that finds it."""
    monkeypatch.chdir(tmp_path)
    server = Api(("n1", "n2"))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    (tmp_path / "config").write_text(json.dumps(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    monkeypatch.setenv("HOME", str(tmp_path))  # kubectl caches what it discovers
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def outputs(**fixtures: str) -> None:
    for node, name in fixtures.items():
        Path("out", node).mkdir(parents=True)
        shutil.copy(FIXTURES / name, Path("out", node, "ibstat.txt"))


def test_the_node_that_failed_is_tainted_and_comes_back(api: Api, capsys: pytest.CaptureFixture[str]) -> None:
    outputs(n1="ibstat_four_ndr.txt", n2="ibstat_one_down.txt")
    assert main([*APPLY, "--json"]) == 1
    out, err = capsys.readouterr()
    assert api.taints("n2") == [{"key": "seatrial.dev/unfit", "value": "NET001", "effect": "NoSchedule"}]
    assert api.taints("n1") == []
    assert err.startswith("done: kubectl taint nodes n2 ")
    (order,) = json.loads(out)["orders"]
    assert (order["done"], order["output"]) == (True, "node/n2 modified")
    assert main(APPLY) == 1  # once more, where it is already
    assert len(api.taints("n2")) == 1
    subprocess.run(order["undo"], check=True, capture_output=True, timeout=60)
    assert api.taints("n2") == []


def test_a_node_unknown_to_the_cluster_is_reported(api: Api, capsys: pytest.CaptureFixture[str]) -> None:
    outputs(n1="ibstat_four_ndr.txt", n9="ibstat_one_down.txt")
    assert main(APPLY) == 1
    assert 'exit code 1: Error from server (NotFound): nodes "n9" not found' in capsys.readouterr().err


def test_without_apply_no_request_is_sent_to_the_api(api: Api, capsys: pytest.CaptureFixture[str]) -> None:
    outputs(n1="ibstat_four_ndr.txt", n2="ibstat_one_down.txt")
    assert main(APPLY[:-1]) == 1
    assert api.taints("n2") == []
