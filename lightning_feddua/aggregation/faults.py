"""Clients that fail: the run ends with one error on all ranks, or continues without them."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

from lightning.fabric import Fabric
from torch import Tensor

from lightning_feddua.aggregation.collectives import gather_objects
from lightning_feddua.aggregation.finite import flaw_of, flawed_sum, is_finite, told
from lightning_feddua.aggregation.update import ClientUpdate, RoundUpdate
from lightning_feddua.engines.base import Client, GlobalState
from lightning_feddua.engines.time_limit import tried_twice
from lightning_feddua.errors import (
    ClientError,
    ConfigurationError,
    DivergenceError,
    NotFiniteError,
    RankError,
    RemoteTraceback,
)

# After so many rounds in a row in which every client failed, the fault is not the clients'.
FAILED_ROUNDS = 3
_REMEDY = (
    "Try a smaller local learning rate, or `gradient_clip_val`, and look for such values in its data;"
    ' `on_client_error="skip"` leaves such clients out.'
)


class ClientFaults:
    """Sorts the clients of a rank into those that count and those that have failed.

    A client fails by an exception, or by an update that is not finite. What has failed never reaches the round's sums.
    An error that is to end the run is held until the round's all-reduce, in which the other ranks are waiting.

    Args:
        fabric: for the exchange of errors.
        action: ``"raise"``, or ``"skip"`` to leave out clients that fail.
    """

    def __init__(self, fabric: Fabric, action: Literal["raise", "skip"]) -> None:
        self._fabric = fabric
        self._skips = action == "skip"
        self.start()

    def start(self) -> None:
        """Begin a round."""
        self.error: Exception | None = None
        self._failed: set[str] = set()
        # Whether all ranks have raised at once.
        self.raised_together = False

    def remaining(self, clients: Sequence[Client]) -> list[Client]:
        """Those that have not failed so far; none where the run is about to end."""
        return [] if self.error is not None else [client for client in clients if client.name not in self._failed]

    def fail(self, name: str, round: int, stage: str, exception: Exception) -> None:
        """Count an exception as a client's failure."""
        error = ClientError(name, round, stage, exception)
        self._note(error)
        if self.error is error and isinstance(exception, ConfigurationError):
            # It names the client and says what to do.
            self.error = exception

    def accepted(
        self, results: Iterable[ClientUpdate | ClientError], state: GlobalState, global_floats: Tensor | None
    ) -> Iterator[ClientUpdate]:
        """The updates that count. Ends at the first failure where that ends the run.

        Args:
            results: what an engine gives.
            state: the global state of the round.
            global_floats: the float buffers that clients started from.
        """
        for result in results:
            # The synchronisation with the device that this takes is paid only where clients may be left out.
            if isinstance(result, ClientUpdate):
                flaw = flaw_of(result, global_floats, update_too=self._skips)
                if not self._skips:
                    result.flaw = flaw
                elif flaw is not None and (found := flaw.item()):
                    result = ClientError(result.client.name, state.round, "local training", f"{told(found)}. {_REMEDY}")
            if isinstance(result, ClientError):
                self._note(result)
            else:
                yield result
            if self.error is not None:
                return

    def gradients(
        self, clients: Sequence[Client], state: GlobalState, of_client: Callable[[Client, GlobalState], Tensor]
    ) -> Iterator[tuple[Tensor, float, int]]:
        """The gradients of clients, each with its weight and lane, for their mean; without those of clients that fail.

        Args:
            clients: whose.
            state: the global state of the round.
            of_client: computes one.
        """
        stage = "the gradient of all its data"
        for client in clients:
            if self.error is not None:
                return
            try:
                gradient = tried_twice(partial(of_client, client, state), state.work.timeout, client.name)
            except Exception as exception:
                self._note(ClientError(client.name, state.round, stage, exception))
                continue
            # In a mean, it would be the fault of all.
            if not is_finite(gradient):
                self._note(DivergenceError(client.name, state.round, stage, f"it is not finite. {_REMEDY}"))
                continue
            yield gradient, client.weight, client.lane

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep an exception of the block for :meth:`check`."""
        try:
            yield
        except Exception as exception:
            self.error = exception

    def check(
        self,
        failed: bool,
        update: RoundUpdate,
        flaws: Mapping[int, float],
        global_floats: Tensor | None,
        names: Callable[[int], str],
        round: int,
    ) -> None:
        """Raise what has failed on any rank: the rank itself its own exception, the others one that names it.

        Args:
            failed: whether a rank has an error; the same on every rank.
            update: the round's.
            flaws: what is not finite of clients, besides their updates, by their place in the cohort.
            global_floats: the float buffers that clients started from.
            names: gives a client's name by its place in the cohort.
            round: the round.
        """
        if failed:
            self._raise_together()
        if not self._skips:
            # Nobody has looked at the updates yet, and now it costs nothing.
            for place in (~update.squared_norms.isfinite()).nonzero().flatten().tolist():
                flaws = {**flaws, place: 1}
        for place in sorted(flaws):
            self.raised_together = True
            raise DivergenceError(names(place), round, "local training", f"{told(flaws[place])}. {_REMEDY}")
        if (sums := flawed_sum(update, global_floats)) is not None:
            self._raise_sum(sums, round)

    def check_mean(self, gradient: Tensor, round: int) -> None:
        """One clear error on all ranks if the mean of the clients' gradients is not finite."""
        if not is_finite(gradient):
            self._raise_sum("gradients", round)

    def _raise_sum(self, what: str, round: int) -> None:
        self.raised_together = True
        raise NotFiniteError(
            f"The sum of the clients' {what} in round {round} is not finite, although each of them is."
            " Try a smaller local learning rate, `max_update_norm`, or a wider `precision`.",
            round,
        )

    def _raise_together(self) -> None:
        error = self.error
        self.raised_together = True
        own = None if error is None else (str(error), "".join(traceback.format_exception(error)))
        found = gather_objects(self._fabric, own)
        if error is not None:
            raise error
        rank, (message, trace) = next((rank, told) for rank, told in enumerate(found) if told is not None)
        raise RankError(f"Rank {rank} has failed: {message}") from RemoteTraceback(trace)

    def _note(self, error: ClientError) -> None:
        self._failed.add(error.client_id)
        if not self._skips:
            self.error = error
            return
        # On the rank where it happened, which alone knows.
        warnings.warn(
            f"Client `{error.client_id}` is left out of round {error.round}, having failed during {error.stage}:"
            f" {error.problem}",
            stacklevel=2,
        )


def check_history(history: Sequence[Mapping[str, Any]]) -> None:
    """One clear error where every client of several rounds in a row has failed."""
    last = history[-FAILED_ROUNDS:]
    if len(last) == FAILED_ROUNDS and all(row["clients"] == 0 < row.get("skipped_clients", 0) for row in last):
        raise RuntimeError(
            f"All clients have failed in {FAILED_ROUNDS} rounds in a row, the last in round {last[-1]['round']}."
            " The warnings above say why each did."
        )
