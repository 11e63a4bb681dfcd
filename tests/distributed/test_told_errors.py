"""An error of one rank alone reaches all others at once, wherever it happens."""

import re
from pathlib import Path

import pytest

import lightning_feddua
from tests.distributed.outcomes import ERRORS, told_error


@pytest.mark.parametrize(
    ("moment", "rank"),
    [pytest.param(*case, marks=() if case in ERRORS[3:5] else pytest.mark.slow) for case in ERRORS],
)
def test_an_error_of_one_rank_ends_all(tmp_path, moment, rank):
    told_error(tmp_path, moment, rank)


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
