"""Clients and data workers that hang or are killed: ended, tried once more, and then like any client that fails."""

import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset

from lightning_feddua import ClientError, ConfigurationError, FedAvg, FederatedCallback, FederatedDataModule
from lightning_feddua.clients import Mime
from lightning_feddua.engines import time_limit
from tests.aggregation.bad_clients import assert_same, fit, rows, with_value
from tests.checkpoints.checkpointed_runs import in_child
from tests.modules import Classifier, classification

FOREVER = 300


class Reads(Dataset):
    """Samples of which one is read with an action before it, so often; none of the first, which are probed."""

    def __init__(self, dataset, action, times, mark):
        self._dataset, self._action, self._times, self._mark = dataset, action, times, Path(mark)

    def __len__(self):
        return len(self._dataset)

    def __getitem__(self, index):
        # In files, because processes may be killed in the midst of it.
        done = len(list(self._mark.parent.glob(f"{self._mark.name}.*")))
        if index == 13 and done < self._times:
            self._mark.with_suffix(f".{done}").write_text("")
            self._action()
        return self._dataset[index]


def hang():
    time.sleep(FOREVER)


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def data(mark, action=hang, times=0, num_workers=0):
    """Three clients, of which `b` does something when it reads its data."""
    clients = {name: Reads(classification(20 + 7 * i, seed=i), action, 0, mark) for i, name in enumerate("abc")}
    clients["b"] = Reads(classification(27, seed=1), action, times, mark)
    return FederatedDataModule(clients, classification(30, seed=9), batch_size=16, num_workers=num_workers)


@pytest.fixture
def make(make_skipping_loop):
    def make(**arguments):
        defaults = {"engine": "sequential", "on_client_error": "raise", "max_rounds": 2, "client_timeout": 0.7}
        return make_skipping_loop(**{**defaults, **arguments})

    return make


WORKERS = [0, pytest.param(2, marks=pytest.mark.slow)]


@pytest.mark.parametrize("num_workers", WORKERS)
def test_data_that_hangs_once_is_read_again(make, tmp_path, num_workers):
    expected = fit(make(), data(tmp_path / "none"), Classifier)
    with pytest.warns(UserWarning, match=r"Client `b` is tried once more: it has taken longer than `client_timeout="):
        found = fit(make(), data(tmp_path / "mark", hang, 1, num_workers), Classifier)
    assert_same(found, expected)


@pytest.mark.parametrize("num_workers", WORKERS)
def test_data_that_always_hangs_is_a_failure_of_its_client(make, tmp_path, num_workers):
    message = (
        "Client `b` failed in round 0 during the reading of its data: ClientTimeoutError: it has taken longer than"
        " `client_timeout=0.7`."
    )
    start = time.monotonic()
    with pytest.warns(UserWarning, match="tried once more"), pytest.raises(ClientError, match=re.escape(message)):
        fit(make(), data(tmp_path / "mark", hang, 100, num_workers), Classifier)
    assert time.monotonic() - start < 15
    skipping = make(on_client_error="skip", max_rounds=1)
    with pytest.warns(UserWarning, match="Client `b` is left out of round 0"):
        fit(skipping, data(tmp_path / "mark", hang, 100, num_workers), Classifier)
    assert [row["clients"] for row in rows(skipping)] == [2]


@pytest.mark.parametrize("timeout", [None, pytest.param(30.0, marks=pytest.mark.slow)])
def test_a_worker_that_is_killed_is_replaced(make, tmp_path, timeout):
    expected = fit(make(), data(tmp_path / "none"), Classifier)
    with pytest.warns(UserWarning, match="is tried once more: a worker process that reads data has died"):
        found = fit(make(client_timeout=timeout), data(tmp_path / "mark", kill, 1, num_workers=2), Classifier)
    assert_same(found, expected)


@pytest.mark.slow
def test_a_worker_that_is_killed_between_rounds_is_replaced(make, tmp_path):
    class Killer(FederatedCallback):
        def on_round_end(self, round):
            children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
            if round == 0:
                os.kill(int(children[-1]), signal.SIGKILL)
                time.sleep(0.2)

    expected = fit(make(), data(tmp_path / "none"), Classifier)
    found = fit(make(callbacks=Killer(), client_timeout=None), data(tmp_path / "none", num_workers=2), Classifier)
    assert_same(found, expected)


# How often steps are still to hang. Not an attribute, which would be what it was when the client starts again.
HANGS = [0]


class Hanging(Classifier):
    def training_step(self, batch, batch_idx):
        if HANGS[0]:
            HANGS[0] -= 1
            hang()
        return super().training_step(batch, batch_idx)


class HangInRoundOne(FederatedCallback):
    def on_round_start(self, round):
        HANGS[0] = int(round == 1)


@pytest.mark.parametrize(
    ("engine", "timeout"), [("sequential", 0.7), pytest.param("vectorized", 5.0, marks=pytest.mark.slow)]
)
def test_a_step_that_hangs_once_is_made_again(make, engine, timeout):
    clients = FederatedDataModule({name: classification(25, seed=i) for i, name in enumerate("ab")}, batch_size=16)
    expected = fit(make(engine=engine, client_timeout=None), clients, lambda: Classifier(dropout=0.0))
    message = "Client `a` is tried once more" if engine == "sequential" else "trained one by one"
    with pytest.warns(UserWarning, match=message):
        found = fit(
            make(engine=engine, callbacks=HangInRoundOne(), client_timeout=timeout),
            clients,
            lambda: Hanging(dropout=0.0),
        )
    if engine == "sequential":
        assert_same(found, expected)
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], value, rtol=1e-3, atol=1e-4)


def test_a_call_that_cannot_be_interrupted_ends_the_process(make, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(time_limit, "_GRACE_SECONDS", 0.5)

    def deaf():
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
        hang()

    assert in_child(lambda: fit(make(), data(tmp_path / "mark", deaf, 1), Classifier)) == 1
    output = capfd.readouterr().err
    assert "Client `b` has taken longer than 0.7 s and cannot be interrupted" in output
    assert "in deaf\n" in output


def test_mime_names_the_client_whose_gradient_is_not_finite(make):
    clients = {"a": classification(20), "b": with_value(torch.nan), "c": classification(20, seed=2)}
    loop = make(client=Mime(), server=FedAvg(), client_timeout=None)
    with pytest.raises(ClientError, match="Client `b` failed in round 0 during the gradient of all its data"):
        fit(loop, FederatedDataModule(clients, batch_size=16), Sgd)


class Sgd(Classifier):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


@pytest.mark.parametrize("times", [1, 100])
def test_mime_gives_another_try_too(make, tmp_path, times):
    loop = make(client=Mime(), server=FedAvg(), on_client_error="skip", max_rounds=1)
    with pytest.warns(UserWarning, match="Client `b` is tried once more"):
        fit(loop, data(tmp_path / "mark", hang, times), Sgd)
    assert [row["clients"] for row in rows(loop)] == [3 if times == 1 else 2]


def test_another_alarm_of_the_process_is_kept():
    rung = []
    before = signal.signal(signal.SIGALRM, lambda *_: rung.append(1))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with time_limit.time_limit(5.0, "a"):
            pass
        time.sleep(0.4)
        assert rung == [1]
    finally:
        signal.signal(signal.SIGALRM, before)


def test_in_another_thread_it_is_refused(make):
    errors = []

    def run():
        try:
            fit(make(), data("none"), Classifier)
        except ConfigurationError as error:
            errors.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert "`client_timeout=0.7` needs SIGALRM" in errors[0]
