"""Errors of rank 0 reach every rank."""

import pytest
from lightning.fabric import Fabric

from lightning_feddua import ConfigurationError, FederatedDataModule
from lightning_feddua.aggregation.collectives import on_rank_zero
from lightning_feddua.engines import SequentialEngine
from tests.forked_ranks import ForkedRanks
from tests.modules import Classifier, classification

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


class Unprepared(FederatedDataModule):
    def prepare_data(self):
        raise KeyError("no disk")


class Obstinate(SequentialEngine):
    name = "obstinate"

    @classmethod
    def obstacle(cls, federation, algorithm):
        raise KeyError("no idea")


@pytest.mark.parametrize("where", ["prepare_data", "engine"])
def test_set_up_that_fails_on_rank_zero_is_named_at_once(make_loop, tmp_path, where):
    def rank():
        kind = Unprepared if where == "prepare_data" else FederatedDataModule
        data = kind({name: classification(20) for name in "ab"})
        engine = Obstinate if where == "engine" else "sequential"
        try:
            make_loop(devices=2, timeout=60.0, engine=engine).fit(Classifier(), data)
        except Exception as error:
            print(f"{type(error).__name__}: {error}", flush=True)

    ranks = ForkedRanks(rank, 2, tmp_path)
    assert ranks.wait(seconds=30) == [0, 0]
    assert "KeyError: 'no " in ranks.output(0)
    assert "RankError: Rank 0 has failed with KeyError: 'no " in ranks.output(1)
