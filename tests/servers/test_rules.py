import numpy as np
import pytest
import torch
from torch._inductor.utils import fresh_cache, run_and_get_code

import lightning_feddua
from lightning_feddua import ConfigurationError, FedDuAServer, RoundUpdate, servers
from tests.servers.oracle import Server

# name -> (arguments of the rule, arguments of the oracle), for given eps and eps_g
RULES = {
    "FedAvg": lambda eps, eps_g: ({"eta_g": 0.7}, {"eta": 0.7}),
    "FedAvgM": lambda eps, eps_g: ({"eta_g": 0.7}, {"eta": 0.7, "beta1": 0.9, "heavy_ball": True}),
    "FedExP": lambda eps, eps_g: ({"eps_g": eps_g}, {"eps_g": eps_g}),
    "FedExPM": lambda eps, eps_g: ({"eps_g": eps_g}, {"eps_g": eps_g, "beta1": 0.9}),
    "FedAdagrad": lambda eps, eps_g: ({"eta_g": 0.1, "eps": eps}, {"accumulator": "adagrad", "eta": 0.1, "eps": eps}),
    "FedAdam": lambda eps, eps_g: (
        {"eta_g": 0.1, "eps": eps},
        {"accumulator": "adam", "eta": 0.1, "eps": eps, "beta1": 0.9},
    ),
    "FedYogi": lambda eps, eps_g: (
        {"eta_g": 0.1, "eps": eps},
        {"accumulator": "yogi", "eta": 0.1, "eps": eps, "beta1": 0.9},
    ),
    "FedDuAdagrad": lambda eps, eps_g: (
        {"eps": eps, "eps_g": eps_g},
        {"accumulator": "adagrad", "eps": eps, "eps_g": eps_g},
    ),
    "FedDuAdam": lambda eps, eps_g: (
        {"eps": eps, "eps_g": eps_g},
        {"accumulator": "adam", "eps": eps, "eps_g": eps_g, "beta1": 0.9},
    ),
    "FedDuYogi": lambda eps, eps_g: (
        {"eps": eps, "eps_g": eps_g},
        {"accumulator": "yogi", "eps": eps, "eps_g": eps_g, "beta1": 0.9},
    ),
}


def make(name, eps=1e-9, eps_g=0.0):
    ours, oracle = RULES[name](eps, eps_g)
    return getattr(servers, name)(**ours), Server(**oracle)


def draw_deltas(rng, clients, dim, zeros):
    """Random updates of different scales; some coordinates never move, some stand still in some rounds."""
    deltas = rng.standard_normal((clients, dim)) * np.exp(rng.standard_normal(dim))
    if zeros == "some rounds":
        deltas[:, rng.random(dim) < 0.3] = 0
    elif zeros == "all rounds":
        deltas[:, : dim // 3] = 0
    return deltas


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize(("eps", "eps_g"), [(0.0, 0.0), (1e-9, 0.0), (1e-3, 0.1)])
@pytest.mark.parametrize("zeros", ["none", "some rounds", "all rounds"])
@pytest.mark.parametrize(("dim", "clients"), [(1, 1), (7, 50), (1000, 3), (10_000, 2)])
def test_rules_agree_with_oracle_over_50_rounds(name, eps, eps_g, zeros, dim, clients):
    server, oracle = make(name, eps, eps_g)
    rng = np.random.default_rng(dim)
    w = rng.standard_normal(dim)
    weights = torch.from_numpy(w.copy())
    for round in range(50):
        deltas = draw_deltas(rng, clients, dim, zeros)
        w, eta = oracle.step(w, deltas)
        mean = torch.from_numpy(deltas.mean(0))
        # In memory that is lent in some rounds, with anything in it.
        spare = torch.full_like(mean, torch.nan) if round % 2 else None
        update = RoundUpdate(mean.clone(), torch.from_numpy((deltas**2).sum(1)), spare=spare)
        assert server.step(weights, update) == pytest.approx(eta, rel=1e-10)
        assert torch.equal(update.mean_delta, mean)
    scale = np.abs(w).max()
    np.testing.assert_allclose(weights.numpy(), w, rtol=1e-10, atol=1e-12 * scale)


@pytest.mark.parametrize("name", RULES)
def test_float32_vectors_agree_to_1e_minus_5(name):
    server, oracle = make(name)
    rng = np.random.default_rng(1)
    w = rng.standard_normal(1000)
    weights = torch.from_numpy(w).float()
    w = weights.double().numpy()
    for _ in range(50):
        deltas = draw_deltas(rng, 5, 1000, "none").astype(np.float32)
        mean = deltas.astype(np.float64).mean(0)
        w, eta = oracle.step(w, deltas.astype(np.float64))
        update = RoundUpdate(torch.from_numpy(mean).float(), torch.from_numpy((deltas.astype(float) ** 2).sum(1)))
        assert server.step(weights, update) == pytest.approx(eta, rel=1e-5)
    np.testing.assert_allclose(weights.numpy(), w, rtol=1e-5, atol=1e-5 * np.abs(w).max())


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("eps", [0.0, 1e-9])
@pytest.mark.parametrize("size", [1e-30, 1e-22, 1e-12])
def test_underflowing_updates_give_finite_weights(name, eps, size):
    server, _ = make(name, eps)
    weights = torch.ones(10)
    for _ in range(5):
        deltas = torch.randn(4, 10) * size
        server.step(weights, RoundUpdate(deltas.mean(0), deltas.double().square().sum(1)))
    assert weights.isfinite().all()


@pytest.mark.parametrize("name", [name for name in RULES if make(name)[0].adaptive])
@pytest.mark.parametrize("eps_g", [0.0, 1e-3])
def test_zero_update_leaves_weights_and_says_so(name, eps_g):
    server, _ = make(name, eps=0.0, eps_g=eps_g)
    weights = torch.ones(3)
    # Updates that cancel have norms, but no direction.
    with pytest.warns(UserWarning, match="weights stay"):
        eta = server.step(weights, RoundUpdate(torch.zeros(3), torch.ones(2)))
    assert eta == 0
    assert torch.equal(weights, torch.ones(3))


def test_eta_is_one_scalar_over_chunks(monkeypatch):
    """A vector of many chunks gives what one chunk gives: the norm is over all coordinates."""
    whole, chunked = servers.FedDuAdam(), servers.FedDuAdam()
    a, b = torch.zeros(1000, dtype=torch.float64), torch.zeros(1000, dtype=torch.float64)
    for _ in range(3):
        deltas = torch.randn(4, 1000, dtype=torch.float64)
        update = RoundUpdate(deltas.mean(0), deltas.square().sum(1))
        eta = whole.step(a, update)
        with monkeypatch.context() as patch:
            patch.setattr("lightning_feddua.vectors._CHUNK_KEPT", 64)
            assert chunked.step(b, update) == pytest.approx(eta, rel=1e-13)
    torch.testing.assert_close(a, b, rtol=1e-12, atol=0)


def test_client_weights_enter_mean_and_norms():
    rng = np.random.default_rng(0)
    deltas, p = rng.standard_normal((4, 6)), np.array([1.0, 2.0, 3.0, 10.0])
    w, eta = Server("adagrad").step(np.zeros(6), deltas, p)
    weights = torch.zeros(6, dtype=torch.float64)
    mean = torch.from_numpy(p @ deltas / p.sum())
    update = RoundUpdate(mean, torch.from_numpy((deltas**2).sum(1)), client_weights=torch.from_numpy(p))
    assert servers.FedDuAdagrad(eps=0.0).step(weights, update) == pytest.approx(eta, rel=1e-12)
    np.testing.assert_allclose(weights.numpy(), w, rtol=1e-12)


def test_step_leaves_the_update_as_it_was():
    update = RoundUpdate(torch.randn(10), torch.rand(3))
    mean, norms = update.mean_delta.clone(), update.squared_norms.clone()
    for name in RULES:
        make(name)[0].step(torch.zeros(10), update)
    assert torch.equal(update.mean_delta, mean)
    assert torch.equal(update.squared_norms, norms)


@pytest.mark.parametrize("name", RULES)
def test_state_dict_continues_bit_for_bit(name):
    updates = [RoundUpdate(torch.randn(20), torch.rand(3)) for _ in range(6)]
    whole, first, second = (make(name)[0] for _ in range(3))
    a, b = torch.zeros(20), torch.zeros(20)
    for update in updates:
        whole.step(a, update)
    for update in updates[:3]:
        first.step(b, update)
    second.load_state_dict(first.state_dict())
    for update in updates[3:]:
        second.step(b, update)
    assert torch.equal(a, b)


def test_state_of_another_rule_is_refused():
    with pytest.raises(ConfigurationError, match=r"belongs to `FedAvg`, and this is `FedExP`\. Resume"):
        servers.FedExP().load_state_dict(servers.FedAvg().state_dict())


def test_minimum_step_of_the_original_fedexp():
    deltas = torch.ones(3, 2)  # identical clients: η = 1/2 without the bound
    update = RoundUpdate(deltas.mean(0), deltas.square().sum(1))
    assert servers.FedExP().step(torch.zeros(2), update) == pytest.approx(0.5)
    assert servers.FedExP(min_step=1.0).step(torch.zeros(2), update) == 1.0


def test_bias_correction_is_adams():
    server = servers.FedAdam(eta_g=0.1, bias_correction=True, eps=0.0)
    weights = torch.zeros(5, dtype=torch.float64)
    v = s = 0.0
    w = np.zeros(5)
    for t in range(1, 6):
        mean = np.random.default_rng(t).standard_normal(5)
        v, s = 0.9 * v + 0.1 * mean, 0.99 * s + 0.01 * mean**2
        w += 0.1 * (v / (1 - 0.9**t)) / np.sqrt(s / (1 - 0.99**t))
        server.step(weights, RoundUpdate(torch.from_numpy(mean), torch.ones(1)))
    np.testing.assert_allclose(weights.numpy(), w, rtol=1e-12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"eps": -1.0}, r"`eps=-1.0` is not"),
        ({"eps_g": float("nan")}, r"`eps_g=nan` is not"),
        ({"beta1": 1.0}, r"`beta1=1.0` lies outside"),
        ({"beta2": -0.1}, r"`beta2=-0.1` lies outside"),
        ({"preconditioner": "adamw"}, r"no preconditioner `adamw`\. Choose one of `adagrad`"),
        ({"step_size": 0.0}, r"step size `0.0`"),
        ({"step_size": "fast"}, r"step size `fast`"),
        ({"min_step": 1.0}, r"`min_step=1.0`"),
        ({"heavy_ball": True}, r"`heavy_ball=True`"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        FedDuAServer(**arguments)


def test_all_rules_are_public():
    assert set(RULES) < set(lightning_feddua.__all__)


def test_a_step_beyond_the_range_of_float32_is_not_taken():
    weights = torch.ones(3)
    with pytest.warns(UserWarning, match="weights stay"):
        assert servers.FedExP().step(weights, RoundUpdate(torch.full((3,), 1e-25), torch.ones(2))) == 0
    assert torch.equal(weights, torch.ones(3))


@pytest.fixture
def small_steps_compile(monkeypatch):
    monkeypatch.setattr("lightning_feddua.servers.passes.COMPILED_SERVER_SIZE", 10)


def is_compiled(server):
    return server._passes.compiled


@pytest.mark.usefixtures("small_steps_compile")
@pytest.mark.parametrize(
    "rule", [pytest.param(servers.FedDuAdam, marks=pytest.mark.slow), servers.FedAdagrad, servers.FedExP]
)
def test_a_compiled_step_is_the_eager_one(rule, recwarn):
    rng = torch.Generator().manual_seed(0)
    results = []
    for compiled in (False, True):
        server, weights = rule(), torch.zeros(1000)
        server.set_up(layout=None, compile=compiled)
        for _ in range(4):
            delta = torch.randn(1000, generator=rng.manual_seed(0)) * 0.1
            server.step(weights, RoundUpdate(delta, torch.tensor([2.0, 3.0])))
        assert is_compiled(server) is compiled
        results.append(weights)
    assert not [w for w in recwarn if "not compiled" in str(w.message)]
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-7)


@pytest.mark.usefixtures("small_steps_compile")
@pytest.mark.parametrize(
    "rule",
    [
        servers.FedDuAdagrad,
        *(pytest.param(r, marks=pytest.mark.slow) for r in (servers.FedDuAdam, servers.FedDuYogi, servers.FedExPM)),
    ],
)
def test_each_compiled_pass_is_one_loop(rule):
    """A second loop over the vectors would read them all again, and nothing but the time would show it."""
    server, weights = rule(), torch.zeros(1000)
    server.set_up(layout=None, compile=True)
    torch._dynamo.reset()
    with fresh_cache():
        _, sources = run_and_get_code(server.step, weights, RoundUpdate(torch.randn(1000), torch.ones(2)))
    assert is_compiled(server)
    assert [source.count("for(int64_t x0=") for source in sources] == [1, 1]


@pytest.mark.usefixtures("small_steps_compile")
def test_a_wrong_compiler_is_noticed(monkeypatch):
    monkeypatch.setattr(
        torch, "compile", lambda function, **_: lambda *args: function(*args) if len(args) == 4 else None
    )
    server, weights = servers.FedDuAdam(), torch.zeros(10)
    server.set_up(layout=None, compile=True)
    with pytest.warns(UserWarning, match="computes something else"):
        server.step(weights, RoundUpdate(torch.ones(10), torch.tensor([20.0])))
    assert weights.norm() > 0
    assert not is_compiled(server)


def steps(server, compile=None):
    """Weights after three steps, which start a new fit unless ``compile`` is left out."""
    if compile is not None:
        server.reset()
        server.set_up(layout=None, compile=compile)
    weights = torch.zeros(1000)
    for round in range(3):
        delta = torch.randn(1000, generator=torch.Generator().manual_seed(round))
        server.step(weights, RoundUpdate(delta, torch.tensor([2.0, 3.0])))
    return weights


@pytest.mark.usefixtures("small_steps_compile")
def test_a_server_is_compiled_anew_or_not_at_all_in_each_fit():
    server = servers.FedDuAdam()
    assert not is_compiled(server)
    steps(server, compile=True)
    assert is_compiled(server)
    again = steps(server, compile=False)
    assert not is_compiled(server)
    assert torch.equal(again, steps(servers.FedDuAdam()))


def test_small_steps_are_not_compiled():
    server = servers.FedDuAdagrad()
    steps(server, compile=True)
    assert not is_compiled(server)
