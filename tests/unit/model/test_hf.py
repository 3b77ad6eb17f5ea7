"""Hugging Face folders: what transformers saves we read, what we write transformers reads, to the last bit."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import resource
from pathlib import Path

import pytest
import torch
from model_cases import ARCHITECTURES, DictWeights, Oracle, random_tensors, same_bytes
from safetensors.torch import load_file, save_file

from seatrial.base.box import Box
from seatrial.base.errors import InputError, RunFailed
from seatrial.job.huggingface import read_config
from seatrial.job.parameters import is_router_bias
from seatrial.model.decoder import whole_shapes
from seatrial.model.expert_files import file_shapes
from seatrial.model.generate import load_whole
from seatrial.model.hf import INDEX, WEIGHTS, HuggingFaceWeights
from seatrial.model.hf_write import plan_shards, write_huggingface

pytestmark = pytest.mark.cluster  # slow together

CASES = ["qwen2-gqa2-tied", "llama3-gqa2", "qwen3-gqa4", "qwen3-gqa2-tied", "mistral-gqa4"]
TIED, UNTIED = ARCHITECTURES["qwen2-gqa2-tied"], ARCHITECTURES["llama3-gqa2"]
IDS = torch.arange(40).view(2, 20)


def _saved(folder: Path, tensors: dict[str, torch.Tensor], shards: int = 1) -> Path:
    """A folder as transformers would leave it, without transformers."""
    folder.mkdir()
    names = sorted(tensors)
    if shards == 1:
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        return folder
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[i::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def _problems(error: pytest.ExceptionInfo[InputError]) -> str:
    return error.value.render()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shard", ["5GB", "20KB"])
@pytest.mark.parametrize("case", CASES)
def test_reads_what_transformers_saves(
    case: str, shard: str, dtype: torch.dtype, oracle: Oracle, tmp_path: Path
) -> None:
    arch = ARCHITECTURES[case]
    model = oracle.model(arch, random_tensors(arch), dtype)
    oracle.save(model, tmp_path / "m", max_shard_size=shard)
    assert (tmp_path / "m" / INDEX).exists() == (shard == "20KB")

    weights = HuggingFaceWeights(tmp_path / "m")
    weights.check(arch)
    assert read_config(tmp_path / "m") == arch
    expected = dict(model.named_parameters())
    assert weights.names() == sorted(expected)
    for name, parameter in expected.items():
        assert weights.dtype(name) == dtype
        assert same_bytes(weights.read(name, Box.whole(weights.shape(name)), dtype), parameter.data)
    if dtype == torch.float32:
        with torch.no_grad():
            assert torch.equal(load_whole(arch, weights)(IDS), model(IDS).logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("limit", [10**9, 20_000])
@pytest.mark.parametrize("case", CASES)
def test_transformers_reads_what_we_write(
    case: str, limit: int, dtype: torch.dtype, oracle: Oracle, tmp_path: Path
) -> None:
    arch, out = ARCHITECTURES[case], tmp_path / "out"
    tensors = {name: t.to(dtype) for name, t in random_tensors(arch).items()}
    written = write_huggingface(DictWeights(tensors), arch, out, dtype=dtype, max_shard_bytes=limit)
    assert (len(written.files) > 1) == (out / INDEX).exists() == (limit == 20_000)
    assert written.bytes == sum(t.nbytes for t in tensors.values())
    assert os.listdir(tmp_path) == ["out"]  # nothing temporary is left

    model = oracle.load(out)
    read = dict(model.named_parameters())
    assert read.keys() == tensors.keys()
    assert all(same_bytes(read[name].data, tensors[name]) for name in tensors)

    # And our own reader, then the writer again: the files are the same files.
    weights = HuggingFaceWeights(out)
    weights.check(arch)
    assert read_config(out) == arch
    write_huggingface(weights, arch, tmp_path / "again", max_shard_bytes=limit)
    for path in out.iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()


@pytest.mark.parametrize("shard", ["5GB", "20KB"])
@pytest.mark.parametrize("case", ["qwen3-moe-gqa2", "glm4-moe-groups", "glm4-moe-dense-first"])
def test_experts_from_transformers_and_back(case: str, shard: str, oracle: Oracle, tmp_path: Path) -> None:
    """In files each matrix of each expert is a tensor of its own, in transformers and in ours several are one."""
    arch = ARCHITECTURES[case]
    model = oracle.model(arch, random_tensors(arch), torch.bfloat16)
    oracle.save(model, tmp_path / "theirs", max_shard_size=shard)
    weights = HuggingFaceWeights(tmp_path / "theirs")
    weights.check(arch)
    assert read_config(tmp_path / "theirs") == arch
    expected = random_tensors(arch)
    for name, shape in whole_shapes(arch).items():
        dtype = torch.float32 if is_router_bias(name) else torch.bfloat16
        assert weights.dtype(name) == dtype
        whole = weights.read(name, Box.whole(shape), dtype)
        assert same_bytes(whole, expected[name].to(dtype)), name
        box = Box.whole(shape).narrow(0, 1, shape[0] - 3).narrow(len(shape) - 1, 2, shape[-1] - 5)
        assert same_bytes(weights.read(name, box, dtype), whole[box.slices()]), name

    write_huggingface(weights, arch, tmp_path / "ours", max_shard_bytes=20_000)
    before, after = _tensors(tmp_path / "theirs"), _tensors(tmp_path / "ours")
    assert before.keys() == after.keys() == file_shapes(arch).keys()
    assert all(same_bytes(before[name], after[name]) for name in before)
    again = oracle.load(tmp_path / "ours").state_dict()
    assert all(same_bytes(again[name], values) for name, values in model.state_dict().items())


def test_layers_that_predict_further_ahead_are_not_read(tmp_path: Path) -> None:
    arch = ARCHITECTURES["glm4-moe-dense-first"]
    write_huggingface(DictWeights(random_tensors(arch)), arch, tmp_path / "whole", dtype="float32")
    tensors = load_file(tmp_path / "whole" / WEIGHTS)
    beyond = {f"model.layers.{arch.num_hidden_layers}.eh_proj.weight": torch.ones(2, 2)}
    HuggingFaceWeights(_saved(tmp_path / "more", tensors | beyond)).check(arch)
    wrong = {f"model.layers.{arch.num_hidden_layers - 1}.eh_proj.weight": torch.ones(2, 2)}
    weights = HuggingFaceWeights(_saved(tmp_path / "wrong", tensors | wrong))
    with pytest.raises(InputError) as caught:
        weights.check(arch)
    assert "eh_proj.weight is not a parameter of this model" in _problems(caught)
    other = ARCHITECTURES["qwen3-moe-tied"]  # its family has no such layers
    write_huggingface(DictWeights(random_tensors(other)), other, tmp_path / "other", dtype="float32")
    beyond = {f"model.layers.{other.num_hidden_layers}.eh_proj.weight": torch.ones(2, 2)}
    weights = HuggingFaceWeights(_saved(tmp_path / "o", load_file(tmp_path / "other" / WEIGHTS) | beyond))
    with pytest.raises(InputError):
        weights.check(other)


def test_a_missing_expert_and_one_of_another_size_are_named(tmp_path: Path) -> None:
    arch = ARCHITECTURES["qwen3-moe-gqa2"]
    source = DictWeights(random_tensors(arch))
    write_huggingface(source, arch, tmp_path / "whole", dtype="float32")
    tensors = load_file(tmp_path / "whole" / WEIGHTS)
    del tensors["model.layers.1.mlp.experts.23.up_proj.weight"]
    name = "model.layers.0.mlp.experts.7.down_proj.weight"
    tensors[name] = tensors[name][:, 1:].contiguous()
    with pytest.raises(InputError) as caught:
        HuggingFaceWeights(_saved(tmp_path / "m", tensors)).check(arch)
    assert "model.layers.1.mlp.experts.23.up_proj.weight is missing" in _problems(caught)
    assert f"{name} has shape [40, 23], the model needs [40, 24]" in _problems(caught)


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for f in folder.glob("*.safetensors") for k, v in load_file(f).items()}


def test_from_transformers_and_back(oracle: Oracle, tmp_path: Path) -> None:
    model = oracle.model(UNTIED, random_tensors(UNTIED))
    oracle.save(model, tmp_path / "theirs", max_shard_size="30KB")
    write_huggingface(HuggingFaceWeights(tmp_path / "theirs"), UNTIED, tmp_path / "ours")
    theirs = {k: v for f in (tmp_path / "theirs").glob("*.safetensors") for k, v in load_file(f).items()}
    ours = load_file(tmp_path / "ours" / WEIGHTS)
    assert theirs.keys() == ours.keys()
    assert all(same_bytes(theirs[name], ours[name]) for name in theirs)


@pytest.mark.parametrize("shards", [1, 3])
def test_any_box_of_a_parameter(shards: int, tmp_path: Path) -> None:
    tensors = random_tensors(TIED)
    weights = HuggingFaceWeights(_saved(tmp_path / "m", tensors, shards))
    draw = random.Random(0)
    for name, tensor in tensors.items():
        for _ in range(5):
            ends = [sorted(draw.randint(0, n) for _ in "ab") for n in tensor.shape]
            box = Box(tuple(a for a, _ in ends), tuple(b - a for a, b in ends))
            assert same_bytes(weights.read(name, box, torch.float32), tensor[box.slices()])
    with pytest.raises(ValueError, match="not inside"):
        weights.read("model.norm.weight", Box((60,), (10,)), torch.float32)


def test_reading_converts(tmp_path: Path) -> None:
    tensors = {name: t.to(torch.float16) for name, t in random_tensors(TIED).items()}
    weights = HuggingFaceWeights(_saved(tmp_path / "m", tensors))
    name = "model.embed_tokens.weight"
    read = weights.read(name, Box.whole(weights.shape(name)), torch.bfloat16)
    assert same_bytes(read, tensors[name].to(torch.bfloat16))


class TestTiedFiles:
    """A tied pair can stand in the files once, under either name, or twice."""

    def test_both_names_and_equal(self, tmp_path: Path) -> None:
        tensors = random_tensors(TIED)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        HuggingFaceWeights(_saved(tmp_path / "m", tensors)).check(TIED)

    def test_both_names_and_different_is_refused(self, tmp_path: Path) -> None:
        tensors = random_tensors(TIED)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["lm_head.weight"][-1, -1] += 1
        weights = HuggingFaceWeights(_saved(tmp_path / "m", tensors))
        with pytest.raises(InputError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
            weights.check(TIED)

    def test_only_the_heads_name(self, tmp_path: Path) -> None:
        tensors = random_tensors(TIED)
        kept = tensors.pop("model.embed_tokens.weight")
        weights = HuggingFaceWeights(_saved(tmp_path / "m", tensors | {"lm_head.weight": kept}))
        weights.check(TIED)
        assert same_bytes(
            weights.read("model.embed_tokens.weight", Box.whole(kept.shape), torch.float32), kept
        )

    def test_an_untied_model_needs_both(self, tmp_path: Path) -> None:
        for missing in ("lm_head.weight", "model.embed_tokens.weight"):
            tensors = random_tensors(UNTIED)
            del tensors[missing]
            weights = HuggingFaceWeights(_saved(tmp_path / missing, tensors))
            with pytest.raises(InputError, match=f"{missing} is missing"):
                weights.check(UNTIED)


class TestCheck:
    def test_reports_all_problems_at_once_by_layer(self, tmp_path: Path) -> None:
        tensors = random_tensors(UNTIED)
        for i in range(2):
            tensors[f"model.layers.{i}.self_attn.o_proj.bias"] = torch.zeros(64)
            del tensors[f"model.layers.{i}.mlp.up_proj.weight"]
        tensors["model.norm.weight"] = torch.ones(63)
        tensors["model.layers.1.input_layernorm.weight"] = torch.ones(64, dtype=torch.uint8)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)  # allowed
        weights = HuggingFaceWeights(_saved(tmp_path / "m", tensors))
        with pytest.raises(InputError) as error:
            weights.check(UNTIED)
        assert [d.message for d in error.value.diagnostics] == [
            "model.layers.*.mlp.up_proj.weight (layers 0-1) is missing",
            "model.layers.1.input_layernorm.weight is stored as U8: quantised weights cannot be trained",
            "model.norm.weight has shape [63], the model needs [64]",
            "model.layers.*.self_attn.o_proj.bias (layers 0-1) is not a parameter of this model",
        ]
        with pytest.raises(InputError, match="quantised"):
            weights.read("model.layers.1.input_layernorm.weight", Box((0,), (64,)), torch.float32)

    def test_another_number_of_layers(self, tmp_path: Path) -> None:
        deeper = dataclasses.replace(UNTIED, num_hidden_layers=5)
        weights = HuggingFaceWeights(_saved(tmp_path / "m", random_tensors(UNTIED)))
        with pytest.raises(InputError) as error:
            weights.check(deeper)
        assert len(error.value.diagnostics) == 9
        assert all("(layers 2-4) is missing" in d.message for d in error.value.diagnostics)

    def test_a_model_without_its_head(self, tmp_path: Path) -> None:
        tensors = {n.removeprefix("model."): t for n, t in random_tensors(TIED).items()}
        with pytest.raises(InputError) as error:
            HuggingFaceWeights(_saved(tmp_path / "m", tensors)).check(TIED)
        assert "base model" in _problems(error)


class TestFolders:
    def test_no_folder(self, tmp_path: Path) -> None:
        with pytest.raises(InputError) as error:
            HuggingFaceWeights(tmp_path / "Qwen" / "Qwen2.5-7B")
        assert "no such folder" in _problems(error)
        assert "hf download" in _problems(error)

    def test_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "f").touch()
        with pytest.raises(InputError, match="is a file"):
            HuggingFaceWeights(tmp_path / "f")

    def test_no_weights(self, tmp_path: Path) -> None:
        with pytest.raises(InputError) as error:
            HuggingFaceWeights(tmp_path)
        assert "no safetensors weights" in _problems(error)
        assert "pickle" not in _problems(error)

    def test_pickled_weights_only(self, tmp_path: Path) -> None:
        (tmp_path / "pytorch_model.bin").touch()
        with pytest.raises(InputError) as error:
            HuggingFaceWeights(tmp_path)
        assert "save_pretrained" in _problems(error)

    def test_every_missing_and_damaged_file_is_named(self, tmp_path: Path) -> None:
        folder = _saved(tmp_path / "m", random_tensors(TIED), shards=5)
        files = sorted(folder.glob("*.safetensors"))
        files[0].unlink()
        files[1].write_bytes(files[1].read_bytes()[:-1])
        files[2].write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n")
        files[3].write_bytes(files[4].read_bytes())
        files[4].unlink()
        files[4].mkdir()
        with pytest.raises(InputError) as error:
            HuggingFaceWeights(folder)
        text = [d.render() for d in error.value.diagnostics]
        assert len(text) == 5
        assert "which is missing" in text[0]
        assert "00001-of-00005" in text[0]
        assert "is truncated or damaged" in text[1]
        assert "git lfs pull" in text[2]
        assert "assigns to this file" in text[3]
        assert "cannot be read" in text[4]

    @pytest.mark.parametrize("size", [0, 4, 100])
    def test_one_truncated_file(self, size: int, tmp_path: Path) -> None:
        folder = _saved(tmp_path / "m", random_tensors(TIED))
        os.truncate(folder / WEIGHTS, size)
        with pytest.raises(InputError, match="truncated or damaged"):
            HuggingFaceWeights(folder)

    @pytest.mark.parametrize(
        "text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": "../b.safetensors"}}']
    )
    def test_a_bad_index(self, text: str, tmp_path: Path) -> None:
        (tmp_path / INDEX).write_text(text)
        with pytest.raises(InputError, match=r"not an index|does not name files in the folder"):
            HuggingFaceWeights(tmp_path)


class TestWriting:
    def test_shards(self) -> None:
        sizes = {"a": 5, "b": 5, "c": 1, "d": 30, "e": 2, "f": 8}
        assert plan_shards(sizes, 10) == [["a", "b"], ["c"], ["d"], ["e", "f"]]
        assert plan_shards(sizes, 1000) == [list(sizes)]
        with pytest.raises(ValueError, match="at least one byte"):
            plan_shards(sizes, 0)

    def test_index_and_progress(self, tmp_path: Path) -> None:
        told: list[tuple[int, int]] = []
        source = DictWeights(random_tensors(TIED))
        written = write_huggingface(
            source,
            TIED,
            tmp_path / "a" / "b",
            max_shard_bytes=20_000,
            progress=lambda done, total: told.append((done, total)),
        )
        index = json.loads((tmp_path / "a" / "b" / INDEX).read_text())
        assert index["metadata"]["total_size"] == written.bytes
        assert index["weight_map"].keys() == whole_shapes(TIED).keys()
        assert set(index["weight_map"].values()) == set(written.files)
        assert written.files[0] == f"model-00001-of-{len(written.files):05d}.safetensors"
        assert len(told) == len(written.files)
        assert told[-1] == (written.bytes, written.bytes)
        assert len({p.stat().st_mode for p in (tmp_path / "a" / "b").iterdir()}) == 1

    def test_existing_files_are_not_overwritten(self, tmp_path: Path) -> None:
        source = DictWeights(random_tensors(TIED))
        (tmp_path / "full").mkdir()
        (tmp_path / "full" / "precious").touch()
        with pytest.raises(InputError, match="not empty"):
            write_huggingface(source, TIED, tmp_path / "full")
        assert os.listdir(tmp_path / "full") == ["precious"]
        (tmp_path / "empty").mkdir()
        write_huggingface(source, TIED, tmp_path / "empty")
        HuggingFaceWeights(tmp_path / "empty").check(TIED)

    def test_a_failure_leaves_nothing(self, tmp_path: Path) -> None:
        tensors = random_tensors(TIED)
        del tensors["model.norm.weight"]
        with pytest.raises(KeyError):
            write_huggingface(DictWeights(tensors), TIED, tmp_path / "out", max_shard_bytes=20_000)
        assert os.listdir(tmp_path) == []

    def test_a_full_disk(self, tmp_path: Path) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, hard))
        try:
            with pytest.raises(RunFailed, match="failed"):
                write_huggingface(DictWeights(random_tensors(TIED)), TIED, tmp_path / "out")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert os.listdir(tmp_path) == []

    def test_an_output_path_below_a_file_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "f").touch()
        source = DictWeights(random_tensors(TIED))
        for out in (tmp_path / "f", tmp_path / "f" / "below"):
            with pytest.raises(InputError):
                write_huggingface(source, TIED, out)

    def test_another_process_creates_the_folder_meanwhile(self, tmp_path: Path) -> None:
        def take(done: int, total: int) -> None:
            (tmp_path / "out" / "theirs").mkdir(parents=True)

        with pytest.raises(RunFailed):
            write_huggingface(DictWeights(random_tensors(TIED)), TIED, tmp_path / "out", progress=take)
        assert os.listdir(tmp_path) == ["out"]
        assert os.listdir(tmp_path / "out") == ["theirs"]

    def test_too_small_a_disk(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        class Usage:
            free = 1000

        monkeypatch.setattr("shutil.disk_usage", lambda _: Usage)
        with pytest.raises(InputError, match="1000 B free"):
            write_huggingface(DictWeights(random_tensors(TIED)), TIED, tmp_path / "out")
        assert os.listdir(tmp_path) == []

    def test_tokenizer_files_are_copied(self, tmp_path: Path) -> None:
        source = DictWeights(random_tensors(TIED))
        there = tmp_path / "t"
        there.mkdir()
        for name in ("tokenizer.json", "tokenizer_config.json", "other.json"):
            (there / name).write_text(name)
        write_huggingface(source, TIED, tmp_path / "out", tokenizer=there / "tokenizer.json")
        assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
            "config.json",
            WEIGHTS,
            "tokenizer.json",
            "tokenizer_config.json",
        ]
        with pytest.raises(InputError, match="no such tokenizer"):
            write_huggingface(source, TIED, tmp_path / "out2", tokenizer=there / "gone.json")

    def test_dtypes(self, tmp_path: Path) -> None:
        source = DictWeights(random_tensors(TIED))
        for given, name in (("stored", "float32"), ("bfloat16", "bfloat16"), (torch.float16, "float16")):
            written = write_huggingface(source, TIED, tmp_path / str(given), dtype=given)
            assert written.dtype == name
            assert json.loads((tmp_path / str(given) / "config.json").read_text())["dtype"] == name
        with pytest.raises(ValueError, match="int8"):
            write_huggingface(source, TIED, tmp_path / "x", dtype="int8")
