"""SIGTERM and Ctrl-C at any moment, to one rank or to all: the round is finished and saved, and all leave alike."""

import pytest

from tests.distributed.moments import cases
from tests.distributed.outcomes import SIGNALS, pressed_twice, signalled

# One of each kind; the others take minutes.
ORDINARY = [("SIGTERM", "save", 0, 1), ("SIGTERM", "trial", 0, 0), ("SIGINT", "fit end", 1, 0)]


@pytest.mark.parametrize(("name", "moment", "rank", "times"), cases(SIGNALS, ORDINARY))
def test_a_signal_is_heeded_by_all_ranks(tmp_path, name, moment, rank, times):
    signalled(tmp_path, name, moment, rank, times)


def test_a_second_ctrl_c_ends_all_ranks(tmp_path):
    pressed_twice(tmp_path)
