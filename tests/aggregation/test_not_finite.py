"""What is not finite is neither saved nor trained from: an error names the client and the round, or the sum."""

import re

import pytest
import torch
from torch import nn

from lightning_feddua import FedAvg, FedDuAdam, FederatedCallback, FederatedDataModule, LocalTraining, Server
from lightning_feddua.clients import Mime
from lightning_feddua.errors import DivergenceError, NotFiniteError
from tests.forked_ranks import ForkedRanks
from tests.modules import Classifier, classification

LARGEST = torch.finfo(torch.float32).max


class Normed(Classifier):
    """With statistics that a value of 1e25 makes infinite, while the loss and its gradients stay as they should."""

    def __init__(self):
        super().__init__(lr=0.01)
        self.norm = nn.BatchNorm1d(4)
        # Infinities that belong there.
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return super().training_step((self.norm(x), y), batch_idx)


def clients(large=None, names="abcd"):
    datasets = {name: classification(20, seed=i) for i, name in enumerate(names)}
    if large is not None:
        datasets[large].tensors[0][3, 1] = 1e25
    return FederatedDataModule(datasets, batch_size=20)


@pytest.fixture
def make(make_skipping_loop):
    def make(**arguments):
        defaults = {"server": FedAvg(), "engine": "sequential", "max_rounds": 2, "local_steps": 2, "timeout": 20.0}
        return make_skipping_loop(**{**defaults, "checkpoint_every": 1, **arguments})

    return make


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_a_large_value_that_ruins_statistics_is_a_failure_of_its_client(make, engine):
    message = "Client `b` failed in round 0 during local training: its buffers are not finite. Try a smaller"
    loop = make(on_client_error="raise", engine=engine)
    with pytest.raises(DivergenceError, match=re.escape(message)):
        loop.fit(Normed(), clients("b"))
    assert not (loop.run_dir / "last.ckpt").exists()
    skipping, model = make(engine=engine), Normed()
    with pytest.warns(UserWarning, match="`b` is left out of round 0, .* its buffers are not finite"):
        skipping.fit(model, clients("b"))
    assert [row["skipped_clients"] for row in skipping.history] == [1, 1]
    assert model.norm.running_var.isfinite().all()
    assert model.mask[1] == -torch.inf


def test_all_ranks_name_that_client(make, tmp_path):
    ranks = ForkedRanks(lambda: make(on_client_error="raise").fit(Normed(), clients("c")), 3, tmp_path)
    assert ranks.wait(30) == [1, 1, 1]
    assert all("DivergenceError: Client `c` failed in round 0 during" in ranks.output(rank) for rank in range(3))


class Sends(LocalTraining):
    """Makes each client's update, number or vector what it is told."""

    client_scalars = ("number",)
    client_state = ("kept",)
    extra_vectors = ("sent",)

    def __init__(self, **values):
        super().__init__()
        self.values = values

    def finish(self, delta, local):
        values = {"delta": 0.1, "number": 1.0, "kept": 1.0, "sent": 1.0, **self.values}
        delta.fill_(values["delta"])
        local.scalars["number"] = values["number"]
        local.state["kept"].fill_(values["kept"])
        return {"sent": torch.full_like(delta, values["sent"])}


OF_CLIENTS = {"number": "numbers that its algorithm sends are", "kept": "vectors that its algorithm sends or keeps are"}
OF_CLIENTS |= {"delta": "update is", "sent": OF_CLIENTS["kept"]}


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
@pytest.mark.parametrize("what", OF_CLIENTS)
def test_whatever_else_a_client_sends_is_looked_at(make, what, value):
    loop = make(on_client_error="raise", client=Sends(**{what: value}))
    with pytest.raises(DivergenceError, match=f"Client `a` failed in round 0 .* its {OF_CLIENTS[what]} not finite"):
        loop.fit(Classifier(), clients())
    skipping = make(client=Sends(**{what: value}), max_rounds=1)
    with pytest.warns(UserWarning, match=f"its {OF_CLIENTS[what]} not finite"):
        skipping.fit(Classifier(), clients())
    assert skipping.history[0]["skipped_clients"] == 4


@pytest.mark.parametrize("action", ["raise", "skip"])
@pytest.mark.parametrize(("what", "said"), [("delta", "updates"), ("sent", "vectors that their algorithm sends")])
def test_a_sum_that_overflows_is_an_error_in_both_modes(make, action, what, said):
    class Later(Sends):
        def finish(self, delta, local):
            self.values = {what: 0.9 * LARGEST} if loop.current_round == 1 else {}
            return super().finish(delta, local)

    loop = make(on_client_error=action, client=Later(), server=FedDuAdam(), max_rounds=3)
    model = Classifier()
    with pytest.raises(NotFiniteError, match=f"The sum of the clients' {said} in round 1 is not finite, although"):
        loop.fit(model, clients())
    saved = torch.load(loop.run_dir / "last.ckpt", weights_only=True)
    assert saved["epoch"] == 1
    for name, value in model.state_dict().items():
        assert torch.equal(value, saved["state_dict"][name])


def test_all_ranks_tell_of_the_sum(make, tmp_path):
    ranks = ForkedRanks(lambda: make(client=Sends(delta=LARGEST)).fit(Classifier(), clients()), 2, tmp_path)
    assert ranks.wait(30) == [1, 1]
    assert all("NotFiniteError: The sum of the clients' updates in round 0" in ranks.output(rank) for rank in range(2))


def test_so_is_the_sum_of_gradients(make):
    class Steep(Classifier):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-39)

        def training_step(self, batch, batch_idx):
            return 0.6 * LARGEST * self.net[-1].bias.sum()

    with pytest.raises(NotFiniteError, match="The sum of the clients' gradients in round 0 is not finite"):
        make(client=Mime()).fit(Steep(), clients())


class Overflows(Server):
    """Of weights or of its state in round 1."""

    def __init__(self, what):
        self.what, self._calls, self._sum = what, 0, torch.zeros(3)

    def step(self, weights, update):
        self._calls += 1
        if self._calls == 2:
            (weights if self.what == "weights" else self._sum)[1] = torch.inf
        return 1.0

    def state_dict(self):
        # What is not finite from the start belongs there.
        return {"sum": self._sum, "best": torch.inf}


class Spoils(FederatedCallback):
    """Something at the end of round 1."""

    def __init__(self, spoil):
        self.spoil = spoil

    def on_round_end(self, loop, round):
        if round == 1:
            self.spoil(loop)


SPOILT = {
    "the weights": (Overflows("weights"), None, r"The global weights are not finite after the step of `Overflows`"),
    "the server's state": (Overflows("state"), None, "After round 1 the server's state `sum` is not finite"),
    "weights, by a callback": (FedAvg(), lambda loop: loop.weights[2:3].fill_(torch.nan), "the global weights is not"),
    "the average": (FedDuAdam(), lambda loop: loop.average[2:3].fill_(torch.nan), "the averaged iterate is not finite"),
}


@pytest.mark.parametrize("what", SPOILT)
@pytest.mark.parametrize("action", ["raise", "skip"])
def test_nothing_of_such_a_round_is_saved(make, action, what):
    server, spoil, message = SPOILT[what]
    server = type(server)(server.what) if isinstance(server, Overflows) else server
    loop = make(server=server, callbacks=[Spoils(spoil)] if spoil else None, on_client_error=action, max_rounds=3)
    with pytest.raises(NotFiniteError, match=message):
        loop.fit(Classifier(), clients())
    saved = torch.load(loop.run_dir / "last.ckpt", weights_only=True)
    assert saved["epoch"] == 1
    assert all(value.isfinite().all() for value in saved["state_dict"].values())
    assert len((loop.run_dir / "metrics.csv").read_text().splitlines()) == 2


def test_buffers_that_validation_ruins_are_not_saved(make):
    class Counts(Normed):
        def validation_step(self, batch, batch_idx):
            self.norm.running_mean += torch.inf

    data = clients()
    data.val_dataset = classification(8)
    with pytest.raises(NotFiniteError, match=r"After round 0 the buffer `norm.running_mean` is not finite\. Nothing"):
        make(num_sanity_val_steps=0).fit(Counts(), data)
