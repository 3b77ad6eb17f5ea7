"""transformers, once for all tests of this folder."""

from __future__ import annotations

import pytest
from model_cases import Oracle


@pytest.fixture(scope="session")
def oracle() -> Oracle:
    return Oracle()
