"""What compiled steps take for constants: only what they read, and only while it has the same value."""

import copy
import gc

import pytest
import torch
import torch._inductor

from lightning_feddua import FedAvg, FedDualAvg, FederatedCallback, FedMid, FedProx, LocalTraining, Scaffnew, Scaffold
from lightning_feddua.data import SyntheticRegression
from lightning_feddua.models import LinearRegression


@pytest.fixture
def compilations(monkeypatch):
    """Counts compilations; the graph itself takes the place of the compiled function."""
    made = []

    def compile(graph, examples, **_):
        made.append(graph)
        return graph

    monkeypatch.setattr(torch._inductor, "compile", compile)
    return made


def fit(make_loop, client, compile, make=LinearRegression, rounds=6, samples=12, **arguments):
    torch.manual_seed(0)
    model = make(dim=10, lr=0.05)
    settings = {"local_steps": 3, "local_lr_decay": 0.9, "precision": "64-true", **arguments}
    client = copy.deepcopy(client)
    loop = make_loop(
        server=FedAvg(), client=client, engine="vectorized", compile=compile, max_rounds=rounds, **settings
    )
    data = SyntheticRegression(num_clients=4, samples_per_client=samples, dim=10, batch_size=5)
    loop.fit(model, data)
    return model.linear.weight.detach()


def messages(recwarn):
    return [str(w.message) for w in recwarn if "not compiled" in str(w.message)]


class WithUnread(LocalTraining):
    """An attribute that changes between rounds, and that local steps do not read."""

    def begin_round(self, lr, mean_gradient):
        self.unread = lr

    def correct(self, gradient, weights, local):
        gradient.add_(weights - local.anchor, alpha=0.1)


class WithNumber(LocalTraining):
    """The same for a number that they do read, where it belongs."""

    def begin_round(self, lr, mean_gradient):
        self.numbers["strength"] = 1.0 + self.numbers.get("strength", 0.0)

    def correct(self, gradient, weights, local):
        gradient.add_((weights - local.anchor) * self.numbers["strength"])


class Both(LocalTraining):
    """An algorithm that is composed of two."""

    client_state, extra_vectors = Scaffold.client_state, Scaffold.extra_vectors

    def __init__(self):
        super().__init__()
        self.inner = [FedProx(0.1), Scaffold()]

    def set_up(self, weights, population, local_steps):
        for part in self.inner:
            part.set_up(weights, population, local_steps)

    def start(self, local):
        for part in self.inner:
            part.start(local)

    def correct(self, gradient, weights, local):
        for part in self.inner:
            part.correct(gradient, weights, local)

    def finish(self, delta, local):
        return self.inner[1].finish(delta, local)

    def aggregate(self, weights, update, eta_g):
        self.inner[1].aggregate(weights, update, eta_g)


@pytest.mark.parametrize(
    "client",
    [FedMid(l1=0.01), FedDualAvg(l1=0.01), Scaffold(), WithUnread(), WithNumber(), Both(), FedProx(0.1)],
    ids=lambda client: type(client).__name__,
)
def test_one_compilation_serves_all_rounds(make_loop, client, compilations, recwarn):
    eager = fit(make_loop, client, False)
    compiled = fit(make_loop, client, True)
    assert messages(recwarn) == []
    assert len(compilations) == 1
    torch.testing.assert_close(compiled, eager, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("client", [FedMid(l1=0.01), FedDualAvg(l1=0.01)], ids=lambda client: type(client).__name__)
def test_compiled_for_real(make_loop, client, recwarn):
    eager = fit(make_loop, client, False)
    compiled = fit(make_loop, client, True)
    assert messages(recwarn) == []
    torch.testing.assert_close(compiled, eager, rtol=1e-10, atol=1e-13)
    assert not torch.equal(compiled, eager)


def test_the_number_of_steps_is_what_a_trace_depends_on(make_loop, compilations):
    """Scaffnew draws it, so that there are several traces; none of them is made for its own numbers."""
    eager = fit(make_loop, Scaffnew(), False, rounds=12, local_steps=1)
    compiled = fit(make_loop, Scaffnew(), True, rounds=12, local_steps=1)
    assert len(compilations) == 1
    torch.testing.assert_close(compiled, eager, rtol=1e-10, atol=1e-13)


class Anneals(LocalTraining):
    def begin_round(self, lr, mean_gradient):
        self.strength = lr

    def correct(self, gradient, weights, local):
        gradient.add_(weights - local.anchor, alpha=self.strength)


class ReadsRound(LinearRegression):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (1 + self.trainer.current_round)


class Scaled(LinearRegression):
    """A factor that a callback changes, and a counter of validation that has nothing to do with training."""

    def __init__(self, dim, lr):
        super().__init__(dim, lr)
        self.factor = 1.0
        self.validations = 0

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * self.factor

    def validation_step(self, batch, batch_idx):
        self.validations += 1
        return super().validation_step(batch, batch_idx)


class SetsFactor(FederatedCallback):
    def on_round_start(self, loop, round):
        loop.module.factor = 1.0 + round


@pytest.mark.parametrize(
    ("client", "make", "arguments", "name"),
    [
        (Anneals(), LinearRegression, {}, "`Anneals.strength`"),
        (LocalTraining(), ReadsRound, {}, "`self.trainer.current_round`"),
        (LocalTraining(), Scaled, {"callbacks": SetsFactor()}, "`Scaled.factor`"),
    ],
)
def test_an_attribute_that_changes_in_each_round_is_named(
    make_loop, client, make, arguments, name, compilations, recwarn
):
    eager = fit(make_loop, client, False, make, **arguments)
    compiled = fit(make_loop, client, True, make, **arguments)
    assert len(compilations) == 4
    (message,) = messages(recwarn)
    assert message.startswith("The local training of some clients runs eagerly and is not compiled: ")
    assert f"{name} changes between rounds" in message
    assert "shape" not in message
    torch.testing.assert_close(compiled, eager, rtol=1e-10, atol=1e-13)


def test_an_attribute_of_the_module_that_steps_do_not_read_does_not_matter(make_loop, compilations, recwarn):
    eager = fit(make_loop, LocalTraining(), False, Scaled)
    assert torch.equal(fit(make_loop, LocalTraining(), True, Scaled, rounds=6).sign(), eager.sign())
    assert len(compilations) == 1
    assert messages(recwarn) == []


def test_values_that_come_back_are_not_compiled_again(make_loop, compilations, recwarn):
    class Alternates(FederatedCallback):
        def on_round_start(self, loop, round):
            loop.module.factor = 1.0 + round % 2

    eager = fit(make_loop, LocalTraining(), False, Scaled, callbacks=Alternates())
    compiled = fit(make_loop, LocalTraining(), True, Scaled, callbacks=Alternates())
    assert len(compilations) == 2
    assert messages(recwarn) == []
    torch.testing.assert_close(compiled, eager, rtol=1e-10, atol=1e-13)


class Counts(LocalTraining):
    def correct(self, gradient, weights, local):
        self.calls = getattr(self, "calls", 0) + 1
        gradient.mul_(0.5)


class KeepsLate(LocalTraining):
    """A tensor that is there only from the first round on."""

    def begin_round(self, lr, mean_gradient):
        self.hidden = torch.full((10,), lr)

    def correct(self, gradient, weights, local):
        gradient.add_(self.hidden.to(gradient))


class WritesToBatch(LinearRegression):
    def training_step(self, batch, batch_idx):
        batch[0].mul_(2.0)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("client", "make", "reason"),
    [
        (Counts(), LinearRegression, "the local steps set `Counts.calls`, which compiled ones would not"),
        (KeepsLate(), LinearRegression, "`KeepsLate` keeps tensors outside its `vectors`"),
        (LocalTraining(), WritesToBatch, "the training step writes to its batch"),
    ],
)
# With 5 samples a client's minibatch is the same in each step.
@pytest.mark.parametrize("samples", [12, 5])
def test_what_compiled_steps_would_lose_is_not_compiled(
    make_loop, client, make, reason, samples, compilations, recwarn
):
    eager = fit(make_loop, client, False, make, samples=samples)
    compiled = fit(make_loop, client, True, make, samples=samples)
    (message,) = messages(recwarn)
    assert reason in message
    assert torch.equal(compiled, eager)


@pytest.mark.parametrize("precision", ["16-true", "bf16-true"])
def test_low_precision_is_compiled(make_loop, precision, recwarn):
    eager = fit(make_loop, LocalTraining(), False, precision=precision)
    recwarn.clear()
    compiled = fit(make_loop, LocalTraining(), True, precision=precision)
    assert [str(w.message) for w in recwarn if "compiled" in str(w.message) or "failed with" in str(w.message)] == []
    torch.testing.assert_close(compiled, eager, rtol=0.05, atol=1e-3)


def test_tracing_leaves_no_second_class_of_the_same_name(make_loop, compilations):
    """A recipe that names a class by its name alone would find two."""
    gc.disable()
    try:
        fit(make_loop, LocalTraining(), compile=True, rounds=1)
        assert compilations
        assert "LinearRegression" not in {cls.__name__ for cls in LinearRegression.__subclasses__()}
    finally:
        gc.enable()
