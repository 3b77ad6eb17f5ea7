"""A process that tokenises the parts it is given: `python -m seatrial.data.part_worker`, started by `pool.py`.

A separate program, not a fork of the calling process: that may have threads, and a main module that must not be
run again.
"""

from __future__ import annotations

import argparse
import select
import signal
import sys
from pathlib import Path
from typing import Any

from seatrial.base.errors import InputError
from seatrial.base.lines import Channel
from seatrial.base.process import die_with_parent
from seatrial.data.parts import Part
from seatrial.data.readers import Reader
from seatrial.data.tokenise import tokenise_part
from seatrial.data.tokenizer import digest_with_template, load_tokenizer


def main() -> int:
    """Process orders from the channel until it closes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--channel", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    args = parser.parse_args()
    die_with_parent(args.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent, which ends us
    channel = Channel.from_fd(args.channel)
    worker: _Worker | None = None
    while not channel.closed:
        select.select([channel], [], [])
        for order in channel.receive():
            if worker is None:
                worker = _Worker(channel, order)
            else:
                worker.do(order)
    return 0


class _Worker:
    def __init__(self, channel: Channel, about: dict[str, Any]) -> None:
        self._channel = channel
        self._folder = Path(about["folder"])
        try:
            self._tokenizer = load_tokenizer(about["tokenizer"])
        except InputError as error:
            channel.send({"failed": error.message})
            raise SystemExit(2) from error
        if digest_with_template(self._tokenizer) != about["tokenizer_digest"]:
            channel.send({"failed": f"the tokenizer {about['tokenizer']} was changed in the meantime"})
            raise SystemExit(2)
        self._reader = Reader(
            about["text_key"], self._folder, about["piece_bytes"], chat=self._tokenizer.chat
        )

    def do(self, order: dict[str, Any]) -> None:
        part = Part.from_json(order["part"])

        def progress(done: int, name: str) -> None:
            self._channel.send({"number": part.number, "done": done, "name": name})

        try:
            result = tokenise_part(
                part,
                self._reader,
                self._tokenizer,
                self._folder,
                progress,
                only_check=order["only_check"],
            )
        except OSError as error:
            self._channel.send({"failed": str(error.strerror or error), "errno": error.errno})
            return
        self._channel.send({"number": part.number, "result": result.as_json()})


if __name__ == "__main__":
    sys.exit(main())
