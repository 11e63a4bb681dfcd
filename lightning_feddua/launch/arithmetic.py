"""How torch computes during a run, where settings fix it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from lightning_feddua.settings import RunSettings


@contextmanager
def fixed_arithmetic(settings: RunSettings, device: torch.device) -> Iterator[None]:
    """Use the number of threads in the settings and, for a reproducible run on a GPU, deterministic algorithms.

    Args:
        settings: the loop's.
        device: where local steps run.
    """
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        if settings.reproducible and device.type != "cpu":
            torch.use_deterministic_algorithms(True)
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
