"""Which hosts are present: their agents reply to the conductor, and the other hosts reach them over the network.

Called before every round, so that no host measures with an unreachable one: a rank would only wait for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from seatrial.check.live import messages as msg
from seatrial.check.live.agent_pool import AgentPool
from seatrial.check.live.hosts import Host
from seatrial.check.live.reach import cut_off, partners

_REACH_S = 3.0  # for a TCP connection to be established; the kernel retries after 1 s
_TWICE = 2  # absent this often in a row, a host is not called again: it has been reported as gone
_FEWEST = 3  # of two hosts it is undecidable which one is cut off


class PresenceCheck:
    """Presence checks. `silent`: hosts whose agents did not reply, and why; `cut_off`: times without connection."""

    def __init__(self, agent_pool: AgentPool, hosts: Sequence[Host], hello: Mapping[int, msg.Hello]) -> None:
        self.agent_pool, self.hosts, self.hello = agent_pool, hosts, hello
        self.silent: dict[int, str] = {}
        self.cut_off: Counter[int] = Counter()
        self._absent: Counter[int] = Counter()  # times in a row

    def absent(self, *, network: bool = True) -> set[int]:
        """The absent hosts, of all that were ever present. Without `network` only whether agents reply counts."""
        which = [n for n in self.hello if self._absent[n] < _TWICE]
        tries = partners(which) if network and len(which) >= _FEWEST else {n: [] for n in which}
        orders = {
            (n, 0): msg.Reach([msg.Endpoint(self.hosts[m].address, self.hello[m].port) for m in others])
            for n, others in tries.items()
        }
        replies = self.agent_pool.ask(orders, limit_s=_REACH_S)
        reached = []
        for n in which:
            reply = replies[n, 0]
            if not reply.alive:
                self.silent[n] = reply.problem
            elif reply.value is not None:
                reached += [(n, m) for m, yes in zip(tries[n], reply.value.reached, strict=True) if yes]
        present = [n for n in which if replies[n, 0].alive]
        lost = cut_off(present, reached) if any(tries.values()) else set()
        self.cut_off.update(lost)
        absent = lost | {n for n in which if n not in present} | self.gone
        for n in which:
            self._absent[n] = self._absent[n] + 1 if n in absent else 0
        return absent

    @property
    def gone(self) -> set[int]:
        """Hosts that were absent too often to be called again."""
        return {n for n, times in self._absent.items() if times >= _TWICE}

    def add_silent(self, silent: Mapping[int, str]) -> None:
        """Record hosts whose agents did not reply to another order."""
        self.silent |= silent

    def names(self, which: Iterable[int]) -> list[str]:
        """The names of these hosts."""
        return [self.hosts[n].name for n in which]
