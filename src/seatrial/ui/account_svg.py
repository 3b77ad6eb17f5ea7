"""GPU memory by kind as an SVG bar, compared with the capacity of the GPU."""

from __future__ import annotations

from xml.etree.ElementTree import Element

from seatrial.plan.search.fit import Account
from seatrial.ui import figures
from seatrial.ui.svg import WIDTH, box, framed, line, text

_SIDE, _TOP, _HEIGHT, _COLUMN = 16.0, 58.0, 34.0, 230.0

_LOOKS: dict[str, str] = {
    "weights": "kernels",
    "gradients": "schedule",
    "master weights": "extra",
    "moments": "result",
    "gathered weights": "communication",
    "whole gradients": "run",
    "activations": "recomputation",
    "logits, messages": "rest",
    "allocator, runtime": "peak",
}
# Small kinds share a colour: two kinds in one colour would be indistinguishable.
_TOGETHER = {
    "logits": "logits, messages",
    "stage messages": "logits, messages",
    "allocator": "allocator, runtime",
    "other streams": "allocator, runtime",
    "runtime": "allocator, runtime",
}


def account_svg(
    account: Account, available: float | None, *, title: str, alone: bool = True, width: float = WIDTH
) -> Element:
    """Bytes on the most loaded GPU. `available`: what one process can use there; None if the GPU is unknown.

    Raises ValueError for an account without a layout.
    """
    if account.gpu_bytes is None:
        raise ValueError("this account has no layout, and so no bytes on a GPU")
    sums: dict[str, float] = {}
    for part in account.lines:
        if part.gpu:
            together = _TOGETHER.get(part.name, part.name)
            sums[together] = sums.get(together, 0.0) + part.gpu
    shown = list(sums.items())
    most = max(account.gpu_bytes, available or 0.0) * 1.02
    scale = (width - 2 * _SIDE) / most
    parts, x = [], _SIDE
    for label, n_bytes in shown:
        hint = f"{label}: {figures.memory(n_bytes)}"
        # A gap tells neighbours apart whatever their colours.
        wide = max(0.5, n_bytes * scale - 1)
        parts.append(box(x, _TOP, wide, _HEIGHT, f"st-{_LOOKS[label]}", hint))
        x += n_bytes * scale
    if available is not None:
        at = _SIDE + available * scale
        parts.append(line([(at, _TOP - 8), (at, _TOP + _HEIGHT + 8)], "st-step"))
        parts.append(text(at, _TOP - 13, f"the GPU has {figures.memory(available)}", "st-soft st-num", "end"))
    y = _TOP + _HEIGHT + 32
    columns = int(width // _COLUMN)
    each = (width - 2 * _SIDE) / columns
    for i, (label, n_bytes) in enumerate(shown):
        left, base = _SIDE + i % columns * each, y + i // columns * 22
        parts.append(box(left, base - 10, 11, 11, f"st-{_LOOKS[label]}", "", 2))
        parts.append(text(left + 17, base, f"{label} {figures.memory(n_bytes)}", "st-soft st-num"))
    height = y + (len(shown) - 1) // columns * 22 + 16
    detail = ", ".join(f"{label} {figures.memory(n)}" for label, n in shown)
    sentence = f"One GPU needs {figures.memory(account.gpu_bytes)}: {detail}."
    return framed(
        parts, height=height, title=title, sentence=sentence, name="memory", alone=alone, width=width
    )
