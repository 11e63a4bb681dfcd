"""Digests of the clients' data, by which a changed sample is noticed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lightning_feddua._private import tree_leaves
from lightning_feddua.checkpoints.data_contents import Contents, array_bytes, digest
from lightning_feddua.data.partition import Partition
from lightning_feddua.engines.time_limit import time_limit
from lightning_feddua.randomness import Purpose, seed_generators

if TYPE_CHECKING:
    from lightning_feddua.host.federation import Federation

# Clients whose samples are read, and samples of each.
_PROBED_CLIENTS = 16
_PROBED_SAMPLES = 4
_TOLERANCE = 1e-4
# For more clients than these, one digest stands for all of them.
_NAMED_CLIENTS = 10_000


def data_digests(federation: Federation, volatile: Sequence[str] | None = None) -> dict[str, Any]:
    """What tells whether the clients' data is the same, to the bit.

    What datasets keep in memory is looked at as a whole. Of what is computed or read from files when it is asked for, a
    few samples of a few clients are.

    Args:
        federation: the module and its clients.
        volatile: attributes that do not count; None to find them. They change when samples are read.
    """
    places = _probed_places(federation)
    clients = federation.datamodule.clients
    # Datasets that are made when they are asked for are none of these.
    kept = [clients.dataset] if isinstance(clients, Partition) else []
    if type(clients) is dict:
        kept = [clients[federation.client_ids[place]] for place in places]
    every = Contents()
    before = {key: state for dataset in kept for key, state in every.states(dataset).items()}
    probes = [_probe(federation, place) for place in places]
    after = {key: state for dataset in kept for key, state in every.states(dataset).items()}
    moved = {name for (_, name), _ in before.items() ^ after.items()}
    volatile = sorted(moved) if volatile is None else volatile
    contents = Contents(volatile)
    each: list[str] = []
    if isinstance(clients, Partition):
        each = [contents.digest(clients.dataset), digest([array_bytes(clients.all_rows)])]
    elif isinstance(clients, dict):
        each = [contents.digest(dataset) for dataset in clients.values()]
    return {
        "volatile": list(volatile),
        "contents": each if len(each) <= _NAMED_CLIENTS else [digest(map(str.encode, each))],
        "probes": probes,
    }


def differing_client(before: Mapping[str, Any], now: Mapping[str, Any], federation: Federation) -> str | None:
    """Where the data is not what it was, as a phrase; None if it is.

    Args:
        before: the digests of the run that was saved.
        now: those of this one.
        federation: the module and its clients.
    """
    if before["volatile"] != now["volatile"]:
        # A dataset that has been in use knows more than a new one, and has no more to learn.
        now = data_digests(federation, before["volatile"])
    ids, clients = federation.client_ids, federation.datamodule.clients
    places = [i for i, pair in enumerate(zip(before["contents"], now["contents"], strict=False)) if len({*pair}) > 1]
    if len(before["contents"]) != len(now["contents"]):
        return "the clients' samples"
    if places and len(now["contents"]) == len(ids) and isinstance(clients, dict):
        return f"the data of client `{ids[places[0]]}`"
    if places and isinstance(clients, Partition):
        return ("the dataset", "the clients' rows")[places[0]]
    for place, one, other in zip(_probed_places(federation), before["probes"], now["probes"], strict=True):
        if not _agree(one, other):
            return f"the data of client `{ids[place]}`"
    return "the clients' samples" if places else None


def _probed_places(federation: Federation) -> list[int]:
    return np.unique(np.linspace(0, len(federation.client_ids) - 1, _PROBED_CLIENTS).astype(int)).tolist()


def _probe(federation: Federation, place: int) -> list[list[float]]:
    """Sums over each tensor of a client's first samples; none where they differ between two looks."""
    first, second = (_sums(federation, place) for _ in range(2))
    # As text, in which NaN is the same as NaN.
    if repr(first) == repr(second):
        return first
    federation.unsteady_client = federation.unsteady_client or str(federation.client_ids[place])
    return []


def _sums(federation: Federation, place: int) -> list[list[float]]:
    seed_generators(0, 0, place, Purpose.EVALUATION, federation.fabric.device)
    try:
        with time_limit(federation.work.timeout, str(federation.client_ids[place])):
            data = federation.client_data(place)
            batch = data.batch(np.arange(min(len(data), _PROBED_SAMPLES)))
    except Exception:
        # The run itself fails in the same way, and says so with the right client and round.
        return []
    sums = []
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor) and not leaf.is_complex():
            values = leaf.detach().cpu().to(torch.float64).flatten()
            # Weights, so that an exchange of two values shows.
            ramp = torch.arange(1, len(values) + 1, dtype=torch.float64) / max(len(values), 1)
            sums.append([values.sum().item(), (values * ramp).sum().item(), values.abs().sum().item()])
    return sums


def _agree(before: list[list[float]], now: list[list[float]]) -> bool:
    """Whether samples are the same, up to the roundings by which two machines may compute them."""
    if not before or not now:
        return True
    if len(before) != len(now):
        return False
    sums = np.array([before, now])
    return bool(np.allclose(sums[0], sums[1], rtol=0, atol=_TOLERANCE * sums[0][:, -1:] + 1e-12, equal_nan=True))
