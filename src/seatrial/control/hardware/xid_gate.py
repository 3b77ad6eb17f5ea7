"""Turn driver messages into signals: a fault reported in many lines and by two sources is one signal. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from seatrial.control.machine.policy import rule_for, signal_of_xid
from seatrial.hardware.xid import XidMessage

Source = Literal["kernel log", "NVML"]

# An uncorrectable memory error (48) is followed by a code that shows whether it was contained (94) or not (64, 95,
# 140), within milliseconds in every log seen. It is held back this long to wait for that code.
HOLD_S = 1.0
# NVML gives the code without the text, and so without severity. It counts only if the kernel log stays silent.
NVML_HOLD_S = 2.0
COMPANION_S = 10.0  # codes of one GPU that are this close together belong together
# The same signal from the same place within this time is the same fault. Merely recorded ones may repeat forever.
BURST_S = 5.0
RECORD_BURST_S = 60.0


@dataclass(frozen=True)
class GatedSignal:
    """A signal to emit: its message, the other codes of that GPU, the source, and the repeats suppressed before it."""

    signal: str
    message: XidMessage
    other_codes: tuple[int, ...]
    source: Source
    swallowed: int


@dataclass
class _Waiting:
    due: float
    message: XidMessage
    source: Source


class XidGate:
    """Takes messages as they arrive and emits each fault once."""

    def __init__(self) -> None:
        self._waiting: list[_Waiting] = []
        self._seen: defaultdict[str, list[tuple[float, int, Source]]] = defaultdict(list)
        self._given: dict[tuple[str, str], float] = {}
        self._swallowed: defaultdict[tuple[str, str], int] = defaultdict(int)

    def add(self, message: XidMessage, source: Source, now: float, *, log_readable: bool = True) -> None:
        """Add a message; `log_readable`: whether the kernel log can be read, so that NVML has to wait for it."""
        if message.kind == "xid":
            history = [h for h in self._seen[message.pci] if now - h[0] <= COMPANION_S]
            in_log = any(code == message.code and who == "kernel log" for _, code, who in history)
            self._seen[message.pci] = [*history, (now, message.code, source)]
            if source == "NVML" and in_log:
                return
            if source == "kernel log":
                self._waiting = [
                    w for w in self._waiting if w.source != "NVML" or not _same(w.message, message)
                ]
        hold = HOLD_S if message.kind == "xid" and message.code == 48 else 0.0
        if source == "NVML" and log_readable:
            hold = max(hold, NVML_HOLD_S)
        self._waiting.append(_Waiting(now + hold, message, source))

    def due(self, now: float) -> list[GatedSignal]:
        """The signals that are due."""
        ready = [w for w in self._waiting if w.due <= now]
        self._waiting = [w for w in self._waiting if w.due > now]
        return list(self._emit(ready, now))

    @property
    def deadline(self) -> float | None:
        """When `due` will have something; None if nothing waits."""
        return min((w.due for w in self._waiting), default=None)

    def _emit(self, ready: Iterable[_Waiting], now: float) -> Iterable[GatedSignal]:
        for waiting in ready:
            message = waiting.message
            other_codes = self._other_codes(message, now)
            signal = signal_of_xid(message, other_codes)
            key = (signal, message.pci)
            quiet = RECORD_BURST_S if rule_for(signal).action in ("ignore", "record") else BURST_S
            if key in self._given and now - self._given[key] < quiet:
                self._swallowed[key] += 1
                continue
            self._given[key] = now
            yield GatedSignal(signal, message, other_codes, waiting.source, self._swallowed.pop(key, 0))

    def _other_codes(self, message: XidMessage, now: float) -> tuple[int, ...]:
        if message.kind != "xid":
            return ()
        recent = {code for when, code, _ in self._seen[message.pci] if now - when <= COMPANION_S}
        return tuple(sorted(recent - {message.code}))


def _same(one: XidMessage, other: XidMessage) -> bool:
    return (one.kind, one.pci, one.code) == (other.kind, other.pci, other.code)
