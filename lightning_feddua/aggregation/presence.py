"""Which ranks are there, and why one has left: told through the process group's store, where exchanges cannot."""

from __future__ import annotations

import json
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from lightning.fabric import Fabric

from lightning_feddua._private import default_store, process_group_timeout
from lightning_feddua.errors import RankError, RemoteTraceback
from lightning_feddua.launch.exits import ending, ending_signal

# Under this prefix ranks write into the store: how many exchanges each has come to, and why the first one leaves.
_PREFIX = "lightning_feddua"
# Seconds that the store has to answer: its own process may be the one that hangs.
_STORE_SECONDS = 5.0
# How long a rank waits in an exchange before it asks whether another has left, and between two such questions.
_LOOK_SECONDS = 0.5
# How long ranks have to answer when an exchange has failed to which all had come.
_CALL_SECONDS = 3.0
# How long the rank that keeps the store stays for the others, who have yet to read there why it leaves.
_LINGER_SECONDS = 5.0


class _StoreTimeout(RuntimeError):
    """The store does not answer."""


class _Presence:
    """What this process knows of its place among the ranks; each call of a loop begins anew."""

    session = 0
    arrivals = 0
    # What the ranks have found each other by; None where somebody else has made the process group.
    store: Any = None
    # Whether the store has failed to answer once. Its client then hangs, and is not touched again.
    silent = False


def use_store(store: Any) -> None:
    """Write to a store from now on."""
    _Presence.store, _Presence.silent = store, False


def store_keeper() -> str:
    """Whose process the store is in, as the beginning of a sentence."""
    return f"{'torchrun' if uses_store_of_torchrun() else 'Rank 0'}, which keeps the ranks together,"


def _store() -> Any:
    return default_store() if _Presence.store is None else _Presence.store


@contextmanager
def session(fabric: Fabric) -> Iterator[None]:
    """Around all that a loop does on a rank: where it fails, the others are told why before this one leaves."""
    if fabric.world_size == 1:
        yield
        return
    _Presence.session += 1
    _Presence.arrivals = 0
    try:
        yield
    except BaseException as error:
        _leave(fabric, error)
        raise


@contextmanager
def exchange(fabric: Fabric) -> Iterator[None]:
    """Around an exchange that every rank takes part in: one that fails names the ranks that have not come to it.

    Raises:
        RankError: a rank has ended, or has not come within the process group's timeout, or has told why it leaves.
    """
    # A client's own collectives are in a world of one.
    if fabric.world_size == 1 or (torch.distributed.is_initialized() and torch.distributed.get_world_size() == 1):
        yield
        return
    _Presence.arrivals += 1
    own = _Presence.arrivals
    _write(f"arrivals/{fabric.global_rank}", str(own))
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, RankError):
            raise
        found = _explanation(fabric, own, " ".join(str(error).split()).rstrip("."))
        raise found from found.__cause__ or error


def patience(fabric: Fabric) -> timedelta:
    """How long ranks wait for each other."""
    return process_group_timeout(fabric.strategy) or torch.distributed.default_pg_timeout


def in_time(fabric: Fabric, function: Callable[[], Any]) -> Any:
    """The result of a function that needs the store, in which torch waits for ever if its process has been stopped."""
    found, error = _within(patience(fabric).total_seconds(), function)
    if error is not None:
        raise error
    return found


def wait(fabric: Fabric, work: Any) -> None:
    """Wait for a collective, and look now and then whether a rank has left that it waits for."""
    timeout = patience(fabric).total_seconds()
    deadline = time.monotonic() + timeout
    while not _completed(fabric, work, min(_LOOK_SECONDS, deadline - time.monotonic())):
        # What has been told is of no account where the exchange was complete without that rank.
        if (told := _told(fabric)) is not None and not _completed(fabric, work, _LOOK_SECONDS):
            raise told from told.__cause__
        if time.monotonic() > deadline:
            raise RuntimeError(f"it has waited for {timeout:g} s")


def uses_store_of_torchrun() -> bool:
    """Whether the process group's store is not with rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _completed(fabric: Fabric, work: Any, seconds: float) -> bool:
    """Wait for so long; whether that was enough. Raises what has failed."""
    if fabric.device.type == "cpu":
        try:
            work.wait(timedelta(seconds=max(seconds, 0.001)))
        except RuntimeError:
            # It can be waited for again if nothing has failed but the waiting.
            if not work.is_completed():
                return False
            work.wait()
        return True
    # A wait of NCCL that is too short ends the collective.
    end = time.monotonic() + seconds
    while not work.is_completed():
        if time.monotonic() > end:
            return False
        time.sleep(1e-4)
    work.wait()
    return True


def _explanation(fabric: Fabric, own: int, problem: str) -> BaseException:
    """Why an exchange has failed: what a rank has told, or else who is missing, which the others are then told."""
    told = _told(fabric)
    if told is not None:
        return told
    absent = _absent(fabric, own)
    if absent is None:
        text = f"{store_keeper()} has ended, or does not answer"
    elif not absent:
        text = "An exchange between ranks failed although all have come to it"
    else:
        names = f"Rank {absent[0]} has" if len(absent) == 1 else f"Ranks {', '.join(map(str, absent))} have"
        text = f"{names} ended, or not come to an exchange within the loop's `timeout`"
    # Another may have been faster.
    told = _told(fabric)
    if told is not None:
        return told
    _tell(fabric, {"text": f"{text} (rank {fabric.global_rank} was told: {problem}).", "absent": absent or []})
    return RankError(f"{text} (rank {fabric.global_rank} was told: {problem}).")


def _absent(fabric: Fabric, own: int) -> list[int] | None:
    """Ranks that have not come to an exchange or, where all have, do not answer a call; None if the store does not."""
    others = [rank for rank in range(fabric.world_size) if rank != fabric.global_rank]
    arrived = _ask(lambda: {rank: int(_read(f"arrivals/{rank}") or 0) for rank in others})
    if arrived is None:
        return None
    if (least := min(arrived.values(), default=own)) < own:
        # Others may have been kept in the exchange before by those that are missing there.
        return [rank for rank, count in arrived.items() if count == least]
    here = [rank for rank, count in arrived.items() if count == own]
    _write("call", str(own))
    _write(f"answers/{fabric.global_rank}", "here")
    return _awaited("answers", here, _CALL_SECONDS)


def _awaited(name: str, ranks: list[int], seconds: float) -> list[int] | None:
    """Those of some ranks that do not write something within a time; None if the store does not answer."""
    end = time.monotonic() + seconds
    while ranks and time.monotonic() < end:
        written = _ask(partial(_written, name, ranks))
        if written is None:
            return None
        ranks = [rank for rank in ranks if rank not in written]
        time.sleep(0.02 if ranks else 0)
    return ranks


def _written(name: str, ranks: list[int]) -> list[int]:
    return [rank for rank in ranks if _read(f"{name}/{rank}") is not None]


def _told(fabric: Fabric) -> BaseException | None:
    """What to raise where a rank has told why it leaves; and if one calls, answer."""
    found = _ask(lambda: (_read("failure"), _read("call")))
    if found is None or not any(found):
        return None
    _write(f"answers/{fabric.global_rank}", "here")
    if found[0] is None:
        return None
    record = json.loads(found[0])
    if record.get("signal"):
        return ending(fabric, record["signal"])
    error = RankError(record["text"])
    error.__cause__ = RemoteTraceback(record["trace"]) if record.get("trace") else None
    return error


def _leave(fabric: Fabric, error: BaseException) -> None:
    """Tell the others why this rank leaves, unless one was first."""
    if _Presence.store is None and not torch.distributed.is_initialized():
        return
    number = ending_signal(error)
    record: dict[str, Any] = {"signal": number, "absent": []}
    if number is None:
        trace = "".join(traceback.format_exception(error))
        name = type(error).__name__
        record |= {"text": f"Rank {fabric.global_rank} has failed with {name}: {error}", "trace": trace}
    _tell(fabric, record)
    _write(f"answers/{fabric.global_rank}", "here")
    _write(f"left/{fabric.global_rank}", "left")
    if fabric.global_rank != 0 or uses_store_of_torchrun():
        return
    told = _ask(lambda: _read("failure"))
    absent = json.loads(told)["absent"] if told else []
    others = [rank for rank in range(1, fabric.world_size) if rank not in absent]
    _awaited("left", others, _LINGER_SECONDS)


def _tell(fabric: Fabric, record: dict[str, Any]) -> None:
    _ask(lambda: _store().compare_set(_key("failure"), "", json.dumps(record)))


def _key(name: str) -> str:
    return f"{_PREFIX}/{_Presence.session}/{name}"


def _write(name: str, value: str) -> None:
    """Write without waiting for an answer. If the store is gone, so is its rank, and the next exchange says so."""
    if not _Presence.silent:
        with suppress(RuntimeError):
            _store().set(_key(name), value)


def _read(name: str) -> str | None:
    store = _store()
    return store.get(_key(name)).decode() if store.check([_key(name)]) else None


def _ask(function: Callable[[], Any]) -> Any:
    """What a function reads from the store; None if that takes too long or fails."""
    if _Presence.silent:
        return None
    found, error = _within(_STORE_SECONDS, function)
    _Presence.silent = isinstance(error, _StoreTimeout)
    return found


def _within(seconds: float, function: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """What a function returns or raises within a time, after which it goes on in a thread that nobody waits for."""
    results: list[tuple[Any, Exception | None]] = []

    def run() -> None:
        try:
            results.append((function(), None))
        except Exception as error:
            results.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else (None, _StoreTimeout(f"it has waited for {seconds:g} s"))
