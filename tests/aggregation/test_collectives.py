"""Errors of rank 0 reach every rank."""

import pytest
from lightning.fabric import Fabric

from lightning_feddua import ConfigurationError
from lightning_feddua.aggregation.collectives import on_rank_zero
from tests.forked_ranks import ForkedRanks

ERRORS = {
    "configuration": ConfigurationError("Nothing there.", "Look elsewhere."),
    "any": ZeroDivisionError("by zero"),
}


def _raise(kind):
    raise ERRORS[kind]


@pytest.mark.parametrize("kind", ERRORS)
def test_whatever_rank_zero_raises_ends_all_ranks(tmp_path, kind):
    def rank():
        fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
        fabric.launch()
        try:
            on_rank_zero(fabric, _raise, kind)
        except Exception as error:
            print(f"{type(error).__name__}: {error}", flush=True)

    ranks = ForkedRanks(rank, 2, tmp_path)
    assert ranks.wait(seconds=30) == [0, 0]
    texts = [ranks.output(rank) for rank in range(2)]
    if kind == "configuration":
        assert all("ConfigurationError: Nothing there. Look elsewhere." in text for text in texts)
    else:
        assert "ZeroDivisionError: by zero" in texts[0]
        assert "RankError: Rank 0 has failed with ZeroDivisionError: by zero" in texts[1]


def test_alone_it_is_an_ordinary_call():
    fabric = Fabric(accelerator="cpu", devices=1)
    assert on_rank_zero(fabric, max, 1, 2) == 2
    with pytest.raises(ZeroDivisionError):
        on_rank_zero(fabric, _raise, "any")
