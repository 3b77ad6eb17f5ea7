"""A run on conversations and text: what counts, and the same after a kill."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import ONE_NODE, Run, records, seatrial

sys.path.insert(0, str(Path(__file__).parents[1] / "unit/data"))
from chat_cases import MARKED, rows, write_lines, write_tokenizer

pytestmark = [pytest.mark.cluster, pytest.mark.ci]


@pytest.fixture
def chats(folder: Path) -> Path:
    """The small job on conversations, blended with text."""
    write_tokenizer(folder / "tokenizer", MARKED)
    write_lines(folder / "chats.jsonl", rows(1, 400))
    sources = (
        'train = ["corpus", "chats.jsonl"]\nweights = [0.3, 0.7]\ntokenizer = "tokenizer/tokenizer.json"'
    )
    text = ONE_NODE.replace('train = "corpus"', sources).replace("vocab_size = 264", "vocab_size = 400")
    (folder / "job.toml").write_text(text)
    return folder


def steps(folder: Path) -> list[tuple[float, float, int]]:
    found = {r["step"]: r for r in records(folder / "runs/small/metrics.jsonl")}
    assert sorted(found) == list(range(1, 13))
    return [(r["loss"], r["grad_norm"], r["loss_tokens"]) for _, r in sorted(found.items())]


def test_a_killed_run_goes_on_with_the_same_masks(chats: Path, start: Callable[..., Run]) -> None:
    code, _, err = start().wait()
    assert code == 0, err
    undisturbed = steps(chats)
    assert len({n for _, _, n in undisturbed}) > 6
    assert all(0 < n < 8 * 32 for _, _, n in undisturbed)
    refused = seatrial(chats, "train", "job.toml", "--plain", "--set", "data.loss=all")
    assert refused.returncode == 2
    assert "data.loss" in refused.stderr
    run = start("--fresh")
    run.wait_line("step   4/12")
    for pid in run.ranks().values():
        os.kill(pid, signal.SIGKILL)
    code, _, err = run.wait()
    assert code == 0, err
    assert steps(chats) == undisturbed
