"""Every failure says its cause and what to do, with the exit code of the README: odd documents, paths, limits, disks."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from seatrial.base.errors import HINTS, Diagnostic, InputError, SeatrialError, from_machine
from seatrial.cli import main as command
from seatrial.cli.main import main
from seatrial.job import preset_text
from seatrial.job.huggingface import config_from_architecture, read_config
from seatrial.job.models import family_defaults
from seatrial.model.hf import INDEX, HuggingFaceWeights

ESCAPE = "\x1b]0;owned\x07\x9b31m\u202e\udc80"
DEEP = "[" * 100_000
LONG = "a" * 300
ODD = {
    "deep": DEEP,
    "deep objects": '{"a":' * 100_000,
    "digits": '{"a": ' + "1" * 5000 + "}",
    "surrogate": '{"a": "\\ud800", "model_type": "\\ud800", "weight_map": {"\\ud800": "\\ud800"}}',
    "escapes": json.dumps({"model_type": ESCAPE, "schema_version": ESCAPE, "weight_map": {ESCAPE: ESCAPE}}),
    "not text": "\xff\xfe",
    "empty": "",
    "null": "null",
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    (tmp_path / "job.toml").write_text(preset_text("first-voyage"))
    (tmp_path / "hf.toml").write_text(preset_text("first-voyage").replace("preset = ", "hf = "))
    (tmp_path / "corpus.txt").write_text("a few words\n")
    return tmp_path


def told(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Exit code and stderr; what a terminal would obey is not in it."""
    capsys.readouterr()
    code = main(list(words))
    out, err = capsys.readouterr()
    assert not set(out + err) & {"\x1b", "\x07", "\x9b", "\u202e", "\udc80"}
    assert "Traceback" not in err
    return code, err


# -- documents


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize(
    ("file", "verb"),
    [
        ("x/config.json", "plan hf.toml --set model.hf=x"),
        ("x.toml", "plan x.toml"),
        ("x.json", "check --simulate x.json"),
        ("x.toml", "check --simulate x.toml"),
        ("x.json", "check --from corpus.txt --baseline x.json"),
        ("x/manifest.json", "data verify x"),
        ("x.json", "data prepare corpus.txt --out y --tokenizer x.json"),
        ("x.jsonl", "data prepare x.jsonl --out y"),
        ("x.idx", "data import x --tokenizer bytes --out y"),
    ],
)
def test_an_odd_document_is_bad_input(
    here: Path, capsys: pytest.CaptureFixture[str], kind: str, file: str, verb: str
) -> None:
    path = here / file
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(ODD[kind].encode("latin-1" if kind == "not text" else "utf-8"))
    (here / "x.bin").write_bytes(b"")
    code, err = told(capsys, *verb.split())
    assert code == 2, err
    assert err.count("error:") >= 1


@pytest.mark.parametrize("kind", ODD)
def test_an_odd_index_of_weights_is_bad_input(here: Path, kind: str) -> None:
    (here / INDEX).write_bytes(ODD[kind].encode("latin-1" if kind == "not text" else "utf-8"))
    with pytest.raises(InputError) as caught:
        HuggingFaceWeights(here)
    assert "\x1b" not in caught.value.render()


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "..", ".", "", "a\0b", "a\nb", "\ud800", "a/b"])
def test_an_index_names_plain_files_only(here: Path, name: str) -> None:
    (here / INDEX).write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(InputError, match="does not name files in the folder"):
        HuggingFaceWeights(here)


def test_what_a_config_says_cannot_rule_the_terminal(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_from_architecture(read_architecture(here)) | {"model_type": f"gpt{ESCAPE}"}
    (here / "config.json").write_text(json.dumps(config))
    code, err = told(capsys, "plan", "hf.toml", "--set", "model.hf=.")
    assert code == 2
    assert 'model_type "gpt�]0;owned��31m��" is not supported' in err


def read_architecture(folder: Path):  # type: ignore[no-untyped-def]
    from seatrial.job import load_job

    return load_job(folder / "job.toml").architecture


def test_every_error_is_made_printable_where_it_is_rendered() -> None:
    assert SeatrialError(ESCAPE, hint=ESCAPE).render() == "error: �]0;owned��31m��\n  hint: �]0;owned��31m��"
    shown = Diagnostic("x", ESCAPE, 1, 1, source_line=ESCAPE, hint=ESCAPE).render()
    assert not set(shown) & set("\x1b\x07\x9b\u202e\udc80")


# -- paths


@pytest.mark.parametrize("path", [LONG, "a/" * 2500, "corpus.txt/x", ""])
@pytest.mark.parametrize(
    "verb",
    [
        "init --preset first-voyage --out @", "plan @", "plan job.toml --html @", "check --from @", "check --simulate @",
        "check --hostfile @", "check --from corpus.txt --html @", "data prepare @ --out y", "data prepare corpus.txt --out @",
        "data prepare corpus.txt --out y --tokenizer @", "data import @ --tokenizer bytes --out y", "data export @ --out y",
        "data show @", "data verify @", "train @", "drill @", "watch @", "verify @", "checkpoints @", "export @ --out y",
        "plan hf.toml --set model.hf=@",
    ],
)  # fmt: skip
def test_a_path_that_cannot_be_one_is_bad_input(
    here: Path, capsys: pytest.CaptureFixture[str], path: str, verb: str
) -> None:
    code, err = told(capsys, *(word.replace("@", path) for word in verb.split(" ")))
    assert code == 2, err
    assert "error: " in err


@pytest.mark.parametrize(
    "verb", ["plan @", "data show @", "data prepare @ --out y", "verify @", "watch @", "check --simulate @"]
)
def test_a_link_to_itself_is_bad_input(here: Path, capsys: pytest.CaptureFixture[str], verb: str) -> None:
    (here / "loop").symlink_to("loop")
    code, err = told(capsys, *verb.replace("@", "loop").split())
    assert code == 2, err


def test_the_path_of_a_tokenizer_in_a_job(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, err = told(capsys, "train", "job.toml", "--set", f"data.tokenizer={LONG}")
    assert code == 2
    assert f"data.tokenizer={LONG}: error: the tokenizer " in err
    assert "does not exist" in err


def test_a_non_utf8_file_name_does_not_break_an_answer(here: Path) -> None:
    os.mkdir(b"\xff\xfe")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "seatrial", "check", "--from", b"\xff\xfe"],
        capture_output=True, env={**os.environ, "LC_ALL": "C.UTF-8"}, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_that_knows_few_letters_gets_an_answer(here: Path, encoding: str) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "seatrial", "plan", "job.toml", "--set", 'name="schön"', "--set", "cluster.gpu=H100 SXM"],
        capture_output=True, env={**os.environ, "PYTHONIOENCODING": encoding}, timeout=120, check=False,
    )  # fmt: skip
    assert b"Traceback" not in done.stderr
    assert done.returncode in (0, 2), done.stderr


# -- what the machine refuses


@pytest.mark.parametrize(
    "number", [*HINTS, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOENT, errno.EINVAL, errno.EPIPE]
)
def test_os_errors_are_reported_with_file_and_hint(number: int) -> None:
    told = from_machine(OSError(number, os.strerror(number), "runs/x"))
    if number in (errno.ENOENT, errno.EINVAL, errno.EPIPE):
        assert told is None  # nobody has looked where one should have: ours
        return
    assert told is not None
    assert told.message == f"runs/x: {os.strerror(number)}"
    assert told.hint
    assert told.exit_code == (2 if number in (errno.ENAMETOOLONG, errno.ELOOP) else 1)


def test_memory_threads_and_folders_for_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (MemoryError(), ImportError("libtorch.so: failed to map segment from shared object")):
        found = from_machine(error)
        assert found is not None
        assert (found.message, found.exit_code) == ("no memory is left", 1)
    threads = from_machine(RuntimeError("can't start new thread"))
    assert threads is not None
    assert "ulimit -u" in str(threads.hint)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/nowhere"])
    monkeypatch.setattr(tempfile, "tempdir", None)
    with pytest.raises(FileNotFoundError) as caught:
        tempfile.gettempdir()
    folder = from_machine(caught.value)
    assert folder is not None
    assert (folder.exit_code, folder.hint) == (2, "set TMPDIR to a local folder that is writable")
    assert from_machine(RuntimeError("x")) is None
    assert from_machine(ImportError("no module")) is None


def test_an_error_of_the_machine_is_reported_by_every_verb(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(argv: list[str]) -> int:
        raise OSError(errno.EROFS, "Read-only file system", "runs/a/events.jsonl")

    monkeypatch.setattr(command, "_dispatch", stopped)
    code, err = told(capsys, "watch", "a", "--json")
    assert code == 1
    assert json.loads(err)["errors"][0]["message"] == "runs/a/events.jsonl: Read-only file system"
    assert "read-only" in json.loads(err)["errors"][0]["hint"]


def limited(kind: int, value: int, *words: str, cwd: Path) -> tuple[int, str]:
    """A verb in a process with a limit."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "seatrial", *words],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=lambda: resource.setrlimit(kind, (value, value)),
        check=False,
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr


@pytest.mark.cluster  # slow
def test_forty_descriptors_are_too_few_for_ranks(here: Path) -> None:
    code, err = limited(resource.RLIMIT_NOFILE, 40, "train", "job.toml", "--plain", cwd=here)
    assert code == 2
    assert "a process may have 40 files open here, but the ranks need 80" in err
    assert "ulimit -Hn" in err
    assert not (here / "runs" / "first-voyage").exists()
    code, err = limited(resource.RLIMIT_NOFILE, 10, "plan", "job.toml", "--dry-run", cwd=here)
    assert code == 1
    assert "Too many open files\n  hint: too many files are open at once" in err


@pytest.mark.cluster  # slow
def test_a_limit_on_memory_addresses_is_named(here: Path) -> None:
    code, err = limited(resource.RLIMIT_AS, 80 << 20, "plan", "job.toml", cwd=here)
    assert code == 1
    assert "(`ulimit -v`)" in err
    code, err = limited(resource.RLIMIT_AS, 300 << 20, "plan", "job.toml", "--dry-run", cwd=here)
    assert code == 1
    assert (
        "a process may have 300 MiB of addresses here (`ulimit -v`), too little for torch: raise that limit"
        in err
    )


def test_a_limit_on_the_size_of_files_is_named(here: Path) -> None:
    code, err = limited(resource.RLIMIT_FSIZE, 0, "data", "prepare", "corpus.txt", "--out", "y", cwd=here)
    assert code == 1
    assert "File too large" in err


READ_ONLY = """
mount --bind "$1" "$1" && mount -o remount,ro,bind "$1" && cd "$1" || exit 99
shift
exec "$@"
"""


@pytest.mark.cluster  # slow
@pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode != 0,
    reason="a mount of its own needs root",
)  # fmt: skip
@pytest.mark.parametrize(
    ("verb", "code"),
    [
        ("init --preset first-voyage --out f.toml", 2),
        ("plan job.toml --html p.html", 2),
        ("data prepare corpus.txt --out tokens", 2),
        ("train job.toml --plain", 2),
        ("check --from corpus.txt --html c.html", 2),
    ],
)
def test_a_read_only_disk_is_named(here: Path, verb: str, code: int) -> None:
    words = [sys.executable, "-P", "-m", "seatrial", *verb.split()]
    done = subprocess.run(
        ["unshare", "-m", "bash", "-c", READ_ONLY, "-", str(here), *words],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    if done.returncode == 99:
        pytest.skip("nothing may be mounted here")
    assert (done.returncode, "Read-only file system" in done.stderr) == (code, True), done.stderr
    assert "hint: " in done.stderr
    assert "Traceback" not in done.stderr


def test_the_families_are_still_read(here: Path) -> None:
    assert family_defaults("qwen2")
    config = config_from_architecture(read_architecture(here))
    (here / "config.json").write_text(json.dumps(config))
    assert read_config(here) == read_config(here / "config.json")
