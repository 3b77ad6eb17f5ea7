"""Model FLOPs utilisation."""

from __future__ import annotations


def mfu(flops_per_token: float, tokens_per_s_per_gpu: float, peak: float | None) -> float | None:
    """Model FLOP/s as a share of the dense `peak` (FLOP/s of one GPU), 0..1; None if the peak is unknown.

    Recomputed activations do not count (arXiv:2204.02311, appendix B); `Architecture.flops_per_token` gives the FLOPs.
    """
    if peak is None:
        return None
    return flops_per_token * tokens_per_s_per_gpu / peak
