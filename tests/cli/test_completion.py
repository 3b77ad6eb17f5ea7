"""`seatrial completion`, in the shells themselves."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from seatrial.cli.main import VERBS, main

# What is typed -> what is offered. The folder has j.toml, k.txt, sub/x.toml, runs/alpha and "runs/be ta".
OFFERED = {
    "seatrial tra": {"train"},
    "seatrial ": set(VERBS),
    "seatrial train ": {"j.toml", "sub", "runs"},
    "seatrial train sub/": {"sub/x.toml"},
    "seatrial train --fr": {"--fresh"},
    "seatrial train --runs ": {"sub", "runs"},
    "seatrial watch al": {"alpha"},
    "seatrial watch su": {"sub"},
    "seatrial watch --grafana ": {"sub", "runs"},
    "seatrial verify ": {"alpha", "be ta"},
    "seatrial export --dtype bfloat16 al": {"alpha"},
    "seatrial export alpha --dtype b": {"bfloat16"},
    "seatrial logs --rank 1 al": {"alpha"},
    "seatrial data exp": {"export"},
    "seatrial check --from k": {"k.txt"},
    "seatrial completion f": {"fish"},
}

# The word that each types completes to; zsh shows no list that a program could read.
COMPLETED = {
    "seatrial tra": "seatrial train",
    "seatrial train j": "seatrial train j.toml",
    "seatrial train --fr": "seatrial train --fresh",
    "seatrial watch al": "seatrial watch alpha",
    "seatrial watch su": "seatrial watch sub/",
    "seatrial verify runs/al": "seatrial verify runs/alpha/",
    "seatrial data exp": "seatrial data export",
    "seatrial completion f": "seatrial completion fish",
}


def needs(shell: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(shell) is None, reason=f"{shell} is not installed")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("runs/alpha", "runs/be ta", "sub"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("j.toml", "k.txt", "sub/x.toml"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "sub"))
    monkeypatch.setenv("TERM", "dumb")
    return tmp_path


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


def shell(*command: str, code: str = "") -> str:
    done = subprocess.run(command, input=code, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done
    return done.stdout


@needs("bash")
def test_bash(
    place: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path_factory.mktemp("script") / "seatrial.bash"
    source.write_text(script("bash", capsys))
    code = (
        f'set -u; source {source}; shopt -u progcomp_alias; function=$(complete -p seatrial | grep -o "_[a-z_]*")\n'
        'compopt() { :; }; ask() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=(); $function; '
        'printf "%s|" "${COMPREPLY[@]-}"; echo; }\n'
    )
    for typed in OFFERED:
        words = [f"'{word}'" for word in typed.split(" ")]
        code += f"ask {' '.join(words)}\n"
    answers = shell("bash", "--norc", code=code).splitlines()
    offered = [set(answer.removesuffix("|").split("|")) for answer in answers]
    assert dict(zip(OFFERED, offered, strict=True)) == OFFERED


@needs("fish")
def test_fish(
    place: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path_factory.mktemp("script") / "seatrial.fish"
    source.write_text(script("fish", capsys))
    code = f"source {source}\n" + "".join(f"complete -C '{typed}'; echo =====\n" for typed in OFFERED)
    answers = shell("fish", "--no-config", "-c", code).split("=====\n")[:-1]
    offered = [{line.split("\t")[0].removesuffix("/") for line in answer.splitlines()} for answer in answers]
    assert dict(zip(OFFERED, offered, strict=True)) == OFFERED


ZSH = r"""
zmodload zsh/zpty
zpty z zsh -f -i
zpty -w z 'fpath=(FOLDER $fpath); autoload -U compinit; compinit -u -D; PROMPT=; bindkey "^I" complete-word
tell() { print -r "<$BUFFER>TO""LD"; BUFFER=; }; zle -N tell; bindkey "^X" tell; print REA""DY'
zpty -r -m z out '*READY*'
while read -r typed; do
  zpty -n -w z "$typed"$'\t\x18'
  zpty -r -m z out '*TOLD*'
  print -r -- ${${out##*\<}%%\>*}
done
zpty -d z
"""


@pytest.mark.cluster  # slow
@needs("zsh")
def test_zsh(
    place: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    """A shell with a terminal of its own: what is typed, a tab, and what then stands there."""
    source = tmp_path_factory.mktemp("script") / "_seatrial"
    source.write_text(script("zsh", capsys))
    typed = "".join(f"{line}\n" for line in COMPLETED)
    answers = shell("zsh", "-f", "-c", ZSH.replace("FOLDER", str(source.parent)), code=typed).splitlines()
    assert dict(zip(COMPLETED, [answer.rstrip() for answer in answers], strict=True)) == COMPLETED


def test_json_and_unknown_shells(capsys: pytest.CaptureFixture[str]) -> None:
    text = script("fish", capsys)
    assert main(["completion", "fish", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"schema_version": 1, "shell": "fish", "script": text}
    assert main(["completion", "tcsh"]) == 2
    assert "invalid choice: 'tcsh' (choose from" in capsys.readouterr().err


def test_no_other_verb_loads_the_generator() -> None:
    code = "import sys; from seatrial.cli.main import main; main(['explain', 'GPU001']); print('shtab' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.endswith("False\n")
