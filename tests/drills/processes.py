"""Faults of processes: kills, signals, clocks, two runs in one folder."""

import itertools
import os
import random
import signal
import time
from functools import partial

import torch

from tests.drills.drill import ROUNDS, SECONDS, At
from tests.forked_ranks import assert_same


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def kill_between_rounds(drill):
    hook = drill.draw.choice(["round start", "round end", "aggregate"])
    world_size = drill.draw.randint(1, 3)
    at = At(hook, drill.draw.randrange(ROUNDS), drill.draw.randrange(world_size), kill)
    drill.fail(at, world_size=world_size)
    return drill.recover()


def kill_inside_a_client(drill):
    world_size = drill.draw.randint(1, 3)
    at = At("client", drill.draw.randrange(ROUNDS), drill.draw.randrange(world_size), kill, drill.draw.randrange(2))
    drill.fail(at, world_size=world_size)
    return drill.recover()


def kill_between_the_files(drill):
    # Each round has a table and a checkpoint with two names.
    nth = drill.draw.randrange(2, 38)

    def before():
        calls = itertools.count()

        def counted(original, *args, **kwargs):
            return kill() if next(calls) == nth else original(*args, **kwargs)

        for name in ("fsync", "replace", "link", "unlink"):
            setattr(os, name, partial(counted, getattr(os, name)))

    drill.fail(before=before)
    return drill.recover()


def kill_in_the_all_reduce(drill):
    world_size = drill.draw.randint(2, 3)
    victim, nth = drill.draw.randrange(world_size), drill.draw.randrange(1, ROUNDS)

    def before():
        if int(os.environ["RANK"]) == victim:
            calls, original = itertools.count(), torch.distributed.all_reduce

            def all_reduce(*args, **kwargs):
                work = original(*args, **kwargs)
                return kill() if next(calls) == nth else work

            torch.distributed.all_reduce = all_reduce

    ranks = drill.fail(before=before, world_size=world_size)
    others = [ranks.output(rank) for rank in range(world_size) if rank != victim]
    assert all("RankError" in output or "Connection" in output for output in others), others
    return drill.recover()


def sigterm(drill):
    world_size = drill.draw.randint(1, 3)
    at = At("client", drill.draw.randrange(ROUNDS), drill.draw.randrange(world_size), lambda: signal.raise_signal(15))
    ranks = drill.fail(at, world_size=world_size)
    assert ranks.codes == [143] * world_size, ranks.codes
    assert "SIGTERM: saved after" in ranks.output(0), ranks.output(0)
    return drill.recover()


def two_runs_at_once(drill):
    slow = At("client", 2, 0, lambda: time.sleep(0.2))
    first = drill.start(slow, world_size=1, ckpt_path=None)
    (drill.folder / "second").mkdir()
    later = drill.draw.choice([None, "last"])
    while later == "last" and first.running() and drill.finished_rounds() < 2:
        time.sleep(0.01)
    second = drill.start(world_size=1, ckpt_path=later, folder=drill.folder / "second")
    codes = [*first.wait(SECONDS), *second.wait(SECONDS)]
    assert codes[0] == 0, first.output(0)
    refused = codes[1] == 1 and "is still being continued by another process" in second.output(0)
    assert codes[1] == 0 or refused, second.output(0)
    assert_same(drill.result(), drill.expected)
    return "the second is refused" if refused else "each in a folder of its own, the same bits"


def clock_jumps(drill):
    jumps = random.Random(drill.draw.random())

    def before():
        original = time.time
        time.time = lambda: original() + jumps.uniform(-1e7, 1e7)

    drill.start(before=before, max_rounds=2).wait(SECONDS)
    ranks = drill.start(before=before)
    assert not any(ranks.wait(SECONDS)), ranks.output(0)
    assert_same(drill.result(), drill.expected)
    return "the same bits"
