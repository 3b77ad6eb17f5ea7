"""Receivers of alerts: a command, a webhook, an Alertmanager.

`send` raises Undelivered. Its reason never contains the address of a webhook, which is a secret.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from seatrial.base.files import read_text
from seatrial.job.schema import WatchSection
from seatrial.record.alerting import Alert
from seatrial.watch.alerts import notice

TIMEOUT_S = 10.0
_COMMAND_S = 30.0
REFRESH_S = 60.0  # between two messages to Alertmanager about a firing alert
_LASTS_S = 4 * REFRESH_S  # Alertmanager expires alerts that are not refreshed for so long


class Undelivered(Exception):
    """Delivery failed; a retry may succeed."""


class Receiver(Protocol):
    """Something that alerts are delivered to."""

    name: str
    refresh_s: float | None  # interval for resending firing alerts; None: send once

    def send(self, alert: Alert, now: float) -> None:
        """Deliver one alert. Raises Undelivered."""


class Command:
    """A program of the user, run without a shell."""

    name = "command"
    refresh_s: float | None = None

    def __init__(self, argv: Sequence[str], run: str) -> None:
        self._argv, self._run = list(argv), run

    def send(self, alert: Alert, now: float) -> None:
        environment = os.environ | notice.environment(alert, self._run)
        document = json.dumps(notice.document(alert, self._run)).encode()
        try:
            process = subprocess.Popen(
                self._argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            raise Undelivered(f"{self._argv[0]}: {getattr(error, 'strerror', None) or error}") from None
        try:
            process.communicate(document, _COMMAND_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # not reaped yet, so this is still its group
            process.wait()
            raise Undelivered(f"{self._argv[0]} took longer than {_COMMAND_S:.0f} s") from None
        if process.returncode != 0:
            raise Undelivered(f"{self._argv[0]} ended with exit code {process.returncode}")


class Webhook:
    """A URL that accepts JSON, such as a Slack incoming webhook. Read again for each alert, so that it can be replaced."""

    name = "webhook"
    refresh_s: float | None = None

    def __init__(self, address: Callable[[], str], run: str) -> None:
        """`address` returns the URL, or raises Undelivered."""
        self._address, self._run = address, run

    def send(self, alert: Alert, now: float) -> None:
        _post(self._address(), notice.webhook_body(alert, self._run))


class Alertmanager:
    """Prometheus Alertmanager, API v2."""

    name = "alertmanager"
    refresh_s: float | None = REFRESH_S

    def __init__(self, address: str, run: str) -> None:
        self._address, self._run = address.rstrip("/") + "/api/v2/alerts", run

    def send(self, alert: Alert, now: float) -> None:
        _post(self._address, notice.alertmanager_body(alert, self._run, now, _LASTS_S))


def receivers(watch: WatchSection, run: str, environment: Mapping[str, str]) -> list[Receiver]:
    """The receivers that a job configures."""
    found: list[Receiver] = []
    if watch.alert_command is not None:
        found.append(Command(watch.alert_command, run))
    file, variable = watch.alert_webhook_file, watch.alert_webhook_env
    if file is not None:
        found.append(Webhook(lambda: _from_file(Path(file)), run))
    if variable is not None:
        found.append(Webhook(lambda: _from_environment(variable, environment), run))
    if watch.alertmanager is not None:
        found.append(Alertmanager(watch.alertmanager, run))
    return found


def _from_file(path: Path) -> str:
    try:
        address = (read_text(path, links=True).strip().splitlines() or [""])[0]
    except (OSError, ValueError) as error:
        raise Undelivered(f"{path}: {getattr(error, 'strerror', None) or 'cannot be read'}") from None
    if not address:
        raise Undelivered(f"{path} is empty")
    return address


def _from_environment(name: str, environment: Mapping[str, str]) -> str:
    if not environment.get(name):
        raise Undelivered(f"the environment variable {name} is not set where the coordinator's agent runs")
    return environment[name]


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirected POST would become a GET."""

    def redirect_request(self, *arguments: Any, **more: Any) -> None:
        return None


def _post(address: str, body: bytes) -> None:
    headers = {"Content-Type": "application/json", "User-Agent": "seatrial"}
    try:
        if not address.startswith(("http://", "https://")):
            raise ValueError
        request = urllib.request.Request(address, body, headers, method="POST")
        with urllib.request.build_opener(_NoRedirects).open(request, timeout=TIMEOUT_S) as answer:
            answer.read(1 << 16)
    except urllib.error.HTTPError as error:
        error.close()
        raise Undelivered(f"answered with HTTP status {error.code}") from None
    except urllib.error.URLError as error:
        reason = error.reason
        known = reason.strerror if isinstance(reason, OSError) else None
        raise Undelivered(f"not reached: {known or type(reason).__name__}") from None
    except (OSError, http.client.HTTPException) as error:  # the exception's text may contain the address
        known = error.strerror if isinstance(error, OSError) else None
        raise Undelivered(f"not reached: {known or type(error).__name__}") from None
    except ValueError:
        raise Undelivered("its address is not a valid HTTP address") from None
