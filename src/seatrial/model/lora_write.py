"""Writing adapters alone, as PEFT's `PeftModel.from_pretrained` reads them.

The format: huggingface.co/docs/peft, "PEFT checkpoint format".
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from seatrial.base.atomic import write_json
from seatrial.base.box import Box
from seatrial.job.architecture import Architecture
from seatrial.job.families import family_named
from seatrial.model.decoder import whole_shapes
from seatrial.model.hf_stream import write_safetensors
from seatrial.model.hf_write import Written, new_folder, stored_dtype
from seatrial.model.lora import A, B, is_adapter
from seatrial.model.source import WeightSource

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."  # of the model that PEFT wraps


def write_adapter(
    source: WeightSource,
    arch: Architecture,
    out: Path,
    *,
    dtype: torch.dtype | str = "stored",
    tokenizer: Path | None = None,
    notes: Mapping[str, str] | None = None,
) -> Written:
    """Write the adapters of `source` as the folder `out`; arguments and errors are those of `write_huggingface`."""
    lora = arch.lora
    assert lora is not None
    tensor_name = family_named(arch.family).tensor_name
    shapes = {name: shape for name, shape in whole_shapes(arch).items() if is_adapter(name)}
    dtypes = {name: stored_dtype(dtype, source, name) for name in shapes}
    total = sum(Box.whole(shape).numel * dtypes[name].itemsize for name, shape in shapes.items())
    stored: dict[str, str] = {}
    for name in shapes:
        end = A if name.endswith(A) else B
        base = tensor_name(name.removesuffix(end) + ".weight")
        stored[name] = _PREFIX + base.removesuffix(".weight") + end
    modules = {name.removesuffix(A).removesuffix(B).rpartition(".")[2] for name in stored.values()}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": sorted(modules),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
    }
    with new_folder(out, total, tokenizer, notes) as temporary:
        write_json(temporary / CONFIG, config)
        write_safetensors(temporary / WEIGHTS, source, stored, shapes, dtypes)
    return Written([WEIGHTS], total, str(next(iter(dtypes.values()))).removeprefix("torch."))
