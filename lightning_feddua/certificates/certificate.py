"""The certificate of a round: short digests of everything that the next round depends on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lightning_feddua.aggregation.collectives import all_gather
from lightning_feddua.certificates.fingerprint import fingerprint
from lightning_feddua.errors import ConfigurationError, RankError

if TYPE_CHECKING:
    from lightning_feddua.host.federation import Federation
    from lightning_feddua.loop import FederatedLoop

# What a certificate's digests are of.
PARTS = ("weights and buffers", "averaged iterate", "server's state", "clients' state", "cohort and settings")
_AVERAGE, _CLIENTS = 1, 3
_DIGITS = 12
# Digests are computed with this modulus where ranks add up theirs.
_MODULUS = 1 << 64


def certify(loop: FederatedLoop, federation: Federation, cohort: Sequence[int]) -> str:
    """The certificate of the round that has just ended, the same on every rank; a collective.

    Two runs have the same certificate after a round if they have the same weights and buffers, the same state of the
    server and of the clients, to the bit, and if they came there by the same cohort, settings and data.

    Args:
        loop: the loop.
        federation: its module and clients.
        cohort: the round's clients.

    Raises:
        RankError: the ranks do not agree.
    """
    came = f"{loop.run.round} {list(cohort)} {loop.identity_digest} {loop.backend.engine_name}"
    return "-".join(_digests_of_all_ranks(loop, federation, came))


def check_state(loop: FederatedLoop, federation: Federation, path: Path) -> None:
    """One clear error if a state that was loaded is not the one that its last certificate is of; a collective.

    Args:
        loop: the loop.
        federation: its module and clients.
        path: where the state comes from.
    """
    certificates = loop.run.certificates
    if certificates and certificates[-1]:
        known, found = certificates[-1].split("-"), _digests_of_all_ranks(loop, federation, None)
        # A run that is saved after a failure has no average, and needs none to be resumed.
        untold = [len(PARTS) - 1, *([_AVERAGE] if loop.run.average is None else [])]
        wrong = [part for i, part in enumerate(PARTS) if i not in untold and known[i] != found[i]]
        if wrong:
            raise ConfigurationError(
                f"The checkpoint `{path}` is not what round {len(certificates) - 1} has left: other"
                f" {' and '.join(wrong)}.",
                "Resume from an older checkpoint, or start afresh.",
            )


def _digests_of_all_ranks(loop: FederatedLoop, federation: Federation, came: Any) -> list[str]:
    run, fabric = loop.run, loop.fabric
    states = [part.state_dict() for part in (loop.client, federation.schedules, *(loop.transforms or []))]
    weights = [run.weights, federation.buffers.global_values(), federation.other_parameters.still]
    own = digests(weights, run.average, loop.server.state_dict(), states, came)
    # What clients keep is on the rank that has trained them last.
    kept = loop.backend.kept_fingerprint()
    if fabric.world_size > 1:
        numbers = [*(int(one, 16) for one in own), _signed(kept)]
        mine = torch.tensor(numbers, dtype=torch.int64, device=fabric.device)
        gathered = mine.new_empty(fabric.world_size * len(mine))
        all_gather(fabric, gathered, mine)
        rows = gathered.view(fabric.world_size, -1).tolist()
        _check([[f"{number:0{_DIGITS}x}" for number in row[:-1]] for row in rows], run.round)
        kept = sum(row[-1] for row in rows)
    kept %= _MODULUS
    if kept:
        own[_CLIENTS] = _digest(f"{own[_CLIENTS]} {kept}")
    return own


def digests(*parts: Any) -> list[str]:
    """A digest of each part, with one wait for the device in all.

    Args:
        *parts: tensors and plain values, nested in any way.
    """
    tensors = [tensor for part in parts for tensor in _tensors(part)]
    numbers = [fingerprint(tensor) for tensor in tensors]
    waiting = [number for number in numbers if isinstance(number, Tensor)]
    known = iter(torch.stack(waiting).tolist() if waiting else ())
    found = iter([next(known) if isinstance(number, Tensor) else number for number in numbers])
    return [_digest(_text(part, found)) for part in parts]


def differing(one: str, other: str) -> list[str]:
    """In which parts two certificates differ."""
    pairs = zip(PARTS, one.split("-"), other.split("-"), strict=True)
    return [part for part, mine, theirs in pairs if mine != theirs]


def _check(found: Sequence[Sequence[str]], round: int) -> None:
    votes = ["-".join(each) for each in found]
    if len(set(votes)) == 1:
        return
    # The first rank is believed where there is no majority.
    most = max(votes, key=votes.count)
    wrong = [rank for rank, vote in enumerate(votes) if vote != most]
    others = "the other ranks" if votes.count(most) > 1 else "rank 0"
    names = f"Rank {wrong[0]} differs" if len(wrong) == 1 else f"Ranks {', '.join(map(str, wrong))} differ"
    raise RankError(
        f"{names} from {others} after round {round} in: {', '.join(differing(votes[wrong[0]], most))}. Nothing of this"
        " round is saved. Look for a faulty device, or for code that does not do the same on every rank."
    )


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _text(value: Any, fingerprints: Iterator[int]) -> str:
    """A value in words, with fingerprints in place of tensors, which come in the order of :func:`_tensors`."""
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {value.dtype} {next(fingerprints) % _MODULUS:x}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key!r}:{_text(item, fingerprints)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(_text(item, fingerprints) for item in value) + "]"
    return repr(value.item() if isinstance(value, np.generic) else value)


def _signed(number: int) -> int:
    """A number modulo 2**64, as a 64-bit integer holds it."""
    return (number + _MODULUS // 2) % _MODULUS - _MODULUS // 2


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]
