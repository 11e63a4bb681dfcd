"""A rank that dies or hangs at any moment of a run is named by all others, within the loop's timeout."""

import os
import signal
import time

import pytest

from tests.distributed.moments import IN_ROUNDS, MOMENTS, OF_RANK_ZERO, Act, cases, play
from tests.forked_ranks import ForkedRanks

TIMEOUT = 3.0
SIGNALS = {"stopped": signal.SIGSTOP, "killed": signal.SIGKILL}
ORDINARY = [("killed", "data", 1), ("killed", "validation", 2), ("stopped", "move of states", 1)]
EVERY = [
    (how, moment, rank)
    for how in SIGNALS
    for moment in MOMENTS
    for rank in ((0,) if moment in OF_RANK_ZERO else (0, 2))
]


@pytest.mark.parametrize(("how", "moment", "rank"), cases(EVERY, ORDINARY))
def test_an_absent_rank_is_named(tmp_path, how, moment, rank):
    happened = tmp_path / "happened"

    def act():
        happened.write_text(str(time.time()))
        os.kill(os.getpid(), SIGNALS[how])

    ranks = ForkedRanks(
        lambda: play(Act(moment, rank, act, times=moment in IN_ROUNDS), tmp_path, timeout=TIMEOUT), 3, tmp_path
    )
    others = [other for other in range(3) if other != rank]
    ranks.wait(40, others)
    waited = time.time() - float(happened.read_text())
    ranks.kill()
    outputs = [ranks.output(other) for other in others]
    assert [ranks.codes[other] for other in others] == [1, 1], outputs
    for output in outputs:
        assert f"RankError: Rank {rank}" in output, outputs
    # The store of a rank 0 that hangs is given some seconds more.
    assert waited < TIMEOUT + 9, waited
