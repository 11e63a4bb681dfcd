"""An error of one rank alone reaches all others at once, wherever it happens."""

import re
import time
from pathlib import Path

import pytest

import lightning_feddua
from tests.distributed.moments import Act, play
from tests.forked_ranks import ForkedRanks

ALONE = [("data", 1), ("module", 0), ("fit start", 0), ("after the exchange", 2), ("logger", 0), ("vote", 1)]
ALONE += [("fit end", 0), ("predict", 1)]


@pytest.mark.parametrize(
    ("moment", "rank"),
    [pytest.param(*case, marks=() if case in ALONE[3:5] else pytest.mark.slow) for case in ALONE],
)
def test_an_error_of_one_rank_ends_all(tmp_path, moment, rank):
    def fail():
        raise KeyError("of one rank")

    start = time.monotonic()
    # Nobody waits for the timeout.
    ranks = ForkedRanks(lambda: play(Act(moment, rank, fail), tmp_path, timeout=100.0), 3, tmp_path)
    assert ranks.wait(40) == [1, 1, 1]
    assert time.monotonic() - start < 30
    assert "\nKeyError: 'of one rank'" in ranks.output(rank)
    for other in {0, 1, 2} - {rank}:
        assert f"RankError: Rank {rank} has failed with KeyError: 'of one rank'" in ranks.output(other)
        # Where it happened.
        assert "in fail\n" in ranks.output(other)


def test_all_collectives_are_in_one_place():
    """Others would wait for a rank without naming it."""
    found = re.compile(
        r"torch\.distributed\.(?!is_|get_|destroy_process_group|init_process_group|default_pg|new_group|distributed_c10d"
        r"|TCPStore|PrefixStore)\w+|import torch\.distributed|from torch import distributed|from torch\.distributed"
        r"|fabric\.(?:barrier|broadcast|all_reduce|all_gather|save|load|rank_zero_first)\b|\bmetric\.(?:compute|sync)\(\)"
    )
    package = Path(lightning_feddua.__file__).parent
    uses = {
        f"{path.relative_to(package)}: {match[0]}"
        for path in package.rglob("*.py")
        if path.name != "collectives.py"
        for match in found.finditer(path.read_text())
    }
    # Of one client or one rank, where nothing is exchanged.
    alone = {f"host/{name}.py: metric.compute()" for name in ("evaluation", "log_capture")}
    assert uses - alone == set()
