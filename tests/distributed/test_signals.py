"""SIGTERM and Ctrl-C at any moment, to one rank or to all: the round is finished and saved, and all leave alike."""

import os
import signal
import time

import pytest

from lightning_feddua.checkpoints.files import read
from tests.distributed.moments import IN_ROUNDS, MOMENTS, OF_RANK_ZERO, ROUNDS, Act, cases, play
from tests.forked_ranks import ForkedRanks

# Before ranks know of each other there is nobody to tell, and after the fit nothing to save.
HEEDED = [moment for moment in MOMENTS if moment not in ("launch", "process group", "last barrier", "test", "predict")]
ORDINARY = [("SIGTERM", "save", 0, 1), ("SIGTERM", "trial", 0, 0), ("SIGINT", "fit end", 1, 0)]
EVERY = [
    (name, moment, rank, times)
    for name in ("SIGTERM", "SIGINT")
    for moment in HEEDED
    for rank in ((0,) if moment in OF_RANK_ZERO else (0, 2, None))
    for times in ((1, ROUNDS - 1) if moment in IN_ROUNDS and moment not in ("training", "validation") else (0,))
]


@pytest.mark.parametrize(("name", "moment", "rank", "times"), cases(EVERY, ORDINARY))
def test_a_signal_is_heeded_by_all_ranks(tmp_path, name, moment, rank, times):
    def send():
        os.kill(os.getpid(), getattr(signal, name))

    def run():
        # Shells start what runs in the background with Ctrl-C ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            play(Act(moment, rank, send, times), tmp_path, timeout=20.0)
        except KeyboardInterrupt:
            raise SystemExit(130) from None

    ranks = ForkedRanks(run, 3, tmp_path)
    codes = ranks.wait(60)
    outputs = [ranks.output(other) for other in range(3)]
    assert codes == [143 if name == "SIGTERM" else 130] * 3, outputs
    assert not any("Error" in output for output in outputs), outputs
    begun = [path.read_text().split() for path in sorted(tmp_path.glob("begun*.txt"))]
    saved = [read(path)["epoch"] for path in tmp_path.glob("version_*/last.ckpt")]
    if moment in IN_ROUNDS or moment == "fit end":
        # No further round was begun, and none is lost.
        assert saved == [len(begun[0])]
        assert begun[0] == begun[1] == begun[2]
        tables = [path.read_text().splitlines() for path in tmp_path.glob("version_*/metrics.csv")]
        assert len(tables[0]) == 1 + saved[0]
        assert "Resume with `" in outputs[0]
    else:
        assert not begun
        assert not saved


def test_a_second_ctrl_c_ends_all_ranks(tmp_path):
    def twice():
        os.kill(os.getpid(), signal.SIGINT)
        # Two at once may be one press, told by the terminal and by a launcher.
        time.sleep(1.2)
        os.kill(os.getpid(), signal.SIGINT)

    def run():
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            play(Act("after the exchange", 1, twice), tmp_path, timeout=20.0)
        except KeyboardInterrupt:
            raise SystemExit(130) from None

    ranks = ForkedRanks(run, 3, tmp_path)
    assert ranks.wait(15) == [130] * 3, [ranks.output(rank) for rank in range(3)]
    assert not list(tmp_path.glob("version_*/last.ckpt"))
