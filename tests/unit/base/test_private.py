"""The folder in TMPDIR that nobody else can put anything into, and what of torch is led there."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from seatrial.base.errors import InputError
from seatrial.base.private import keep_compiler_private, private_folder
from seatrial.data.cache import cache_folder

NAME = f"seatrial-{os.getuid()}"


@pytest.fixture
def tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_it_is_made_for_its_owner_alone_and_found_again(tmp: Path) -> None:
    old = os.umask(0)
    try:
        assert private_folder() == tmp / NAME
    finally:
        os.umask(old)
    assert (tmp / NAME).stat().st_mode & 0o777 == 0o700
    assert private_folder() == tmp / NAME
    assert cache_folder() == tmp / NAME / "stream"


def test_a_link_even_to_a_folder_of_ours_is_refused(tmp: Path) -> None:
    (tmp / "mine").mkdir(mode=0o700)
    (tmp / NAME).symlink_to(tmp / "mine")
    with pytest.raises(InputError, match=f"{NAME} is not a folder"):
        private_folder()


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o755, 0o711])
def test_one_that_others_can_look_or_write_into_is_refused(tmp: Path, mode: int) -> None:
    (tmp / NAME).mkdir()
    (tmp / NAME).chmod(mode)
    with pytest.raises(InputError, match="was writable by other users") as caught:
        private_folder()
    assert caught.value.hint == "remove it, or set TMPDIR to another local folder"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to somebody else")
def test_a_folder_of_another_user_is_refused(tmp: Path) -> None:
    (tmp / NAME).mkdir(mode=0o700)
    os.chown(tmp / NAME, 12345, 12345)
    with pytest.raises(InputError, match="is not a folder of this user"):
        private_folder()


def test_private_folder_that_cannot_be_created_is_an_error(tmp: Path) -> None:
    (tmp / NAME).write_text("")
    with pytest.raises(
        InputError, match=f"cannot make a folder for temporary files, {tmp}/{NAME}: File exists"
    ):
        private_folder()


@pytest.fixture
def compiler(tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("TORCHINDUCTOR_CACHE_DIR", "PYTHONSAFEPATH"):
        monkeypatch.setenv(name, "")  # so that it is put back afterwards
        monkeypatch.delenv(name)
    return tmp


def test_what_torch_compiles_is_led_into_it(compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    assert Path(cache_dir()).parent == compiler  # as torch sets it when it is imported
    keep_compiler_private()
    assert Path(cache_dir()).parent == compiler / NAME
    keep_compiler_private()  # by the next model of this process
    assert Path(cache_dir()).parent == compiler / NAME


def test_a_cache_that_the_user_has_named_is_kept(compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = compiler / "shared" / "cache"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(named))
    keep_compiler_private()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(named)
