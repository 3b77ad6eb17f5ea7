"""Text generation on one device: loading a whole model from any weight source, and sampling from it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from seatrial.base.box import Box
from seatrial.job.architecture import Architecture
from seatrial.job.parameters import is_router_bias
from seatrial.model.decoder import Decoder, stored_name
from seatrial.model.source import WeightSource


def load_whole(
    arch: Architecture,
    source: WeightSource,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Decoder:
    """The whole model on one device, in evaluation mode, every weight read from `source`."""
    with torch.device("meta"):
        model = Decoder(arch)
    for name, parameter in model.named_parameters():
        if not is_router_bias(name):
            parameter.data = parameter.data.to(dtype)
    model = model.to_empty(device=device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            box = Box.whole(parameter.shape)
            parameter.copy_(source.read(stored_name(name, arch), box, parameter.dtype))
    return model.eval()


def generate(
    model: Decoder,
    prompt_ids: Sequence[int],
    *,
    tokens: int,
    temperature: float = 0.8,
    top_k: int | None = 50,
    seed: int,
    stop_id: int | None = None,
) -> list[int]:
    """Up to `tokens` ids that continue the prompt (which is not repeated); the same seed gives the same ids.

    Temperature 0 is greedy. Generation ends before `stop_id`. The context is the last `max_position_embeddings` ids.
    There is no KV cache, each token costs a forward pass over the context: this is for samples, not serving.
    Raises ValueError for an empty prompt, an id outside the vocabulary, a negative temperature or a top_k below 1.
    """
    arch = model.arch
    if not prompt_ids:
        raise ValueError("the prompt needs at least one token")
    if not all(0 <= i < arch.vocab_size for i in prompt_ids):
        raise ValueError(f"the prompt has ids outside the vocabulary of {arch.vocab_size}")
    if temperature < 0 or (top_k is not None and top_k < 1):
        raise ValueError(f"temperature {temperature} is negative, or top_k {top_k} is below 1")
    device = next(model.parameters()).device
    # Sampled on the CPU: a CUDA generator draws other numbers from the same seed.
    random = torch.Generator().manual_seed(seed)
    ids = list(prompt_ids)
    new: list[int] = []
    # Not inference_mode: the model keeps its rotary tables, and a later training step could not use inference tensors.
    with torch.no_grad():
        while len(new) < tokens:
            context = torch.tensor([ids[-arch.max_position_embeddings :]], device=device)
            chosen = _choose(model(context)[0, -1].float().cpu(), temperature, top_k, random)
            if chosen == stop_id:
                break
            ids.append(chosen)
            new.append(chosen)
    return new


def _choose(logits_V: Tensor, temperature: float, top_k: int | None, random: torch.Generator) -> int:
    if temperature == 0:
        return int(logits_V.argmax())
    if top_k is not None and top_k < logits_V.numel():
        values, indices = logits_V.topk(top_k)
    else:
        values, indices = logits_V, torch.arange(logits_V.numel())
    picked = torch.multinomial((values / temperature).softmax(0), 1, generator=random)
    return int(indices[picked])
