"""What a DataLoader is made of, where that has a state of its own."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from lightning_feddua._private import end_workers


def reseed(loader: Iterable[Any]) -> None:
    """Seed the generators that a loader, its samplers and its dataset have of their own, from the global ones."""
    seed = int(torch.randint(2**31, ()).item())
    for part in parts_of(loader):
        for value in list(getattr(part, "__dict__", {}).values()):
            if isinstance(value, torch.Generator):
                value.manual_seed(seed)
            elif isinstance(value, np.random.Generator):
                value.bit_generator.state = type(value.bit_generator)(seed).state
            elif isinstance(value, np.random.RandomState | random.Random):
                value.seed(seed)


@contextmanager
def unread(loader: Iterable[Any] | None) -> Iterator[None]:
    """Leave a loader, its samplers and its dataset as if nobody had read from them.

    Attributes are as before, and lists, dicts and sets have what they had. An iterator or a file that a dataset keeps
    open cannot be turned back.

    Args:
        loader: the loader; None for nothing.
    """
    parts = [] if loader is None else parts_of(loader)
    # Datasets may be wrapped in others.
    while parts and (inner := getattr(parts[-1], "__dict__", {}).get("dataset")) is not None:
        parts.append(inner)
    before = [(vars(part), dict(vars(part))) for part in parts if hasattr(part, "__dict__")]
    kinds = (list, dict, set)
    contents = {id(v): (v, v.copy()) for _, known in before for v in known.values() if type(v) in kinds}
    try:
        yield
    finally:
        if isinstance(loader, DataLoader):
            end_workers(loader)
        for present, known in before:
            present.clear()
            present.update(known)
        for value, content in contents.values():
            value.clear()
            (value.extend if isinstance(value, list) else value.update)(content)


def set_epoch(loader: Iterable[Any], epoch: int) -> None:
    """Tell samplers and datasets that shuffle by the number of the pass, as Trainer does."""
    for part in parts_of(loader):
        if callable(getattr(part, "set_epoch", None)):
            part.set_epoch(epoch)


def parts_of(loader: Any) -> list[Any]:
    """A loader, its samplers, and its dataset."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    own = [loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]
    parts = {id(part): part for part in (*own, getattr(loader, "dataset", None)) if part is not None}
    return list(parts.values())
