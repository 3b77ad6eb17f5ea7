"""A real Alertmanager for a test, on a port and a folder of its own, and the webhook that it notifies."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

_TIMEOUT_S = 60.0


class Receiver:
    """A webhook that keeps what it gets and answers with `status`."""

    def __init__(self) -> None:
        receiver, self.got, self.status = self, list[dict[str, Any]](), 200

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if receiver.status == 200:
                    receiver.got.append(body)
                self.send_response(receiver.status)
                if receiver.status == 302:
                    self.send_header("Location", "/elsewhere")
                self.end_headers()

            def log_message(self, *arguments: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class Alertmanager:
    """Notifies `receiver` at once; ended by `close`."""

    def __init__(self, folder: Path, receiver: Receiver) -> None:
        if shutil.which("prometheus-alertmanager") is None:
            pytest.skip("Alertmanager is not installed")
        folder.mkdir()
        (folder / "alertmanager.yml").write_text(f"""
route: {{receiver: hook, group_by: [alertname, run], group_wait: 0s, group_interval: 1s, repeat_interval: 1h}}
receivers:
  - name: hook
    webhook_configs:
      - url: {receiver.address}
        send_resolved: true
""")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.address = f"http://127.0.0.1:{self.port}"
        self._receiver, self._log = receiver, folder / "alertmanager.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [
                    *("prometheus-alertmanager", f"--config.file={folder / 'alertmanager.yml'}"),
                    *(f"--storage.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{self.port}"),
                    "--cluster.listen-address=",
                ],
                stdout=log,
                stderr=log,
            )

    def wait(self, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The first alert of a notification that fulfils `holds`."""
        end = time.monotonic() + _TIMEOUT_S
        while True:
            for notification in list(self._receiver.got):
                for alert in notification["alerts"]:
                    if holds(alert):
                        found: dict[str, Any] = alert
                        return found
            assert self._process.poll() is None, self._log.read_text()
            assert time.monotonic() < end, f"{self._receiver.got}; {self._log.read_text()[-2000:]}"
            time.sleep(0.05)  # another process notifies a thread of this one

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
