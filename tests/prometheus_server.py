"""A real Prometheus for a test, on a port and a folder of its own."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

_TIMEOUT_S = 90.0


class Prometheus:
    """Scrapes the targets of `file_sd` every half second; ended by `close`."""

    def __init__(self, folder: Path, file_sd: Path, more: str = "") -> None:
        """`more`: further sections of its configuration, such as `rule_files`."""
        if shutil.which("prometheus") is None:
            pytest.skip("Prometheus is not installed")
        folder.mkdir()
        (folder / "prometheus.yml").write_text(f"""
global: {{scrape_interval: 500ms, evaluation_interval: 500ms}}
scrape_configs:
  - job_name: seatrial
    file_sd_configs:
      - files: [{file_sd}]
        refresh_interval: 1s
{more}
""")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self._log = folder / "prometheus.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [
                    *("prometheus", f"--config.file={folder / 'prometheus.yml'}"),
                    *(
                        f"--storage.tsdb.path={folder / 'data'}",
                        f"--web.listen-address=127.0.0.1:{self.port}",
                    ),
                ],
                stdout=log,
                stderr=log,
            )

    def query(self, promql: str) -> list[dict[str, Any]]:
        """The instant vector; empty before the server answers. An error of the expression fails the test."""
        address = f"http://127.0.0.1:{self.port}/api/v1/query?" + urllib.parse.urlencode({"query": promql})
        try:
            with urllib.request.urlopen(address, timeout=10) as answer:
                found = json.load(answer)
        except urllib.error.HTTPError as error:
            if error.code == 503:  # it is starting
                return []
            raise AssertionError(f"{promql}: {error.read().decode()}") from None
        except OSError:
            assert self._process.poll() is None, self._log.read_text()
            return []
        result: list[dict[str, Any]] = found["data"]["result"]
        return result

    def wait(self, promql: str, holds: Callable[[list[float]], bool] = bool) -> list[dict[str, Any]]:
        """Ask until the values of the result fulfil `holds`; the result."""
        end = time.monotonic() + _TIMEOUT_S
        while True:
            found = self.query(promql)
            if holds([float(each["value"][1]) for each in found]):
                return found
            assert time.monotonic() < end, f"{promql}: {found}; {self._log.read_text()[-2000:]}"
            time.sleep(0.2)  # what it scrapes cannot be waited for in another way

    def wait_rules(self) -> dict[str, str]:
        """Rule -> "ok" or "err", once each was evaluated."""
        end = time.monotonic() + _TIMEOUT_S
        while True:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/api/v1/rules", timeout=10) as answer:
                groups = json.load(answer)["data"]["groups"]
            health = {rule["name"]: str(rule["health"]) for group in groups for rule in group["rules"]}
            if health and "unknown" not in health.values():
                return health
            assert time.monotonic() < end, health
            time.sleep(0.2)

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
