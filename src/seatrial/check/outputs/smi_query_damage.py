"""Detect damage in the `nvidia-smi -q` output of a GPU: malformed or missing values."""

from __future__ import annotations

import re
from collections.abc import Iterator

from seatrial.check.outputs.smi_query import Gpu, Value

ERRORS = ("ERR!", "Unknown Error", "[Unknown Error]", "GPU is lost", "[GPU is lost]", "Error")
NEEDS_RESET = ("GPU requires reset", "[GPU requires reset]")
REASONS = ("clocks_event_reasons", "clocks_throttle_reasons")
# Valid forms of the values that are judged; anything else is damage, and damage prevents a PASS.
_FORMS = (
    (
        re.compile(
            r"(remapped_rows|retired_pages|gpu_reset_status)\..*(pending|failure|required|recommended|blacklist).*"
        ),
        re.compile(r"Yes|No"),
    ),
    (re.compile(r"(.*\.)?sram_threshold_exceeded"), re.compile(r"Yes|No")),
    (re.compile(r"ecc_errors\.(unrepairable_memory|(channel|tpc)_repair_pending)"), re.compile(r"Yes|No")),
    (re.compile(r"clocks_(event|throttle)_reasons\..*"), re.compile(r"(Not )?Active|[0-9]+ us")),
    (re.compile(r"ecc_errors\.(volatile|aggregate)\.(?!sram_threshold).*"), re.compile(r"[0-9]+")),
    (re.compile(r"retired_pages\..*(bit_ecc|retired_count)"), re.compile(r"[0-9]+")),
    (re.compile(r"remapped_rows\..*(error|corr|unc)"), re.compile(r"[0-9]+")),
    (re.compile(r"remapped_rows\..*histogram\..*"), re.compile(r"[0-9]+(?: bank\(s\))?")),
    (re.compile(r"pci\..*(width|gen)[^.]*\.[^.]*"), re.compile(r"[0-9]+x?")),
)
_NO_VALUE = (
    "N/A",
    "[N/A]",
    "Not Supported",
    "[Not Supported]",
    "Not Available",
    "Requested functionality has been deprecated",
    "",
)
# Sections that the whole output has for every GPU in all known versions; without them it is damaged.
_REQUIRED = ("ecc_errors", "retired_pages", "pci", "performance_state")
# Section -> required values: a section with any value must have all of these.
# Each line lists the names of one value, by text or XML and by version.
_SECTIONS: tuple[tuple[str, tuple[tuple[str, ...], ...]], ...] = (
    ("fabric", (("state",), ("status",))),
    (
        "remapped_rows",
        (
            ("uncorrectable_error", "remapped_row_unc"),
            ("pending", "remapped_row_pending"),
            ("remapping_failure_occurred", "remapped_row_failure"),
        ),
    ),
    (
        "retired_pages",
        (
            ("single_bit_ecc", "multiple_single_bit_retirement.retired_count"),
            ("double_bit_ecc", "double_bit_retirement.retired_count"),
            ("pending_page_blacklist", "pending_blacklist", "pending_retirement"),
        ),
    ),
    (
        "ecc_errors",
        (
            (
                "volatile.dram_uncorrectable",
                "volatile.double_bit.total",
                "volatile.double_bit.device_memory",
                "volatile",
            ),
            (
                "aggregate.dram_uncorrectable",
                "aggregate.double_bit.total",
                "aggregate.double_bit.device_memory",
                "aggregate",
            ),
        ),
    ),
    *(
        (section, (("idle", f"{reason}_gpu_idle"), ("hw_slowdown", f"{reason}_hw_slowdown")))
        for section, reason in (
            ("clocks_event_reasons", "clocks_event_reason"),
            ("clocks_throttle_reasons", "clocks_throttle_reason"),
        )
    ),
)
_JUDGED = (
    *(section for section, _ in _SECTIONS),
    "ecc_mode",
    "pci",
    "gpu_reset_status",
    "gpu_recovery_action",
)


def malformed(gpu: Gpu) -> Iterator[tuple[str, Value]]:
    """Values not in nvidia-smi's format, each with a description."""
    for key, value in gpu.values.items():
        if value.text in (*_NO_VALUE, *ERRORS, *NEEDS_RESET):
            continue
        form = next((f for path, f in _FORMS if path.fullmatch(key)), None)
        if form is not None and not form.fullmatch(value.text):
            yield f"{key} is {value.text[:40]!r}, which is not a valid nvidia-smi value", value


def damage(gpu: Gpu, whole: bool) -> Iterator[tuple[str, Value | None]]:
    """What is malformed or missing, and its value if any; `whole`: all sections are printed, not a selection by -d."""
    yield from malformed(gpu)
    missing = [
        f"{section}.{names[0]}"
        for section, values in _SECTIONS
        if any(True for _ in gpu.below(section))
        for names in values
        if not any(f"{section}.{name}" in gpu.values for name in names)
    ]
    if whole:
        missing += [section for section in _REQUIRED if section not in gpu.sections]
        if not any(r in gpu.sections for r in REASONS):
            missing.append(REASONS[0])
    if missing:
        yield f"the output has no {missing[0]}", None
    elif not any(v.text not in _NO_VALUE for v in gpu.values.values()):
        yield "the output has no value for this GPU", None
    elif not gpu.sections & set(_JUDGED):
        yield "none of the sections that are judged is in the output", None
