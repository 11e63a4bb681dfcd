"""Clients whose data is made when it is asked for, and may fail then."""

from collections.abc import Mapping

import pytest
import torch

from lightning_feddua import ClientError, FedAvg, FederatedDataModule
from lightning_feddua.errors import RankError
from tests.forked_ranks import ForkedRanks
from tests.modules import Classifier, classification


class Lazy(Mapping):
    """Four clients, of which one cannot be read."""

    def __init__(self, broken="c"):
        self._broken = broken

    def __getitem__(self, name):
        if name == self._broken:
            raise OSError("no such file")
        return classification(30, seed="abcd".index(name))

    def __iter__(self):
        return iter("abcd")

    def __len__(self):
        return 4


WORK = [{"local_steps": 2}, {"local_epochs": 1}]


@pytest.mark.parametrize("work", WORK, ids=["steps", "epochs"])
@pytest.mark.parametrize("engine", ["sequential", "vectorized", "auto"])
def test_a_client_without_data_is_skipped(make_loop, engine, work):
    loop = make_loop(server=FedAvg(), engine=engine, on_client_error="skip", max_rounds=2, **work)
    with pytest.warns(
        UserWarning, match=r"Client `c` is left out of round 1, .*the reading of its data: OSError: no such"
    ):
        loop.fit(Classifier(dropout=0.0), FederatedDataModule(Lazy(), batch_size=20))
    assert [(row["clients"], row["skipped_clients"]) for row in loop.history] == [(3, 1)] * 2


@pytest.mark.parametrize("work", WORK, ids=["steps", "epochs"])
def test_the_others_count_as_if_it_were_not_there(make_loop, work):
    models = []
    for clients in (Lazy(), {name: Lazy()[name] for name in "abd"}):
        torch.manual_seed(0)
        models.append(Classifier(dropout=0.0))
        loop = make_loop(server=FedAvg(), engine="sequential", on_client_error="skip", max_rounds=1, **work)
        # Whole batches, so that the clients' own random numbers play no part.
        loop.fit(models[-1], FederatedDataModule(clients, batch_size=50))
    for first, second in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("work", WORK, ids=["steps", "epochs"])
def test_it_is_named_where_it_ends_the_run(make_loop, work):
    with pytest.raises(
        ClientError, match=r"Client `c` failed in round 0 during the reading of its data: OSError: no such"
    ):
        make_loop(engine="sequential", **work).fit(Classifier(), FederatedDataModule(Lazy(), batch_size=20))


def test_other_ranks_hear_of_it_at_once(make_loop, tmp_path):
    def rank():
        loop = make_loop(engine="sequential", timeout=60.0, devices=2, accelerator="cpu")
        try:
            loop.fit(Classifier(), FederatedDataModule(Lazy(), batch_size=20))
        except (ClientError, RankError) as error:
            print(type(error).__name__, error, flush=True)
            raise SystemExit(3) from None

    ranks = ForkedRanks(rank, 2, tmp_path)
    assert ranks.wait(seconds=30) == [3, 3]
    texts = sorted(ranks.output(rank) for rank in range(2))
    assert any("ClientError Client `c` failed in round 0" in text for text in texts)
    assert any("has failed: Client `c` failed in round 0" in text for text in texts)
