"""The first hour on GPUs: a 7B model on this machine's, tokens per second, MFU and peak memory of Seatrial beside its peers.

    python bench/gpu.py --peers-python PEERS/bin/python [--gpus N] [--precision bf16|fp8]
        [--fp8-scaling rowwise|tensorwise|mxfp8] [--layers N] [--microbatch 1] [--recompute]

Runs bench/peers.py, which explains the contestants and how they are installed, with qwen2.5-7b, then llama3-8b, which torchtitan has too:
sequences of 4,096, 8 microbatches a step, FSDP2 over all GPUs. Without --layers each model gets as many layers as have their fp32
weights, gradients and moments in 5/6 of the GPUs' memory; the rest is for activations, and if it does not suffice the table
says so: then give --layers, or --recompute. MFU is Seatrial's (`hardware/mfu.py`) for all: model FLOPs, attention counted as causal, of the
dense peak of the precision. --device cpu runs this code with a small model and says nothing about GPUs. No figure of it exists yet:
it has not run on a GPU.
"""

from __future__ import annotations

import argparse
import sys

import torch

import peers
from seatrial.hardware.devices import cuda_device_count
from seatrial.job.models import model_presets

MODELS = ("qwen2.5-7b", "llama3-8b")
STATE = 16  # bytes a parameter: fp32 weight, gradient and two moments


def layers_in(model: str, memory: float) -> int:
    """How many of the model's layers have their states in 5/6 of `memory` bytes; 0: not even its embeddings."""
    arch = model_presets()[model]
    layer = STATE * arch.layer_parameters()
    ends = STATE * arch.parameters() - arch.num_hidden_layers * layer
    return max(0, min(arch.num_hidden_layers, int((memory * 5 / 6 - ends) // layer)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--peers-python", default=sys.executable, help="the interpreter that has the peers")
    parser.add_argument("--gpus", type=int, help="default: all of this machine")
    parser.add_argument("--precision", choices=["bf16", "fp8"], default="bf16")
    parser.add_argument("--fp8-scaling", choices=["rowwise", "tensorwise", "mxfp8"], default="rowwise")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--microbatch", type=int, default=1, help="sequences a GPU works on at once")
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    options = parser.parse_args()
    dry = options.device == "cpu"
    there = 1 if dry else cuda_device_count()
    gpus = options.gpus or there
    if gpus == 0 or (not dry and gpus > there):
        print(f"this machine has {there} GPUs; bench/gpu.py needs {max(1, gpus)}", file=sys.stderr)
        return 2
    codes = []
    for model in ("small",) if dry else MODELS:
        layers = options.layers
        if layers is None and not dry:
            layers = layers_in(model, gpus * torch.cuda.get_device_properties(0).total_memory)
        if layers == 0:
            print(f"{model}: not even its embeddings fit", file=sys.stderr)
            codes.append(2)
            continue
        given = {
            "model": model,
            "device": options.device,
            "precision": options.precision,
            "fp8-scaling": options.fp8_scaling,
            "layouts": "1" if gpus == 1 else f"fsdp{gpus}",
            "sequence": 32 if dry else 4096,
            "microbatch": options.microbatch,
            "batch": gpus * options.microbatch * 8,
            "warm-up": 2 if dry else 5,
            "steps": 2 if dry else 10,
            "rounds": options.rounds,
            "peers-python": options.peers_python,
            **({} if layers is None else {"layers": layers}),
        }
        command = [word for name, value in given.items() for word in (f"--{name}", str(value))]
        codes.append(peers.run(peers.arguments().parse_args(command + ["--recompute"] * options.recompute)))
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
