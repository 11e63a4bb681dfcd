"""Clients that fail and end the run, on all ranks; settings that do not go with clients that fail."""

import re

import pytest

from lightning_feddua import (
    ClientError,
    ConfigurationError,
    FedAvg,
    FederatedCallback,
)
from lightning_feddua.clients import Scaffnew
from lightning_feddua.models import LinearRegression
from tests.aggregation.bad_clients import BAD_CLIENTS, data, fit, regression
from tests.forked_ranks import ForkedRanks


@pytest.mark.parametrize("bad", BAD_CLIENTS)
def test_raise_names_the_client(make_skipping_loop, bad):
    make, message = BAD_CLIENTS[bad]
    loop = make_skipping_loop(on_client_error="raise", engine="sequential")
    with pytest.raises(ClientError, match=re.escape(f"Client `bad` failed in round 0 during {message}")) as error:
        fit(loop, data(make()))
    if bad == "step":
        assert error.value.__cause__.__traceback__.tb_frame is not None
        assert "training_step" in [frame.name for frame in error.traceback] or any(
            frame.f_code.co_name == "training_step" for frame in _frames(error.value.__cause__.__traceback__)
        )


def _frames(trace):
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


@pytest.mark.parametrize("bad", BAD_CLIENTS)
def test_raise_ends_all_ranks(make_skipping_loop, tmp_path, bad):
    make, message = BAD_CLIENTS[bad]

    def rank():
        fit(make_skipping_loop(on_client_error="raise", engine="sequential", timeout=30.0), data(make()))

    ranks = ForkedRanks(rank, 3, tmp_path)
    assert ranks.wait(25) == [1, 1, 1]
    own = f"ClientError: Client `bad` failed in round 0 during {message}"
    outputs = [ranks.output(rank) for rank in range(3)]
    if bad in ("nan", "inf"):
        assert all(own.replace("ClientError", "DivergenceError") in output for output in outputs)
        return
    culprits = [rank for rank in range(3) if "RankError" not in outputs[rank]]
    assert len(culprits) == 1
    assert f"\nlightning_feddua.errors.{own}" in outputs[culprits[0]]
    for rank in {0, 1, 2} - set(culprits):
        assert (
            f"RankError: Rank {culprits[0]} has failed: Client `bad` failed in round 0 during {message}"
            in outputs[rank]
        )
        # The original traceback, wherever one looks.
        assert (
            'in __getitem__\n    raise OSError("broken disk")' in outputs[rank] or "in training_step" in outputs[rank]
        )


def test_an_error_outside_of_clients_ends_all_ranks(make_skipping_loop, tmp_path):
    class Fails(FederatedCallback):
        def on_client_start(self, client_id):
            if client_id == "b":
                raise KeyError("of a callback")

    def rank():
        fit(make_skipping_loop(callbacks=Fails(), engine="sequential", timeout=30.0), data())

    ranks = ForkedRanks(rank, 2, tmp_path)
    assert ranks.wait(25) == [1, 1]
    assert sum("\nKeyError: 'of a callback'" in ranks.output(i) for i in range(2)) >= 1
    assert sum("has failed: 'of a callback'" in ranks.output(i) for i in range(2)) == 1


@pytest.mark.parametrize("arguments", [{}, {"on_client_error": "raise", "max_update_norm": 1.0}])
def test_an_algorithm_that_needs_everybody_is_refused(make_skipping_loop, arguments):
    loop = make_skipping_loop(server=FedAvg(), client=Scaffnew(), precision="64-true", **arguments)
    with pytest.raises(
        ConfigurationError, match=r"`Scaffnew` needs all clients as they are .*\. Use `on_client_error="
    ):
        loop.fit(LinearRegression(dim=10), regression())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"on_client_error": "ignore"}, "There is no on_client_error `ignore`. Choose one of `raise`, `skip`"),
        ({"max_update_norm": 0.0}, "`max_update_norm=0.0` is not positive"),
        ({"timeout": -1.0}, "`timeout=-1.0` is not positive"),
    ],
)
def test_bad_settings(make_skipping_loop, arguments, message):
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        make_skipping_loop(**arguments)
