"""What stateful algorithms keep for each client: made when first needed, on the rank that trained the client last."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping, Sequence
from typing import Any, Literal

import torch
from lightning.fabric import Fabric
from torch import Tensor

from lightning_feddua.aggregation.collectives import gather_objects, pass_on
from lightning_feddua.aggregation.disk_rows import DiskRows
from lightning_feddua.certificates.fingerprint import fingerprint
from lightning_feddua.errors import RankError

# How many clients' vectors are on their way to rank 0 at a time.
_AT_ONCE = 64


class ClientStates:
    """A few vectors of each client, held by one rank and moved when another rank trains the client.

    A client that never took part costs nothing. Which rank holds which client follows from the cohorts alone, so that
    every rank knows it without being told.

    Args:
        fabric: for the moves.
        names: the vectors.
        size: the number of elements of each.
        dtype: their dtype.
        keep: ``"memory"``, or ``"disk"`` for a temporary file.
    """

    def __init__(
        self,
        fabric: Fabric,
        names: Sequence[str],
        size: int,
        dtype: torch.dtype,
        keep: Literal["memory", "disk"] = "memory",
    ) -> None:
        self._fabric = fabric
        self.names = tuple(names)
        self._shape = (len(self.names), size)
        self._dtype = dtype
        self._on_disk = keep == "disk" and bool(self.names)
        self._rows = self._new_rows()
        self._fingerprints: dict[int, int] = {}
        # The rank that holds each client; the same on every rank.
        self._holders: dict[int, int] = {}
        # Clients of this round whose vectors are not what was put here.
        self._damaged: list[int] = []

    def _new_rows(self) -> MutableMapping[int, Tensor]:
        return DiskRows(self._shape, self._dtype) if self._on_disk else {}

    @property
    def fingerprint(self) -> int:
        """A number that depends on every bit of the vectors on this rank; those of all ranks add up to that of all."""
        return sum(self._fingerprints.values())

    def __len__(self) -> int:
        return len(self._holders)

    def get(self, client: int) -> Tensor:
        """A copy of a client's vectors on the device, shape (names, size); zeros for a client without any."""
        row = self._rows.get(client)
        if row is None:
            return torch.zeros(self._shape, dtype=self._dtype, device=self._fabric.device)
        # What is read from the disk is a copy already.
        return row.to(self._fabric.device, copy=not self._on_disk)

    def _empty(self) -> Tensor:
        """Memory for what arrives."""
        return torch.empty(self._shape, dtype=self._dtype, device=self._fabric.device)

    def put(self, client: int, vectors: Tensor) -> None:
        """Keep a client's vectors."""
        row = vectors.detach().to("cpu", self._dtype)
        if client in self._rows and not self._on_disk:
            self._rows[client].copy_(row)
        else:
            self._rows[client] = row if self._on_disk or row.data_ptr() != vectors.data_ptr() else row.clone()
        self._fingerprints[client] = self._fingerprint_of(client, row)

    def _fingerprint_of(self, client: int, row: Tensor) -> int:
        return int(fingerprint(row, place=client))

    def _changed(self, clients: Iterable[int]) -> list[int]:
        """Clients whose vectors are not those that were put here."""
        return [
            client
            for client in clients
            if self._fingerprint_of(client, self._rows[client]) != self._fingerprints[client]
        ]

    def check(self) -> None:
        """One clear error if vectors that were due in the round have changed in this rank's memory or on its disk."""
        if self._damaged:
            raise _changed_error(self._damaged[0], self._fabric.global_rank)

    def move(self, hands: Sequence[Sequence[int]]) -> None:
        """Bring the vectors of a cohort to the ranks that will train it. Every rank calls this with the same hands.

        Args:
            hands: for each rank, the clients that it trains.
        """
        if not self.names:
            return
        own = self._fabric.global_rank
        due = [client for hand in hands for client in hand if client in self._rows]
        self._damaged = self._changed(due)
        moves, sent, arrivals = 0, [], []
        for rank, hand in enumerate(hands):
            for client in hand:
                holder = self._holders.get(client, rank)
                self._holders[client] = rank
                if holder == rank:
                    continue
                moves += 1
                if holder == own:
                    sent.append((client, self.get(client), rank))
                elif rank == own:
                    arrivals.append((client, self._empty(), holder))
        if moves:
            pass_on(self._fabric, [each[1:] for each in sent], [each[1:] for each in arrivals])
        for client, *_ in sent:
            # A client that failed whenever it took part has none.
            self._rows.pop(client, None)
            self._fingerprints.pop(client, None)
        for client, vectors, _ in arrivals:
            self.put(client, vectors)

    def state_dict(self) -> dict[str, Any]:
        """All clients' vectors on rank 0, those that a rank holds on others; a collective."""
        found = gather_objects(self._fabric, self._changed(self._rows)) if self.names else []
        for rank, clients in enumerate(found):
            if clients:
                raise _changed_error(clients[0], rank)
        own, arrived = self._fabric.global_rank, self._new_rows()
        away = [(client, holder) for client, holder in sorted(self._holders.items()) if holder != 0]
        for start in range(0, len(away), _AT_ONCE):
            some = away[start : start + _AT_ONCE]
            sent = [(self.get(client), 0) for client, holder in some if holder == own]
            received = [(client, self._empty(), holder) for client, holder in some] if own == 0 else []
            pass_on(self._fabric, sent, [each[1:] for each in received])
            for client, vectors, _ in received:
                arrived[client] = vectors.cpu()
        rows = [kept.mapped() if isinstance(kept, DiskRows) else kept for kept in (self._rows, arrived)]
        return {"names": list(self.names), "rows": {**rows[0], **rows[1]}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from the state of another run, be there as many ranks as in that or not.

        Raises:
            ValueError: it has other vectors than these.
        """
        if list(state["names"]) != list(self.names):
            raise ValueError(f"its clients keep {state['names']!r:.100}")
        for client, row in state["rows"].items():
            fits = isinstance(row, Tensor) and row.shape == self._shape and row.dtype == self._dtype
            if type(client) is not int or client < 0 or not fits:
                raise ValueError(f"its vectors of client {client!r:.100} do not fit")
        self._rows, self._fingerprints = self._new_rows(), {}
        self._holders = {client: i % self._fabric.world_size for i, client in enumerate(sorted(state["rows"]))}
        for client, holder in self._holders.items():
            if holder == self._fabric.global_rank:
                self.put(client, state["rows"][client])


def _changed_error(client: int, rank: int) -> RankError:
    return RankError(
        f"What the client at place {client} keeps has changed on rank {rank} since the client left it there. Nothing of"
        " it is saved; look for a faulty memory or disk, and resume from the last checkpoint."
    )
