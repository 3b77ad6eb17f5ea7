"""An agent for hang_ranks.py: starts ranks, talks to their supervisor clients, and looks at their processes."""

from __future__ import annotations

import json
import os
import secrets
import select
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from rank_specs import rank_spec
from seatrial.base.lines import Channel
from seatrial.control.hangs.blame import Blame, Sighting, find_blame
from seatrial.control.hangs.evidence import Evidence, Observation
from seatrial.job.layout import Layout
from seatrial.record import messages as msg

TIMEOUT_S = 60.0
# Longer than an supervisor client takes to answer, shorter than anybody would wait.
ANSWER_S = 0.5


class Forker:
    """hang_ranks.py, which imports torch once for all tests."""

    def __init__(self) -> None:
        script = Path(__file__).with_name("hang_ranks.py")
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(script)],
            stdin=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_FR_BUFFER_SIZE": "2000"},
        )

    def order(self, values: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(values) + "\n")
        self.process.stdin.flush()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(TIMEOUT_S) == 0


class RankAgent:
    """The agent of all ranks of one test. Times out with an AssertionError instead of waiting for ever."""

    def __init__(self, forker: Forker, folder: Path, plan: dict[str, Any]) -> None:
        self.forker = forker
        self.folder = folder
        self.plan = plan
        self.layout = Layout(**plan["layout"])
        self.name = f"seatrial-test-{os.getpid()}-{secrets.token_hex(4)}"
        self.server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.server.bind("\0" + self.name)
        self.server.listen(64)
        self.pids: dict[int, int] = {}
        self.said: dict[int, list[dict[str, Any]]] = defaultdict(list)  # not yet taken by a test
        self.channels: dict[int, Channel] = {}
        self._tokens: dict[str, int] = {}
        self._selector = selectors.DefaultSelector()
        self._dumps = 0

    def log(self, rank: int) -> Path:
        return self.folder / f"rank{rank}.log"

    def fork(self, *ranks: int) -> None:
        """Start these ranks, and wait until their supervisor clients have said hello."""
        for rank in ranks:
            token = secrets.token_hex(4)
            self._tokens[token] = rank
            env = {"SEATRIAL_SUPERVISOR": self.name, "SEATRIAL_SUPERVISOR_TOKEN": token}
            fault = self.plan.get("fault")
            plan = {**self.plan, "fault": fault if fault and fault["rank"] == rank else None}
            self.forker.order({"rank": rank, "log": str(self.log(rank)), "env": env, "plan": plan})
        self.server.settimeout(TIMEOUT_S)
        for _ in ranks:
            channel = Channel(self.server.accept()[0])
            hello = self._first(channel)["hello"]
            rank = self._tokens[hello["token"]]
            self.pids[rank], self.channels[rank] = hello["pid"], channel
            self._selector.register(channel, selectors.EVENT_READ, rank)

    @staticmethod
    def _first(channel: Channel) -> dict[str, Any]:
        with selectors.DefaultSelector() as waiting:
            waiting.register(channel, selectors.EVENT_READ)
            while not (messages := channel.receive()):
                assert waiting.select(TIMEOUT_S), "a rank said nothing"
        return messages[0]

    def start_generation(self, generation: int) -> None:
        """All ranks begin `generation`, in a world with a new port."""
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        self.send(rank_spec(generation, master_port=port), *self.channels)

    def send(self, message: msg.ToRank, *ranks: int) -> None:
        for rank in ranks:
            self.channels[rank].send(msg.encode(message))

    def _listen(self, timeout_s: float) -> bool:
        """Hear what comes within `timeout_s`; whether anything did."""
        ready = self._selector.select(timeout_s)
        for key, _ in ready:
            channel, rank = self.channels[key.data], key.data
            self.said[rank] += channel.receive()
            if channel.closed:
                self._selector.unregister(channel)
                channel.close()
                del self.channels[rank]
        return bool(ready)

    def hear(self, kind: str, *ranks: int, within_s: float = TIMEOUT_S) -> dict[int, Any]:
        """The next message of `kind` from each of `ranks`; those that do not send one in time are missing."""
        end = time.monotonic() + within_s
        found: dict[int, Any] = {}
        while True:
            for rank in set(ranks) - set(found):
                for message in self.said[rank]:
                    if kind in message:
                        found[rank] = message[kind]
                        self.said[rank].remove(message)
                        break
            left = end - time.monotonic()
            if len(found) == len(ranks) or left <= 0:
                return found
            self._listen(left)

    def dump(self, within_s: float = TIMEOUT_S) -> dict[int, dict[str, Any]]:
        """The answers of those that answer in time."""
        self._dumps += 1
        self.send(msg.AskDump(self._dumps), *self.channels)
        end = time.monotonic() + within_s
        found: dict[int, dict[str, Any]] = {}
        for rank in list(self.channels):
            while rank not in found:
                heard = self.hear("dump", rank, within_s=max(0.0, end - time.monotonic()))
                if not heard:
                    break
                if heard[rank]["id"] == self._dumps:
                    found[rank] = heard[rank]
        return found

    def settled(self, *culprits: int) -> dict[int, dict[str, Any]]:
        """Dumps of a run that has come to rest: twice the same from all that can still move."""
        end = time.monotonic() + TIMEOUT_S
        others = [r for r in self.channels if r not in culprits]
        before: Any = None
        while time.monotonic() < end:
            answers = self.dump(within_s=ANSWER_S)
            now = {
                r: (
                    answers[r]["at"],
                    [(g["group"], g["last"], len(g["pending"])) for g in answers[r]["flight"]],
                )
                for r in others
                if r in answers
            }
            if len(now) == len(others) and now == before:
                return answers
            before = now
            self._listen(0.1)
        raise AssertionError(f"the ranks do not come to rest: {before}")

    def look(self, *ranks: int) -> dict[int, Evidence]:
        looks = {r: Observation(self.pids[r], self.log(r)) for r in ranks}
        self.hear("nothing", 0, within_s=0.3)  # CPU time is counted in hundredths of a second
        return {r: look.end() for r, look in looks.items()}

    def blame(self, *culprits: int) -> Blame:
        """What an agent and a coordinator would find."""
        answers = self.settled(*culprits)
        silent = [r for r in self.pids if r not in answers]
        evidence = self.look(*silent)
        seen = [Sighting(r, answers.get(r), evidence.get(r)) for r in self.pids]
        # As it arrives at the coordinator.
        seen = json.loads(json.dumps([[s.rank, s.answer, s.evidence and s.evidence.as_dict()] for s in seen]))
        return find_blame([Sighting(r, a, e and Evidence.from_dict(e)) for r, a, e in seen], self.layout)

    def kill(self, rank: int) -> None:
        """kill -9; then its channel closes."""
        os.kill(self.pids[rank], signal.SIGKILL)
        while rank in self.channels:
            assert self._listen(TIMEOUT_S)
        del self.pids[rank]

    def leave(self) -> None:
        """Be gone, as far as the ranks can tell."""
        for channel in self.channels.values():
            self._selector.unregister(channel)
            channel.close()
        self.channels.clear()
        self.pids.clear()

    def close(self) -> None:
        """Nothing of the test lives on."""
        handles = [os.pidfd_open(pid) for pid in self.pids.values()]
        for pid in self.pids.values():
            os.kill(pid, signal.SIGKILL)
        for handle in handles:
            assert select.select([handle], [], [], TIMEOUT_S)[0]
            os.close(handle)
        for channel in self.channels.values():
            channel.close()
        self._selector.close()
        self.server.close()
