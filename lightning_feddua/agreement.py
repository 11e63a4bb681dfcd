"""Whether two ways to compute something agree, and what to say where the faster one is not used."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_feddua.vectors import scalar_dtype

# Largest relative difference of updates that counts as the same local training. In float32 a flipped ReLU alone makes
# 1 % of a deep network's update; a wrong gradient makes 100 %.
UPDATE_TOLERANCE = {torch.float64: 1e-9, torch.float32: 0.05, torch.bfloat16: 0.1, torch.float16: 0.05}
# The same for a few elementwise operations on vectors.
ELEMENTWISE_TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def relative_difference(expected: Sequence[Tensor], found: Sequence[Tensor]) -> float:
    """The largest ``‖a − b‖`` over pairs of tensors, relative to the largest ``‖a‖``; NaN where one is not finite.

    >>> relative_difference([torch.tensor([3.0, 4.0])], [torch.tensor([3.0, 4.5])])
    0.1
    """
    scale = max(_norm(a) for a in expected)
    differences = [_norm(b - a) for a, b in zip(expected, found, strict=True)]
    if not all(map(math.isfinite, differences)):
        return math.nan
    return max(differences) / (scale or 1.0)


def short_reason(error: BaseException) -> str:
    """An exception's message as part of a warning: one line without a full stop, not too long."""
    return " ".join(str(error).split())[:200].rstrip(".")


def warn_not_compiled(what: str, reason: str) -> None:
    """Say that something runs eagerly although compilation was asked for.

    Args:
        what: the subject of the sentence.
        reason: why, as the end of a sentence.
    """
    rank_zero_warn(f"{what} runs eagerly and is not compiled: {reason}.")


def _norm(tensor: Tensor) -> float:
    return torch.linalg.vector_norm(tensor, dtype=scalar_dtype(tensor.device)).item()
