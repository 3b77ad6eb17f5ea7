from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seatrial.base.errors import InputError
from seatrial.data.tokenizer import ByteTokenizer, load_tokenizer

WriteTokenizer = Callable[..., Path]


@given(st.text())
def test_bytes_round_trip(text: str) -> None:
    t = load_tokenizer("bytes")
    ids = t.encode(text)
    assert all(0 <= i < 256 for i in ids)
    assert t.decode(ids) == text
    assert [a.tolist() for a in t.encode_many([text.encode()])] == [ids]


def test_bytes_definition() -> None:
    t = ByteTokenizer()
    assert (t.name, t.vocab_size, t.end_of_document) == ("bytes", 257, 256)
    assert t.encode("é") == [0xC3, 0xA9]
    # Stores in the field carry it: it changes only together with the ids.
    assert t.digest.startswith("267cc3ef5772")


def test_any_bytes_of_a_model_can_be_decoded() -> None:
    assert ByteTokenizer().decode([104, 0xC3, 105, 256, 263, 33]) == "h\ufffdi\ufffd!"


def test_bytes_encode_replaces_a_lone_surrogate() -> None:
    assert ByteTokenizer().encode("a\ud800") == [97, 63]


def test_tokenizer_file(write_tokenizer: WriteTokenizer, tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path / "tokenizer.json")
    t = load_tokenizer(str(path))
    assert t.name == tmp_path.name
    assert t.vocab_size == 5
    assert t.end_of_document == 4
    assert t.encode("def x what") == [1, 3, 0]
    assert [a.tolist() for a in t.encode_many([b"def x", b"return"])] == [[1, 3], [2]]
    assert t.decode([1, 3, 4]) == "def x"
    assert load_tokenizer(str(tmp_path)).digest == t.digest


def test_ids_with_a_hole_count_up_to_the_largest(write_tokenizer: WriteTokenizer, tmp_path: Path) -> None:
    assert load_tokenizer(str(write_tokenizer(tmp_path / "t.json", special_id=70000))).vocab_size == 70001


@pytest.mark.parametrize("special", ["<|endoftext|>", "<|end_of_text|>", "</s>", "<|im_end|>", "<eos>"])
def test_end_of_document_by_name(write_tokenizer: WriteTokenizer, tmp_path: Path, special: str) -> None:
    assert load_tokenizer(str(write_tokenizer(tmp_path / "t.json", special=special))).end_of_document == 4


@pytest.mark.parametrize("special", [None, "<|pad|>"])
def test_no_end_of_document(write_tokenizer: WriteTokenizer, tmp_path: Path, special: str | None) -> None:
    assert load_tokenizer(str(write_tokenizer(tmp_path / "t.json", special=special))).end_of_document is None


def test_padding_and_truncation_in_tokenizer_file_are_ignored(
    write_tokenizer: WriteTokenizer, tmp_path: Path
) -> None:
    path = write_tokenizer(
        tmp_path / "t.json",
        truncation={"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
        padding={
            "strategy": {"Fixed": 8},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "[UNK]",
        },
    )
    t = load_tokenizer(str(path))
    assert t.encode("x x x x") == [3, 3, 3, 3]
    assert [a.tolist() for a in t.encode_many([b"x x x x", b"x"])] == [[3, 3, 3, 3], [3]]


@pytest.mark.parametrize("content", [b"", b"{}", b"not json", b"\xff\xfe", b'{"model": 3}'])
def test_a_bad_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"tokenizer\.json is not a tokenizer\.json") as e:
        load_tokenizer(str(path))
    assert "hint" in e.value.render()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere\.json does not exist"):
        load_tokenizer(str(tmp_path / "nowhere.json"))
