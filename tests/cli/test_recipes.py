"""Recipes on data that is made on the spot run, and the sparse one shows what its methods are for."""

import csv

import pytest
import torch

from lightning_feddua import ConfigurationError, FederatedLoop
from lightning_feddua.cli import main
from lightning_feddua.cli.recipes import find_recipe, load_recipe, split_presets
from lightning_feddua.data import SparseRegression, SyntheticRegression
from lightning_feddua.models import SparseLinearRegression


def fit(tmp_path, recipe, preset=None, **loop):
    """The rows of the log."""
    settings = {"out_dir": tmp_path, "accelerator": "cpu", "devices": 1, "enable_progress_bar": "false", **loop}
    arguments = [text for name, value in settings.items() for text in (f"--loop.{name}", str(value))]
    chosen = ["--preset", preset] if preset else []
    assert main(["fit", "--config", recipe, *chosen, *arguments]) == 0
    with (tmp_path / "version_0/metrics.csv").open() as file:
        rows = csv.DictReader(file)
        return [{name: float(row[name]) for name in row if row[name] and name != "certificate"} for row in rows]


PRESETS = [
    (recipe, preset)
    for recipe in ("synthetic_scaffold", "sparse_regression")
    for preset in split_presets(load_recipe(find_recipe(recipe)))[1]
]


@pytest.mark.parametrize(("recipe", "preset"), PRESETS)
def test_synthetic_recipes_run(recipe, preset, tmp_path):
    rows = fit(tmp_path, recipe, preset, max_rounds=3, engine="vectorized")
    assert len(rows) == 3
    assert 0 < rows[-1]["val_loss"] < rows[0]["val_loss"]


def final(tmp_path, preset):
    return fit(tmp_path / preset, "sparse_regression", preset, engine="vectorized", validate_every=200)[-1]


@pytest.mark.slow
def test_feddualavg_finds_the_support_and_fedmid_does_not(tmp_path):
    dual, mid = final(tmp_path, "FedDualAvg"), final(tmp_path, "FedMid")
    assert dual["recall"] == mid["recall"] == 1
    assert dual["precision"] > 0.9
    assert mid["precision"] < 0.3
    assert mid["nonzeros"] > 3 * dual["nonzeros"]
    # Nor does it pay with a worse estimate.
    assert dual["weight_error"] < 0.7 * mid["weight_error"]


@pytest.mark.slow
def test_hypentropy_estimates_sparse_weights_better_than_the_euclidean_map(tmp_path):
    hypentropy, euclidean = final(tmp_path, "Hypentropy"), final(tmp_path, "FedExP")
    assert hypentropy["weight_error"] < 0.5 * euclidean["weight_error"]
    assert hypentropy["val_loss"] < 0.25 * euclidean["val_loss"]
    assert hypentropy["f1"] > 2 * euclidean["f1"]


def test_sparse_data_have_a_common_support_on_which_clients_disagree():
    data = SparseRegression(num_clients=30, samples_per_client=80, dim=40, nonzeros=3, disagreement=2.0, noise=0.0)
    w = data.true_weights
    assert w.count_nonzero() == 3
    assert set(w[w != 0].abs().tolist()) == {1.0}
    # With enough noiseless samples each client's own weights can be solved for.
    own = torch.stack([torch.linalg.lstsq(*client.tensors).solution[:, 0] for client in data.clients.values()])
    torch.testing.assert_close(own.mean(0), w)
    assert 1.5 < (own - w).norm(dim=1).mean() < 2.5
    again, other = SparseRegression(seed=3), SparseRegression(seed=4)
    assert torch.equal(again.clients["7"].tensors[0], SparseRegression(seed=3).clients["7"].tensors[0])
    assert not torch.equal(again.true_weights, other.true_weights)


def test_support_metrics(tmp_path):
    data = SparseRegression(num_clients=2, dim=8, nonzeros=5, disagreement=0.0)
    model = SparseLinearRegression(dim=8, threshold=0.1).double()
    support = data.true_weights.nonzero()[:, 0]
    with torch.no_grad():
        # Three of five are found, along with one that is not there and one below notice.
        model.linear.weight[0, support[:3]] = data.true_weights[support[:3]]
        model.linear.weight[0, (data.true_weights == 0).nonzero()[:2, 0]] = torch.tensor([0.5, 0.05]).double()
    loop = FederatedLoop(local_steps=1, precision="64-true", out_dir=tmp_path, accelerator="cpu")
    found = loop.validate(model, data)
    assert found["nonzeros"] == 4
    assert found["precision"] == pytest.approx(3 / 4)
    assert found["recall"] == pytest.approx(3 / 5)
    assert found["f1"] == pytest.approx(2 / 3)
    assert found["weight_error"] == pytest.approx(((2 + 0.5**2 + 0.05**2) / 5) ** 0.5)


@pytest.mark.parametrize("data", [SyntheticRegression(dim=400), SparseRegression(dim=30)])
def test_data_without_matching_true_weights_are_refused(data, tmp_path):
    loop = FederatedLoop(local_steps=1, precision="64-true", out_dir=tmp_path, accelerator="cpu")
    with pytest.raises(ConfigurationError, match="has no `true_weights` of 400 elements"):
        loop.validate(SparseLinearRegression(), data)


@pytest.mark.parametrize("arguments", [{"num_clients": 0}, {"dim": 5, "nonzeros": 6}])
def test_sparse_data_out_of_range_are_refused(arguments):
    with pytest.raises(ConfigurationError):
        SparseRegression(**arguments)
