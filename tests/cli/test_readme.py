"""README and what it leads to are held to the code: commands parse, the cheap ones run, the job file loads, links lead on."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from seatrial.cli.main import VERBS, main
from seatrial.job import job_from_text, preset_text
from seatrial.record.ledger import LedgerRecord, LedgerWriter
from seatrial.record.run import open_run

ROOT = Path(__file__).parents[2]
# In the order of their commands, of which some need what others wrote.
DOCUMENTS = [
    ROOT / name for name in ("docs/tutorial.md", "README.md", "docs/commands.md", "docs/training.md")
]
MAKEFILE = ROOT / "Makefile"


@dataclass(frozen=True)
class Block:
    """A fenced block: its language and its lines."""

    language: str
    lines: tuple[str, ...]


def blocks(*paths: Path) -> list[Block]:
    text = "".join(path.read_text(encoding="utf-8") for path in paths or DOCUMENTS)
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [Block(language, tuple(text.splitlines())) for language, text in found]


def shell_lines() -> Iterator[tuple[str, tuple[str, ...]]]:
    """(command, the output that is shown for it) of each command in the documents."""
    for block in blocks():
        if block.language == "sh":
            yield from ((line, ()) for line in block.lines if line.strip())
        elif block.language == "console":
            starts = [i for i, line in enumerate(block.lines) if line.startswith("$ ")]
            assert starts, f"a console block without a command: {block.lines[:2]}"
            for start, end in zip(starts, [*starts[1:], len(block.lines)], strict=True):
                yield block.lines[start].removeprefix("$ "), block.lines[start + 1 : end]


def words(command: str) -> list[str]:
    return shlex.split(command, comments=True)


SHELL = list(shell_lines())
COMMANDS = [(words(c)[1:], shown) for c, shown in SHELL if words(c)[0] == "seatrial"]


def parse(arguments: list[str]) -> argparse.Namespace:
    """What the verb makes of its arguments; SystemExit where it would refuse them."""
    verb, *rest = arguments
    assert verb in VERBS, f"no verb {verb}"
    module: Any = importlib.import_module(VERBS[verb][0])
    parser = argparse.ArgumentParser(prog=f"seatrial {verb}", allow_abbrev=False)
    module.add_arguments(parser)
    with contextlib.suppress(argparse.ArgumentError):
        parser.add_argument("--json", action="store_true")
    return parser.parse_args(rest)


CHEAP = {
    "init",
    "schema",
    "validate",
    "plan",
    "data",
    "ls",
    "watch",
    "logs",
    "verify",
    "checkpoints",
    "completion",
}


def is_cheap(arguments: list[str]) -> bool:
    """Whether it starts no ranks and loads no torch."""
    verb = arguments[0]
    return verb in CHEAP or (verb == "train" and "--render" in arguments)


def makefile_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):(?!=)", MAKEFILE.read_text(encoding="utf-8"), re.MULTILINE))


def test_the_documents_show_every_verb_at_work() -> None:
    assert {arguments[0] for arguments, _ in COMMANDS} == set(VERBS)


@pytest.mark.parametrize("arguments", [a for a, _ in COMMANDS], ids=" ".join)
def test_a_command_parses(arguments: list[str]) -> None:
    parse(arguments)


def test_the_cheap_commands_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.txt").write_text("a text of the corpus\n")
    (tmp_path / "corpus" / "b.jsonl").write_text('{"text": "another one"}\n')
    # What `watch`, `logs`, `verify` and `checkpoints` look at: the folder of a run that has done one step.
    with open_run(job_from_text(preset_text("first-voyage"), name="preset", base_folder=tmp_path)) as run:
        ledger = LedgerWriter(run.folder)
        ledger.write(LedgerRecord(1, 0, 32, 1))
        ledger.close()
        log = run.folder.rank_log(run.generation, 0, 3)
        log.parent.mkdir(parents=True)
        log.write_text("a line of rank 3\n")
    ran = []
    for arguments, _ in COMMANDS:
        if is_cheap(arguments):
            code = main(arguments)
            out, err = capsys.readouterr()
            assert code == 0, f"seatrial {' '.join(arguments)}: exit {code}\n{out}{err}"
            ran.append(arguments[0])
    assert set(ran) == {*CHEAP, "train"}
    assert (tmp_path / "data" / "tokens" / "manifest.json").is_file()


def test_an_error_is_shown_with_its_own_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "first-voyage.toml").write_text(preset_text("first-voyage"))
    shown_errors = [(a, shown) for a, shown in COMMANDS if any(": error: " in line for line in shown)]
    assert shown_errors
    for arguments, shown in shown_errors:
        assert main(arguments) == 2
        assert capsys.readouterr().err.splitlines() == list(shown), (
            "the tutorial shows another text: paste this one"
        )


def test_the_job_file_of_the_tutorial_is_the_first_voyage(tmp_path: Path) -> None:
    whole = [b for b in blocks() if b.language == "toml" and b.lines[0].startswith("name")]
    assert len(whole) == 1
    shown = job_from_text("\n".join(whole[0].lines), name="tutorial", base_folder=tmp_path)
    preset = job_from_text(preset_text("first-voyage"), name="preset", base_folder=tmp_path)
    assert shown.to_toml() == preset.to_toml()


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_make_targets_exist(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    code = "\n".join(
        [*re.findall(r"`([^`\n]+)`", text), *("\n".join(b.lines) for b in blocks(ROOT / document))]
    )
    named = set(re.findall(r"^make ([a-z-]+)", code, re.MULTILINE))
    assert {"train", "test"} <= named <= makefile_targets()


def test_the_makefiles_own_commands_parse() -> None:
    recipes = re.findall(r"^\t\$\(BIN\)/seatrial (.+)$", MAKEFILE.read_text(encoding="utf-8"), re.MULTILINE)
    assert recipes
    for recipe in recipes:
        parse(words(recipe))


def test_torchruns_target_is_the_worker() -> None:
    """Without starting it: the module exists, and its options are those that the documents give."""
    lines = [words(c) for c, _ in SHELL if words(c)[0] == "torchrun"]
    assert lines
    for line in lines:
        module = line[line.index("-m") + 1]
        source = (ROOT / "src" / Path(*module.split("."))).with_suffix(".py").read_text(encoding="utf-8")
        for option in line[line.index("-m") + 2 :]:
            if option.startswith("--"):
                assert f'"{option}"' in source


def test_links_lead_somewhere() -> None:
    for document in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        name = document.name
        for target, anchor in re.findall(
            r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", document.read_text(encoding="utf-8")
        ):
            path = document.parent / target if target else document
            assert path.exists(), f"{name}: {target}"
            if anchor:
                assert anchor in _anchors(path), f"{name}: {target}#{anchor}"


def _anchors(path: Path) -> set[str]:
    """GitHub's anchors of a document's headings."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150
