"""NVIDIA's management library, by the package nvidia-ml-py. No failed query is an error: its value is None.

NVML hangs when the driver hangs, so it is only used in processes that may be killed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

Ask = Callable[..., Any]  # `Library.ask`

CLOCK_SM = 1  # NVML_CLOCK_SM


class Library:
    """The initialised library. Raises OSError with the reason if it cannot be initialised."""

    def __init__(self) -> None:
        try:
            self.module: Any = importlib.import_module("pynvml")
        except ImportError:
            raise OSError("the package nvidia-ml-py is not installed") from None
        try:
            self.module.nvmlInit()
        except self.module.NVMLError as error:
            raise OSError(f"NVML: {error}") from None

    def ask(self, name: str, *arguments: Any) -> Any:
        """Call a function of the library; None if it fails or does not exist."""
        try:
            return getattr(self.module, name)(*arguments)
        except (self.module.NVMLError, AttributeError, TypeError):
            return None  # TypeError: in another version of the package the function takes other arguments


def clock_reasons(ask: Ask, handle: Any) -> int | None:
    """Why the clocks of a GPU are not higher: the bits of nvmlClocksEventReasons."""
    value = ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
    if value is None:  # older packages
        value = ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
    return None if value is None else int(value)
