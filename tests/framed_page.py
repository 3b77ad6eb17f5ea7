"""A page in a frame of a real browser, as narrow as a telephone."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

CHROMIUM = shutil.which("chromium")


def framed(page: Path, width: int, folder: Path) -> tuple[int, int, int]:
    """The page's whole width, its pictures and its scripts, in a frame: a window of chromium cannot be narrower than 500 px.

    `folder` takes the frame and the browser's profile.
    """
    assert CHROMIUM is not None
    frame = folder / "frame.html"
    frame.write_text(
        f'<iframe id="f" src="{page.as_uri()}" width="{width}" height="900"></iframe><pre id="o"></pre><script>'
        "onload=()=>{const d=f.contentDocument,e=d.documentElement;"
        "o.textContent='WIDTH '+e.scrollWidth+' '+d.images.length+' '+d.scripts.length}</script>"
    )
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
    command += [
        f"--user-data-dir={folder / 'profile'}",
        "--virtual-time-budget=2000",
        "--dump-dom",
        frame.as_uri(),
    ]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    printed = next(line for line in found.stdout.split("<") if "WIDTH" in line).split("WIDTH ")[1].split()
    whole, images, scripts = map(int, printed)
    return whole, images, scripts
