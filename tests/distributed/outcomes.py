"""What must come of ranks to which something happens at a moment of a run. Each function makes three that train."""

import os
import signal
import time

from lightning_feddua.checkpoints.files import read
from tests.distributed.moments import IN_ROUNDS, MOMENTS, OF_RANK_ZERO, ROUNDS, Act, play
from tests.forked_ranks import ForkedRanks

TIMEOUT = 3.0
ABSENT = {"stopped": signal.SIGSTOP, "killed": signal.SIGKILL}
ABSENCES = [
    (how, moment, rank) for how in ABSENT for moment in MOMENTS for rank in ((0,) if moment in OF_RANK_ZERO else (0, 2))
]
# Before ranks know of each other there is nobody to tell, and after the fit nothing to save.
_HEEDED = [moment for moment in MOMENTS if moment not in ("launch", "process group", "last barrier", "test", "predict")]
SIGNALS = [
    (name, moment, rank, times)
    for name in ("SIGTERM", "SIGINT")
    for moment in _HEEDED
    for rank in ((0,) if moment in OF_RANK_ZERO else (0, 2, None))
    for times in ((1, ROUNDS - 1) if moment in IN_ROUNDS and moment not in ("training", "validation") else (0,))
]
ERRORS = [
    *[("data", 1), ("module", 0), ("fit start", 0), ("after the exchange", 2), ("logger", 0), ("vote", 1)],
    *[("fit end", 0), ("predict", 1)],
]


def absent_rank(folder, how, moment, rank):
    """A rank that is killed or stopped is named by all others, within the loop's timeout."""
    happened = folder / "happened"

    def act():
        happened.write_text(str(time.time()))
        os.kill(os.getpid(), ABSENT[how])

    ranks = ForkedRanks(lambda: play(Act(moment, rank, act, moment in IN_ROUNDS), folder, timeout=TIMEOUT), 3, folder)
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


def signalled(folder, name, moment, rank, times):
    """SIGTERM or Ctrl-C to one rank or to all: the round is finished and saved, and all leave alike."""

    def send():
        os.kill(os.getpid(), getattr(signal, name))

    ranks = ForkedRanks(lambda: _interruptible(Act(moment, rank, send, times), folder), 3, folder)
    codes = ranks.wait(60)
    outputs = [ranks.output(other) for other in range(3)]
    assert codes == [143 if name == "SIGTERM" else 130] * 3, outputs
    assert not any("Error" in output for output in outputs), outputs
    begun = [path.read_text().split() for path in sorted(folder.glob("begun*.txt"))]
    saved = [read(path)["epoch"] for path in folder.glob("version_*/last.ckpt")]
    if moment in IN_ROUNDS or moment == "fit end":
        # No further round was begun, and none is lost.
        assert saved == [len(begun[0])]
        assert begun[0] == begun[1] == begun[2]
        tables = [path.read_text().splitlines() for path in folder.glob("version_*/metrics.csv")]
        assert len(tables[0]) == 1 + saved[0]
        assert "Resume with `" in outputs[0], outputs
    else:
        assert not begun
        assert not saved


def pressed_twice(folder):
    """A second Ctrl-C ends all ranks at once."""

    def press():
        os.kill(os.getpid(), signal.SIGINT)
        # Two at once may be one press, told by the terminal and by a launcher.
        time.sleep(1.2)
        os.kill(os.getpid(), signal.SIGINT)

    ranks = ForkedRanks(lambda: _interruptible(Act("after the exchange", 1, press), folder), 3, folder)
    assert ranks.wait(15) == [130] * 3, [ranks.output(rank) for rank in range(3)]
    assert not list(folder.glob("version_*/last.ckpt"))


def _interruptible(act, folder):
    # Shells start what runs in the background with Ctrl-C ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        play(act, folder, timeout=20.0)
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def told_error(folder, moment, rank):
    """An error of one rank alone reaches all others at once."""

    def fail():
        raise KeyError("of one rank")

    start = time.monotonic()
    # Nobody waits for the timeout.
    ranks = ForkedRanks(lambda: play(Act(moment, rank, fail), folder, timeout=100.0), 3, folder)
    assert ranks.wait(40) == [1, 1, 1]
    assert time.monotonic() - start < 30
    assert "\nKeyError: 'of one rank'" in ranks.output(rank)
    for other in {0, 1, 2} - {rank}:
        assert f"RankError: Rank {rank} has failed with KeyError: 'of one rank'" in ranks.output(other)
        # Where it happened.
        assert "in fail\n" in ranks.output(other)
