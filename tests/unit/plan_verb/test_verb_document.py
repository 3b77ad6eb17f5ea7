"""docs/plan.md shows the verb's output and has every option."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest
from verb_cases import reference

from seatrial.cli import plan
from seatrial.ui.plan_json import document
from seatrial.ui.plan_table import lines

DOCUMENT = Path(__file__).parents[3] / "docs" / "plan.md"
_BLOCK = re.compile(
    r"(```console\n\$ seatrial plan qwen2\.5-72b-b300\.toml --target 2500 --target 45%\n)(.*?)(\n```)",
    re.DOTALL,
)


def example() -> str:
    """What the command in the document prints at 100 columns."""
    return "\n".join(text for text, _ in lines(reference(), width=100))


@pytest.mark.cluster  # slow
def test_the_example_is_the_verbs_output() -> None:
    shown = _BLOCK.search(DOCUMENT.read_text(encoding="utf-8"))
    assert shown is not None
    told = example()
    assert shown[2] == told, f"run PYTHONPATH=tests python {__file__}, which writes it anew"


def test_every_option_is_documented() -> None:
    parser = argparse.ArgumentParser()
    plan.add_arguments(parser)
    options = {o for action in parser._actions for o in action.option_strings if o.startswith("--")}
    text = DOCUMENT.read_text(encoding="utf-8")
    assert sorted(o for o in options - {"--help", "--plain"} if f"`{o}" not in text) == []


@pytest.mark.cluster  # slow
def test_every_part_of_the_json_document_is_named() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert [key for key in document(reference()) if f"`{key}`" not in text] == []


if __name__ == "__main__":
    old = DOCUMENT.read_text(encoding="utf-8")
    DOCUMENT.write_text(_BLOCK.sub(lambda m: m[1] + example() + m[3], old), encoding="utf-8")
