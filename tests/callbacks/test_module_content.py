"""What the module holds at each hook of callbacks, and of the module itself."""

import pytest
import torch
from torch import nn

from lightning_feddua import FedAvg, FedDuAdagrad, FederatedCallback, FederatedDataModule
from tests.modules import Classifier, classification

# What modules have noted; what they keep themselves is undone after the evaluation of the last iterate.
SEEN = []


class Watched(Classifier):
    """Notes its weights at its own hooks; without random numbers, so that clients can be vectorized."""

    def __init__(self):
        super().__init__(dropout=0.0, lr=0.05)
        SEEN.clear()

    def _note(self, moment):
        SEEN.append((moment, weights_of(self)))

    def on_fit_start(self):
        self._note("on_fit_start")

    def on_fit_end(self):
        self._note("on_fit_end")

    def on_validation_start(self):
        self._note("on_validation_start")


def weights_of(module):
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def buffers_of(module):
    return [buffer.clone() for buffer in module.buffers()]


class Spy(FederatedCallback):
    """Compares the module with the run at each hook."""

    def __init__(self):
        self.moments = []
        self.clients = {}
        self.after = None

    def _holds(self, moment, loop, expected):
        assert torch.equal(weights_of(loop.module), expected), moment
        self.moments.append(moment)

    def on_fit_start(self, loop):
        self.start = weights_of(loop.module)
        self._holds("on_fit_start", loop, loop.weights)

    def on_round_start(self, loop):
        self.before, self.buffers = loop.weights.clone(), buffers_of(loop.module)
        self._holds("on_round_start", loop, loop.weights)

    def on_client_start(self, loop):
        self._holds("on_client_start", loop, self.before)
        assert all(map(torch.equal, buffers_of(loop.module), self.buffers))

    def on_client_end(self, loop, round, client_id):
        assert not torch.equal(weights_of(loop.module), self.before)
        assert not all(map(torch.equal, buffers_of(loop.module), self.buffers))
        self.clients[round, client_id] = weights_of(loop.module) - self.before
        self.moments.append("on_client_end")

    def on_aggregate_end(self, loop, update):
        self._holds("on_aggregate_end", loop, self.before)
        assert torch.equal(loop.weights, self.before)
        self.mean = update.mean_delta.clone()

    def on_validation_start(self, loop):
        self._holds("on_validation_start", loop, loop.weights if loop.average is None else loop.average)
        assert (loop.average is not None) == loop.server.adaptive

    def on_validation_end(self, loop):
        self._holds("on_validation_end", loop, loop.weights if loop.average is None else loop.average)

    def on_round_end(self, loop):
        self._holds("on_round_end", loop, loop.weights)
        assert not torch.equal(loop.weights, self.before)

    def on_fit_end(self, loop):
        self._holds("on_fit_end", loop, loop.weights)


class AfterServer(FederatedCallback):
    def on_aggregate_end(self, loop, update):
        assert torch.equal(weights_of(loop.module), loop.weights)
        self.moved = loop.weights.clone()


def data():
    clients = {name: classification(40, seed) for seed, name in enumerate("abcd")}
    return FederatedDataModule(clients, classification(70, seed=9), batch_size=20)


@pytest.mark.parametrize("server", [FedAvg, FedDuAdagrad])
@pytest.mark.parametrize("engine", ["sequential", "vectorized", "auto"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_module_holds_what_each_hook_says(make_loop, engine, server, ranks):
    arguments = {"devices": 2, "strategy": "ddp_fork"} if ranks == 2 else {}
    spy, after, module = Spy(), AfterServer(), Watched()
    initial = weights_of(module)
    loop = make_loop(server=server(), engine=engine, callbacks=spy, max_rounds=2, num_sanity_val_steps=0, **arguments)
    # Callbacks of the package that report on a round are behind the server, too.
    loop.callbacks.append(after)
    checks = []

    class InFork(FederatedCallback):
        """A failed assertion ends a forked rank; what was seen is checked there."""

        def on_fit_end(self, loop):
            checks.append(True)
            per_round = 2 * (len(spy.clients) // 2)
            assert torch.equal(spy.start, initial)
            assert spy.moments.count("on_client_start") == spy.moments.count("on_client_end") == per_round > 0
            for hook in ("on_round_start", "on_aggregate_end", "on_validation_start", "on_round_end"):
                assert spy.moments.count(hook) == 2, hook
            if ranks == 1:
                deltas = [spy.clients[1, name] for name in "abcd"]
                torch.testing.assert_close(torch.stack(deltas).mean(0), spy.mean, rtol=1e-4, atol=1e-6)
            assert torch.equal(after.moved, loop.weights)
            iterates = 2 if loop.server.adaptive else 1
            moments = [moment for moment, _ in SEEN]
            assert moments == ["on_fit_start", *["on_validation_start"] * 2 * iterates, "on_fit_end"]
            assert torch.equal(SEEN[0][1], initial)
            assert torch.equal(SEEN[-1][1], loop.weights)
            # The last of a round is the iterate that is validated.
            assert torch.equal(SEEN[-2][1], loop.run.evaluated)

    loop.callbacks.append(InFork())
    loop.fit(module, data())
    assert torch.equal(weights_of(module), loop.weights)
    assert checks == ([True] if ranks == 1 else [])


class Fails(Classifier):
    """Raises in the second round, with other weights in the module."""

    def training_step(self, batch, batch_idx):
        if self.trainer.current_round == 1 and batch_idx > 0:
            nn.init.constant_(self.net[0].weight, 7.0)
            raise OSError("broken")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("server", [FedAvg, FedDuAdagrad])
def test_after_an_exception_the_module_holds_the_last_finished_round(make_loop, server):
    found = []

    class Note(FederatedCallback):
        def on_round_end(self, loop):
            self.kept = loop.weights.clone()

        def on_exception(self, loop):
            found.append((weights_of(loop.module), loop.weights.clone(), loop.average))

    note = Note()
    loop = make_loop(server=server(), engine="sequential", callbacks=note)
    with pytest.raises(RuntimeError, match="broken"):
        loop.fit(Fails(), data())
    module, weights, average = found[0]
    assert torch.equal(module, note.kept)
    assert torch.equal(weights, note.kept)
    assert average is None if server is FedAvg else torch.equal(average, weights)


class WatchedInTraining(Watched):
    """Its hooks around local steps, validation epochs and the end of training."""

    def on_train_start(self):
        self._note("on_train_start")

    def on_train_end(self):
        self._note("on_train_end")

    def on_validation_epoch_start(self):
        self._note("on_validation_epoch_start")

    def on_validation_epoch_end(self):
        self._note("on_validation_epoch_end")

    def on_validation_end(self):
        self._note("on_validation_end")


@pytest.mark.parametrize("engine", ["sequential", "auto"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_modules_own_hooks_around_training_and_validation(make_loop, engine, ranks):
    class Check(FederatedCallback):
        """At the end of each round, on every rank: what the module saw of itself since the last."""

        def on_round_start(self, loop):
            SEEN.clear()
            self.before = loop.weights.clone()

        def on_client_end(self, loop):
            moment, own = SEEN[-1]
            assert moment == "on_train_end"
            assert torch.equal(own, weights_of(loop.module))
            assert not torch.equal(own, self.before)

        def on_round_end(self, loop):
            seen = SEEN
            starts = [weights for moment, weights in seen if moment == "on_train_start"]
            assert len(starts) == 4 // ranks
            assert all(torch.equal(weights, self.before) for weights in starts)
            validated = [(moment, weights) for moment, weights in seen if moment.startswith("on_validation")]
            assert [moment for moment, _ in validated] == 2 * [
                *("on_validation_start", "on_validation_epoch_start", "on_validation_epoch_end", "on_validation_end")
            ]
            assert all(torch.equal(weights, loop.weights) for _, weights in validated[:4])
            assert all(torch.equal(weights, loop.average) for _, weights in validated[4:])

    arguments = {"devices": 2, "strategy": "ddp_fork"} if ranks == 2 else {}
    loop = make_loop(server=FedDuAdagrad(), engine=engine, callbacks=Check(), max_rounds=2, **arguments)
    loop.fit(WatchedInTraining(), data())
    assert len(loop.history) == 2
