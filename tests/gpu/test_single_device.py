"""One CUDA device against the CPU, where the decoder is already known to be right: fp32, bf16, compiled, a training step.

Needs only the package and pytest; what needs transformers or a compiler skips with its reason.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from seatrial.base.box import Box
from seatrial.job.architecture import Architecture, RopeScaling
from seatrial.model.decoder import Decoder, whole_shapes
from seatrial.model.generate import generate, load_whole

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no CUDA device (torch.cuda.is_available() is false)"
    ),
]
needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or not (shutil.which("cc") or shutil.which("gcc")),
    reason="torch.compile needs triton and a C compiler",
)
# The compiler remarks on affairs of its own (that TF32 is off, that it looked at `.grad` of an inner tensor), others in
# each version of torch; none of them is about this code.
the_compilers_warnings = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")

SHARED = {
    "intermediate_size": 344,
    "num_hidden_layers": 3,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
}
# Odd vocabularies on purpose: kernels must not rely on alignment.
ARCHITECTURES = {
    "qwen2-tied": Architecture(
        family="qwen2", vocab_size=1037, hidden_size=128, num_attention_heads=8, num_key_value_heads=2, head_dim=16,
        rope_theta=1e6, tie_word_embeddings=True, qkv_bias=True, qk_norm=False, **SHARED,
    ),
    "llama3": Architecture(
        family="llama", vocab_size=1031, hidden_size=128, num_attention_heads=4, num_key_value_heads=4, head_dim=32,
        rope_theta=5e5, tie_word_embeddings=False, qkv_bias=False, qk_norm=False,
        rope_scaling=RopeScaling(8.0, 1.0, 4.0, 128), **SHARED,
    ),
    "qwen3": Architecture(
        family="qwen3", vocab_size=1037, hidden_size=96, num_attention_heads=4, num_key_value_heads=1, head_dim=64,
        rope_theta=1e6, tie_word_embeddings=False, qkv_bias=False, qk_norm=True, **SHARED,
    ),
}  # fmt: skip


class RandomTensors:
    """A weight source without zeros in biases and ones in norms, the same on every device."""

    def __init__(self, arch: Architecture) -> None:
        random = torch.Generator().manual_seed(0)
        self.tensors = {}
        for name, shape in whole_shapes(arch).items():
            noise = torch.randn(shape, generator=random)
            if name.endswith("norm.weight"):
                self.tensors[name] = 1 + 0.3 * noise
            else:
                self.tensors[name] = 0.5 * noise if len(shape) == 1 else noise / shape[1] ** 0.5

    def read(self, name: str, box: Box, dtype: torch.dtype) -> Tensor:
        return self.tensors[name][box.slices()].to(dtype)


@pytest.fixture(params=ARCHITECTURES, name="arch")
def _arch(request: pytest.FixtureRequest) -> Architecture:
    return ARCHITECTURES[request.param]


@pytest.fixture(autouse=True)
def _exact_matrix_products() -> Iterator[None]:
    """fp32 means fp32 here: TF32 keeps ten bits of the mantissa."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)
    torch.compiler.reset()


def _ids(arch: Architecture, length: int = 257) -> Tensor:
    return torch.randint(arch.vocab_size, (2, length), generator=torch.Generator().manual_seed(1))


def _run(
    arch: Architecture,
    device: str,
    dtype: torch.dtype = torch.float32,
    prepare: Callable[[Decoder], None] = lambda model: None,
) -> tuple[Tensor, float, dict[str, Tensor]]:
    """Logits, loss and every gradient, as fp32 on the CPU."""
    model = load_whole(arch, RandomTensors(arch), device=device, dtype=dtype).train()
    prepare(model)
    ids = _ids(arch).to(device)
    logits = model(ids)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
    loss.backward()
    # A compiled block stays itself (`block.compile()`), so names do not change.
    gradients = {name: p.grad.float().cpu() for name, p in model.named_parameters() if p.grad is not None}
    return logits.detach().float().cpu(), loss.item(), gradients


def _compile_blocks(model: Decoder) -> None:
    for block in model.blocks:
        block.compile(fullgraph=True)


def _recompute(model: Decoder) -> None:
    for block in model.blocks:
        block.recompute = True


def _apart(ours: Tensor, reference: Tensor) -> float:
    """The root mean square of the difference as a part of the reference's."""
    return ((ours - reference).norm() / reference.norm()).item()


def _assert_close(
    ours: tuple[Tensor, float, dict[str, Tensor]],
    reference: tuple[Tensor, float, dict[str, Tensor]],
    *,
    logits: float,
    loss: float,
    gradients: float,
) -> None:
    assert _apart(ours[0], reference[0]) <= logits
    assert ours[1] == pytest.approx(reference[1], rel=loss)
    assert ours[2].keys() == reference[2].keys()
    apart = {name: _apart(ours[2][name], reference[2][name]) for name in reference[2]}
    assert {name: d for name, d in apart.items() if not d <= gradients} == {}


def test_fp32_equals_the_cpu(arch: Architecture) -> None:
    _assert_close(_run(arch, "cuda"), _run(arch, "cpu"), logits=1e-5, loss=1e-5, gradients=1e-4)


def test_bf16_is_near_fp32(arch: Architecture) -> None:
    # bf16 keeps 8 bits: 0.4 % a rounding, which three layers and their backward pass add up.
    ours = _run(arch, "cuda", torch.bfloat16)
    _assert_close(ours, _run(arch, "cpu"), logits=0.03, loss=0.01, gradients=0.06)


def test_recomputed_activations(arch: Architecture) -> None:
    ours = _run(arch, "cuda", prepare=_recompute)
    _assert_close(ours, _run(arch, "cuda"), logits=1e-6, loss=1e-6, gradients=1e-5)


@needs_compiler
@the_compilers_warnings
def test_compiled_blocks_in_fp32(arch: Architecture) -> None:
    ours = _run(arch, "cuda", prepare=_compile_blocks)
    _assert_close(ours, _run(arch, "cpu"), logits=1e-5, loss=1e-5, gradients=1e-4)


@needs_compiler
@the_compilers_warnings
def test_compiled_blocks_in_bf16(arch: Architecture) -> None:
    ours = _run(arch, "cuda", torch.bfloat16, _compile_blocks)
    _assert_close(ours, _run(arch, "cpu"), logits=0.03, loss=0.01, gradients=0.06)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_training_step_equals_the_cpus(arch: Architecture, dtype: torch.dtype) -> None:
    """The loss before and after one AdamW step; in bf16 the optimizer keeps the weights in fp32."""

    def losses(device: str, dtype: torch.dtype) -> list[float]:
        model = load_whole(arch, RandomTensors(arch), device=device, dtype=dtype).train()
        weights = list(model.parameters())
        masters = [p.detach().float().clone() for p in weights]
        optimizer = torch.optim.AdamW(masters, lr=1e-3, weight_decay=0.1, fused=True)
        ids = _ids(arch).to(device)
        found = []
        for _ in range(2):
            logits = model(ids)
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
            model.zero_grad()
            loss.backward()
            for master, p in zip(masters, weights, strict=True):
                assert p.grad is not None
                master.grad = p.grad.float()
            torch.nn.utils.clip_grad_norm_(masters, 1.0)
            optimizer.step()
            with torch.no_grad():
                for master, p in zip(masters, weights, strict=True):
                    p.copy_(master)
            found.append(loss.item())
        return found

    reference = losses("cpu", torch.float32)
    assert reference[1] < 0.99 * reference[0]
    tolerance = 1e-5 if dtype == torch.float32 else 0.01
    assert losses("cuda", dtype) == pytest.approx(reference, rel=tolerance)


EXPERTS = replace(
    ARCHITECTURES["qwen3"],
    family="qwen3_moe",
    num_experts=16,
    num_experts_per_tok=3,
    moe_intermediate_size=48,
)
DEEPSEEK = replace(
    EXPERTS,
    family="glm4_moe",
    sigmoid_router=True,
    first_k_dense_replace=1,
    n_shared_experts=1,
    n_group=4,
    topk_group=2,
    partial_rotary_factor=0.5,
)


@pytest.mark.parametrize("arch", [EXPERTS, DEEPSEEK], ids=lambda arch: arch.family)
def test_experts_in_bf16_on_the_device(arch: Architecture) -> None:
    logits, loss, gradients = _run(arch, "cpu")
    ours, again = (_run(arch, "cuda", torch.bfloat16) for _ in range(2))
    # Rounding sends a position to another expert where two get nearly the same: so the median of all positions.
    apart = (ours[0] - logits).norm(dim=-1) / logits.norm(dim=-1)
    assert apart.median() <= 0.04
    assert ours[1] == pytest.approx(loss, rel=0.02)
    assert ours[2].keys() == gradients.keys()
    assert torch.equal(ours[0], again[0]), "the order of a sum differs"


def test_generates_on_the_device(arch: Architecture) -> None:
    source = RandomTensors(arch)
    model = load_whole(arch, source, device="cuda")
    ids = generate(model, [1, 2, 3], tokens=16, seed=5)
    assert ids == generate(model, [1, 2, 3], tokens=16, seed=5)
    assert all(0 <= i < arch.vocab_size for i in ids)


def test_transformers_in_bf16_on_the_device(arch: Architecture) -> None:
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed", exc_type=ImportError
    )
    from seatrial.job.huggingface import config_from_architecture

    config_class, model_class = {
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }[arch.family]
    config = config_class(**config_from_architecture(arch, "bfloat16"))
    config._attn_implementation = "sdpa"
    theirs = model_class(config).to("cuda", torch.bfloat16)
    # `to` rounds the rotary frequencies as well, which `from_pretrained(dtype=...)` leaves in fp32.
    theirs.model.rotary_emb = type(theirs.model.rotary_emb)(config).to("cuda")
    source = RandomTensors(arch)
    theirs.load_state_dict({n: t.bfloat16() for n, t in source.tensors.items()}, strict=False)
    ids = _ids(arch).cuda()
    with torch.no_grad():
        expected = theirs(ids).logits.float()
        ours = load_whole(arch, source, device="cuda", dtype=torch.bfloat16)(ids).float()
    exact = _run(arch, "cpu")[0].cuda()
    assert _apart(ours, exact) <= 1.1 * _apart(expected, exact)
    assert _apart(ours, expected) <= 2 * _apart(expected, exact)
