"""A worker module whose import initialises CUDA, as far as a stand-in for torch says."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

torch = ModuleType("torch")
torch.cuda = SimpleNamespace(is_initialized=lambda: True)  # type: ignore[attr-defined]
sys.modules["torch"] = torch
