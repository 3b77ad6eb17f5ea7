"""transformers, once for all tests of this folder; and the families of examples/, which are compared with it too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from model_cases import Oracle

from installed import install_examples


@pytest.fixture(scope="session")
def oracle() -> Oracle:
    return Oracle()


@pytest.fixture(scope="module", autouse=True)
def _examples(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        install_examples(tmp_path_factory.mktemp("site"), patch)
        yield
