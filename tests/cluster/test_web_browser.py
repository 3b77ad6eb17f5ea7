"""A real browser on the pages of a live run: a fault appears by itself, every page opens, and is usable by everybody."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import JOB, TIMEOUT_S, Run

CHROMIUM = shutil.which("chromium")
PAGES = (
    "now",
    "ranks",
    "step",
    "curves",
    "events",
    "checkpoints",
    "data",
    "checks",
    "scaling",
    "drills",
    "plan",
    "logs",
)

pytestmark = [
    pytest.mark.ci,
    pytest.mark.cluster,
    pytest.mark.timed,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
]


@pytest.fixture
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield found
        found.close()


class Server:
    """`seatrial watch --web` of the runs in `folder`, with any port."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "seatrial", "watch", "--web", "--port", "0"]
        self.process = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        line = self.process.stderr.readline()
        found = re.search(r"http://\S+", line)
        assert found is not None, line + self.process.stderr.read()
        self.address = found[0]

    def end(self) -> float:
        """Seconds until it has ended, after SIGTERM."""
        began = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(TIMEOUT_S)
        return time.monotonic() - began


@pytest.fixture
def serve() -> Iterator[Callable[[Path], Server]]:
    servers: list[Server] = []

    def begin(folder: Path) -> Server:
        servers.append(Server(folder))
        return servers[-1]

    yield begin
    for server in servers:
        server.process.kill()
        server.process.wait()
        assert server.process.stderr is not None
        server.process.stderr.close()


def opened(browser: Any, address: str, width: int, scheme: str, said: list[str]) -> Any:
    """A tab whose errors are added to `said`."""
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page = context.new_page()
    page.on(
        "console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None
    )
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(address)
    return page


def test_a_fault_is_on_the_page_without_reloading_it(
    folder: Path, start: Callable[..., Run], serve: Callable[[Path], Server], browser: Any
) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    (folder / "job.toml").write_text(
        JOB.replace("steps = 12", "steps = 100000").replace("every_steps = 4", "every_steps = 50")
    )
    run = start()
    run.wait_line("step ")
    server, said = serve(folder), list[str]()
    page = opened(browser, f"{server.address}#/run/small/now", 1280, "light", said)
    page.get_by_text("last step", exact=True).wait_for()
    page.evaluate("window.untouched = true")
    killed = time.monotonic()
    os.kill(run.ranks()[1], signal.SIGKILL)
    page.locator("#events").get_by_text("was killed by SIGKILL").first.wait_for(timeout=10_000)
    assert time.monotonic() - killed < 2.0
    assert page.evaluate("window.untouched")
    page.locator("#events").get_by_text("recovered", exact=True).wait_for()

    phone = opened(browser, f"{server.address}#/run/small/now", 390, "dark", said)
    for tab in (page, phone):
        for name in PAGES:
            tab.evaluate(f"location.hash = '#/run/small/{name}'")
            tab.locator("#main section, #main pre").first.wait_for()
            tab.locator(f"nav a[aria-current][href$='/{name}']").wait_for()
            assert tab.evaluate("document.documentElement.scrollWidth") <= tab.viewport_size["width"], name
            if tab is page and name not in ("now", "ranks", "step", "events"):
                continue  # the same elements, in other colours
            found = axe.run(tab).response["violations"]
            bad = [(v["id"], v["nodes"][0]["html"]) for v in found if v["impact"] in ("serious", "critical")]
            assert bad == [], (name, tab.viewport_size)
        tab.keyboard.press("r")
        tab.get_by_role("link", name="small").wait_for()
        tab.evaluate("location.hash = '#/compare?run=small'")
        tab.get_by_role("heading", name="Compare").wait_for()
    page.evaluate("location.hash = '#/run/small/now'")
    page.get_by_text("last step", exact=True).wait_for()
    page.keyboard.press("3")
    page.get_by_role("heading", name="Step", exact=True).first.wait_for()
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.keyboard.press("t")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != dark
    assert said == []

    assert server.end() < 2.0  # both tabs' streams are open
    page.locator("#top").get_by_text("server not reachable").wait_for()
    run.process.send_signal(signal.SIGINT)
    run.wait()
    run.wait_gone(5.0)
