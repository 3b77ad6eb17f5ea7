"""Which nodes have ranks, are spares, or have left the run, according to its events."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from seatrial.record.events import Event


def nodes_of(event: Event) -> list[int] | None:
    """The node of each slot, if the event starts a generation."""
    slots = (event.data or {}).get("slots")
    if event.kind == "generation_started" and isinstance(slots, dict):
        return [n for n in slots.values() if type(n) is int]
    return None


def current_nodes(events: Sequence[Event], ranks: int) -> list[int]:
    """The node of each slot in the current generation; empty if unknown, or if it does not match the number of ranks."""
    found = next((nodes for event in reversed(events) if (nodes := nodes_of(event)) is not None), [])
    return found if found and ranks % len(found) == 0 else []


class Nodes:
    """Tracks which nodes have ranks, are spares, or have left the run, from the events of a start in order."""

    def __init__(self, events: Iterable[Event]) -> None:
        self.training: list[int] = []
        self.present: set[int] = set()
        self.gone: dict[int, str] = {}  # node -> "lost", "evicted", "left"
        for event in events:
            node = event.node
            if (started := nodes_of(event)) is not None:
                self.training = sorted(started)
            elif event.kind == "node_joined" and node is not None:
                self.present.add(node)
                self.gone.pop(node, None)
            elif event.kind in ("node_lost", "node_evicted", "node_left") and node is not None:
                self.present.discard(node)
                self.gone[node] = event.kind.removeprefix("node_")

    @property
    def spares(self) -> list[int]:
        """Nodes without ranks."""
        return sorted(self.present - set(self.training))

    @property
    def text(self) -> str | None:
        """All nodes on one line; None if no generation has started."""
        if not self.training:
            return None
        training = [n for n in self.training if n not in self.gone]
        entries = [f"{len(training)} with ranks"]
        if self.spares:
            entries.append(f"spare: {_listed(self.spares)}")
        for how in ("lost", "evicted", "left"):
            nodes = [n for n, why in sorted(self.gone.items()) if why == how]
            if nodes:
                entries.append(f"{how}: {_listed(nodes)}")
        return "; ".join(entries)


def _listed(nodes: list[int], most: int = 8) -> str:
    more = len(nodes) - most
    return ", ".join(map(str, nodes[:most])) + (f" and {more} more" if more > 0 else "")
