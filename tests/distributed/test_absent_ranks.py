"""A rank that dies or hangs at any moment of a run is named by all others, within the loop's timeout."""

import pytest

from lightning_feddua.aggregation import presence
from tests.distributed.moments import cases
from tests.distributed.outcomes import ABSENCES, absent_rank

# One of each kind; the others take minutes.
ORDINARY = [("killed", "data", 1), ("killed", "validation", 2), ("stopped", "move of states", 1)]


@pytest.mark.parametrize(("how", "moment", "rank"), cases(ABSENCES, ORDINARY))
def test_an_absent_rank_is_named(tmp_path, how, moment, rank):
    absent_rank(tmp_path, how, moment, rank)


class Store(dict):
    """Which exchanges ranks have come to, as text."""

    def check(self, keys):
        return keys[0] in self

    def get(self, key):
        return self[key].encode()


@pytest.mark.parametrize(
    ("arrivals", "absent"), [((7, 7, 6), [2]), ((6, 7, 5), [2]), ((5, 7, 5), [0, 2]), ((7, 7, 0), [2])]
)
def test_a_rank_that_is_kept_waiting_is_not_blamed(monkeypatch, arrivals, absent):
    """Rank 1 asks, in its seventh exchange."""
    fabric = type("Fabric", (), {"world_size": 3, "global_rank": 1})
    monkeypatch.setattr(presence._Presence, "store", Store())
    monkeypatch.setattr(presence._Presence, "silent", False)
    for rank, count in enumerate(arrivals):
        presence._Presence.store[presence._key(f"arrivals/{rank}")] = str(count)
    assert presence._absent(fabric, 7) == absent
