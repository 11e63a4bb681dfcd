import numpy as np
import pytest
import torch

from lightning_feddua import ClientError, ConfigurationError, FedAvg, FederatedCallback, Scaffnew
from lightning_feddua.aggregation.transforms import ClipUpdateNorm, TransformContext, UpdateTransform
from lightning_feddua.data import SyntheticRegression
from lightning_feddua.models import LinearRegression


class Noise(UpdateTransform):
    """Noise on each client's update and on the mean."""

    def __init__(self, std=0.1):
        self.std = std

    def client(self, update, context):
        noise = torch.randn(update.delta.shape, generator=context.generator(update.client.index))
        update.delta.add_(noise.to(update.delta), alpha=self.std)

    def round(self, update, context):
        noise = torch.randn(update.mean_delta.shape, generator=context.generator())
        update.mean_delta.add_(noise.to(update.mean_delta), alpha=self.std)


class Running(UpdateTransform):
    """Keeps a state: the number of rounds, by which it scales updates."""

    def __init__(self):
        self._rounds = 0

    def reset(self):
        self._rounds = 0

    def round(self, update, context):
        self._rounds += 1
        update.mean_delta.mul_(1 / self._rounds)

    def state_dict(self):
        return {"rounds": self._rounds}

    def load_state_dict(self, state):
        self._rounds = state["rounds"]


def fit(make_loop, ckpt_path=None, **arguments):
    arguments = {"server": FedAvg(), "precision": "64-true", "engine": "sequential", **arguments}
    loop = make_loop(**arguments)
    loop.fit(LinearRegression(dim=20), SyntheticRegression(num_clients=5, samples_per_client=8, dim=20), ckpt_path)
    return loop


class Updates(FederatedCallback):
    def __init__(self):
        self.clients, self.means = {}, []

    def on_client_end(self, loop, round, client_id):
        own = torch.cat([parameter.detach().flatten() for parameter in loop.module.parameters()])
        self.clients[round, client_id] = own - loop.weights

    def on_aggregate_end(self, update):
        self.means.append((update.mean_delta.clone(), update.squared_norms.clone()))


def test_what_a_transform_adds_is_in_the_mean_and_in_the_norms(make_loop):
    """Against NumPy: the mean of the noisy updates, plus the noise of the round."""
    updates = Updates()
    fit(make_loop, transforms=[Noise(0.3)], callbacks=updates, max_rounds=1)
    context = TransformContext(seed=0, round=0, cohort_size=5, population=5, place=0)
    noisy = [
        updates.clients[0, str(i)].numpy() + 0.3 * torch.randn(20, generator=context.generator(i)).double().numpy()
        for i in range(5)
    ]
    expected = np.mean(noisy, axis=0) + 0.3 * torch.randn(20, generator=context.generator()).double().numpy()
    mean, norms = updates.means[0]
    np.testing.assert_allclose(mean.numpy(), expected, rtol=1e-12)
    np.testing.assert_allclose(norms.numpy(), [np.sum(delta**2) for delta in noisy], rtol=1e-12)


def test_random_numbers_do_not_depend_on_ranks_or_engines(make_loop):
    one = fit(make_loop, transforms=[Noise()])
    two = fit(make_loop, transforms=[Noise()], devices=2, strategy="ddp_fork")
    assert torch.equal(one.weights, two.weights)
    vectorized = fit(make_loop, transforms=[Noise()], engine="vectorized")
    torch.testing.assert_close(one.weights, vectorized.weights, rtol=1e-9, atol=1e-12)


def test_two_transforms_of_a_class_draw_different_numbers():
    first, second = (TransformContext(0, 0, 5, 5, place).generator() for place in range(2))
    assert not torch.equal(torch.randn(4, generator=first), torch.randn(4, generator=second))
    of_round, of_client = (TransformContext(0, 0, 5, 5).generator(client) for client in (None, 0))
    assert not torch.equal(torch.randn(4, generator=of_round), torch.randn(4, generator=of_client))


def test_transforms_run_in_order_after_clipping(make_loop):
    """`max_update_norm` is the first of them: noise is not clipped away."""
    updates = Updates()
    fit(make_loop, transforms=[Noise(5.0)], max_update_norm=1e-6, callbacks=updates, max_rounds=1)
    assert (updates.means[0][1] > 1).all()
    updates = Updates()
    fit(make_loop, transforms=[Noise(5.0), ClipUpdateNorm(1e-3)], callbacks=updates, max_rounds=1)
    np.testing.assert_allclose(updates.means[0][1].sqrt().numpy(), 1e-3, rtol=1e-6)


def test_their_state_is_in_checkpoints(make_loop):
    whole = fit(make_loop, transforms=[Running(), Noise()], max_rounds=4)
    half = fit(make_loop, transforms=[Running(), Noise()], max_rounds=2, checkpoint_every=1)
    resumed = fit(make_loop, half.run_dir / "last.ckpt", transforms=[Running(), Noise()], max_rounds=4)
    assert torch.equal(whole.weights, resumed.weights)


@pytest.mark.parametrize(
    ("transforms", "message"),
    [
        ([Noise(0.2)], r"`transforms\[0\]\.std` was `0.1` and is `0.2`"),
        ([Running()], r"`transforms` was `\['Noise'\]` and is `\['Running'\]`"),
        ([Noise(), Running()], r"`transforms` was `\['Noise'\]` and is `\['Noise', 'Running'\]`"),
        (None, r"`transforms` was `\['Noise'\]` and is `None`"),
    ],
)
def test_a_run_is_resumed_with_the_same_transforms(make_loop, transforms, message):
    first = fit(make_loop, transforms=[Noise()], max_rounds=1, checkpoint_every=1)
    with pytest.raises(ConfigurationError, match=message):
        fit(make_loop, first.run_dir / "last.ckpt", transforms=transforms)


def test_an_algorithm_that_needs_whole_updates_is_refused(make_loop):
    with pytest.raises(ConfigurationError, match="`Scaffnew` needs all clients as they are"):
        fit(make_loop, client=Scaffnew(), transforms=[Noise()])


def test_a_second_fit_starts_afresh_and_forked_ranks_bring_the_state_home(make_loop):
    running = Running()
    loop = make_loop(server=FedAvg(), precision="64-true", transforms=running)
    for _ in range(2):
        loop.fit(LinearRegression(dim=20), SyntheticRegression(num_clients=5, samples_per_client=8, dim=20))
        assert running._rounds == 3
    forked = Running()
    fit(make_loop, transforms=(forked,), devices=2, strategy="ddp_fork")
    assert forked._rounds == 3


class Breaks(UpdateTransform):
    """Makes something of one client's update that cannot be summed."""

    def __init__(self, how):
        self.how = how

    def client(self, update, context):
        if update.client.name == "2":
            if self.how == "raises":
                raise ZeroDivisionError("by zero")
            update.delta.fill_(torch.nan)


@pytest.mark.parametrize("how", ["raises", "nan"])
def test_what_a_transform_makes_of_an_update_is_checked(make_loop, how):
    with pytest.warns(UserWarning, match="Client `2` is left out of round 0"):
        loop = fit(make_loop, transforms=[Breaks(how)], on_client_error="skip")
    assert [row["clients"] for row in loop.history] == [4, 4, 4]
    assert loop.weights.isfinite().all()
    with pytest.raises(ClientError, match="Client `2` failed in round 0"):
        fit(make_loop, transforms=[Breaks(how)])


class Mask(UpdateTransform):
    def __init__(self, mask):
        self.mask = mask

    def round(self, update, context):
        update.mean_delta.mul_(torch.as_tensor(self.mask).to(update.mean_delta))


@pytest.mark.parametrize("kind", [np.array, torch.tensor])
def test_arrays_among_the_settings_are_compared(make_loop, kind):
    first = fit(make_loop, transforms=[Mask(kind([1.0] * 20))], max_rounds=1, checkpoint_every=1)
    path = first.run_dir / "last.ckpt"
    fit(make_loop, path, transforms=[Mask(kind([1.0] * 20))], max_rounds=2)
    with pytest.raises(ConfigurationError, match=r"`transforms\[0\].mask` was"):
        fit(make_loop, path, transforms=[Mask(kind([0.0] + [1.0] * 19))])
