"""The paper's datasets, read from small files in the hub's layout."""

import inspect
import re
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
import yaml

from lightning_feddua import ConfigurationError, FederatedDataModule
from lightning_feddua.cli import main
from lightning_feddua.cli.recipe_classes import shipped_classes
from lightning_feddua.data import Cifar, Femnist, IIDPartitioner, Shakespeare
from lightning_feddua.data.cifar import MEAN, STD, random_crop, random_flip
from lightning_feddua.data.natural import NaturalDataModule
from lightning_feddua.data.shakespeare import SYMBOLS, encode
from tests import plain_femnist


def write(folder, split, rows, features=None):
    dataset = datasets.Dataset.from_dict(rows, features=features)
    dataset.to_parquet(folder / f"{split}-00000-of-00001.parquet")


@pytest.fixture(scope="module")
def femnist(tmp_path_factory):
    folder = tmp_path_factory.mktemp("femnist")
    rng = np.random.default_rng(0)
    sizes = [12, 5, 20, 30]
    writers = [f"w{i}" for i, size in enumerate(sizes) for _ in range(size)]
    rows = {
        # The first pixel says who wrote it.
        "image": [np.full((28, 28), int(w[1]) * 50, dtype=np.uint8) for w in writers],
        "writer_id": writers,
        "hsf_id": [0] * len(writers),
        "character": rng.integers(62, size=len(writers)).tolist(),
    }
    features = datasets.Features(
        image=datasets.Image(),
        writer_id=datasets.Value("string"),
        hsf_id=datasets.Value("int64"),
        character=datasets.ClassLabel(num_classes=62),
    )
    write(folder, "train", rows, features)
    return str(folder)


@pytest.fixture(scope="module")
def shakespeare(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shakespeare")
    text = "".join(np.random.default_rng(0).choice(list(SYMBOLS), size=1200))
    rows = {"character_id": [], "x": [], "y": []}
    for role, (start, count) in {"HAMLET": (0, 500), "OPHELIA": (600, 300)}.items():
        for i in range(start, start + count):
            rows["character_id"].append(role)
            rows["x"].append(text[i : i + 80])
            rows["y"].append(text[i + 80])
    write(folder, "train", rows)
    return str(folder)


@pytest.fixture(scope="module")
def cifar(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cifar")
    rng = np.random.default_rng(0)
    for split, count in (("train", 60), ("test", 20)):
        rows = {
            "img": list(rng.integers(256, size=(count, 32, 32, 3), dtype=np.uint8)),
            "label": [i % 10 for i in range(count)],
            "fine_label": [i % 100 for i in range(count)],
        }
        features = datasets.Features(
            img=datasets.Image(), label=datasets.Value("int64"), fine_label=datasets.Value("int64")
        )
        write(folder, split, rows, features)
    return str(folder)


def test_femnist_is_split_within_writers(femnist):
    data = Femnist(femnist, num_clients=2, min_samples=12)
    data.setup("fit")
    assert len(data.clients) == 2
    sizes = {"w0": (10, 2), "w2": (18, 2), "w3": (27, 3)}
    for name in data.client_ids:
        x, y = data.client_data(name).batch(np.arange(3))
        assert x.shape == (3, 1, 28, 28)
        assert x.dtype == torch.float32
        assert torch.allclose(x, torch.tensor(int(name[1]) * 50 / 255))
        assert y.dtype == torch.int64
        assert len(data.clients[name]) == sizes[name][0]
        assert len(data.val_clients[name]) == sizes[name][1]
    assert len(data.val_dataset) == sum(sizes[name][1] for name in data.client_ids)
    with pytest.raises(
        ConfigurationError, match=r"`num_clients=100` is not possible with 3 clients of 12 samples or more"
    ):
        Femnist(femnist, min_samples=12).setup("fit")


@pytest.mark.parametrize("rule", ["FedAvg", "FedDuAdagrad"])
def test_the_plain_loop_to_compare_with_runs(rule, femnist, monkeypatch):
    for name, value in {"WRITERS": 3, "LEAST": 10, "COHORT": 2, "STEPS": 1}.items():
        monkeypatch.setattr(plain_femnist, name, value)
    rounds, accuracies = zip(*plain_femnist.run(femnist, rule, seed=0, rounds=4, every=2), strict=True)
    assert rounds == (2, 4)
    assert all(0 <= accuracy <= 100 for accuracy in accuracies)


def test_labels_beyond_the_models_classes_are_named(tmp_path, capsys):
    image = datasets.Image()
    rows = {"image": [np.zeros((28, 28), np.uint8)] * 4, "writer_id": ["a"] * 4, "character": [0, 1, 2, 70]}
    features = {"image": image, "writer_id": datasets.Value("string"), "character": datasets.Value("int64")}
    write(tmp_path, "train", rows, datasets.Features(features))
    command = ["fit", "--config", "femnist", "--data.path", str(tmp_path), "--data.min_samples", "1"]
    assert main([*command, "--data.num_clients", "1", "--loop.clients_per_round", "1"]) == 2
    assert "The data has labels up to 70, and `FemnistCNN` has 62 classes." in capsys.readouterr().err
    for split, label in (("train", 9), ("test", 10)):
        features = datasets.Features(img=image, label=datasets.Value("int64"))
        write(tmp_path / "cifar", split, {"img": [np.zeros((32, 32, 3), np.uint8)], "label": [label]}, features)
    data = Cifar(str(tmp_path / "cifar"), partitioner=IIDPartitioner(1))
    data.setup("fit")
    assert data.num_classes == 11


def test_shakespeare_is_split_in_time_with_a_gap(shakespeare):
    data = Shakespeare(shakespeare, num_clients=None, min_samples=300)
    data.setup("fit")
    assert data.client_sizes().tolist() == [450, 270]
    assert len(data.val_dataset) == 0  # both test parts are shorter than the gap
    data = Shakespeare(shakespeare, num_clients=None, min_samples=300, train_fraction=0.5)
    data.setup("fit")
    assert len(data.val_dataset) == (250 - 79) + (150 - 79)
    x, y = data.client_data("HAMLET").batch(np.arange(2))
    assert x.dtype == torch.uint8
    assert torch.equal(x[1, :-1], x[0, 1:])
    assert y[0] == x[1, -1]
    # The first validated window shares no character with a window that is trained on.
    last_trained = data.clients["HAMLET"][249][0]
    first_validated = data.val_dataset[0][0]
    assert not any(torch.equal(first_validated[:8], last_trained[i : i + 8]) for i in range(73))


def test_symbols():
    assert len(SYMBOLS) == 79
    with pytest.raises(ConfigurationError, match=r"has the symbol '#', which is not one of the 79"):
        encode(["ab#"], 3)
    with pytest.raises(ConfigurationError, match=r"has the symbol '’', which is not one of the 79"):
        encode(["a’b"], 3)
    with pytest.raises(ConfigurationError, match=r"The text `abcd` has 4 characters, not 3"):
        encode(["abc", "abcd"], 3)


def test_cifar_is_normalised_and_augmented_in_training_only(cifar):
    data = Cifar(cifar, partitioner=IIDPartitioner(5))
    data.setup("fit")
    assert data.client_sizes().tolist() == [12] * 5
    assert data.num_classes == 10
    batch = data.client_data("0").batch(np.arange(12))
    assert batch[0].dtype == torch.uint8
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (MEAN, STD))
    plain = (batch[0].float() / 255 - mean) / std

    class View:
        training = False

    data.trainer = View()
    torch.testing.assert_close(data.on_after_batch_transfer(batch, 0)[0], plain, rtol=1e-4, atol=1e-5)
    data.trainer.training = True
    augmented = data.on_after_batch_transfer(batch, 0)[0]
    assert augmented.shape == plain.shape
    assert not torch.allclose(augmented, plain)


def test_each_image_is_cropped_and_flipped_on_its_own():
    image = torch.arange(1, 1 + 3 * 8 * 8).view(1, 3, 8, 8)
    images = image.expand(64, -1, -1, -1)
    padded = torch.nn.functional.pad(image[0], (2,) * 4)
    windows = {tuple(padded[:, i : i + 8, j : j + 8].flatten().tolist()) for i in range(5) for j in range(5)}
    cropped = random_crop(images, 2)
    seen = {tuple(c.flatten().tolist()) for c in cropped}
    assert seen <= windows
    assert len(seen) > 10
    flipped = random_flip(images)
    count = sum(torch.equal(f, image[0].flip(-1)) for f in flipped)
    assert all(torch.equal(f, image[0]) or torch.equal(f, image[0].flip(-1)) for f in flipped)
    assert 16 < count < 48  # 32 ± 4 standard deviations


@pytest.mark.parametrize(
    ("recipe", "dataset", "arguments"),
    [
        ("femnist", "femnist", ["--data.num_clients", "2", "--data.min_samples", "12"]),
        (
            "shakespeare",
            "shakespeare",
            ["--data.num_clients", "2", "--data.min_samples", "300", "--data.train_fraction", "0.5"],
        ),
        ("cifar10", "cifar", ["--data.partitioner.num_clients", "2"]),
        pytest.param(
            "cifar100",
            "cifar",
            ["--data.partitioner.num_clients", "2", "--loop.precision", "64-true"],
            marks=pytest.mark.slow,
        ),
        ("cifar100_vit", "cifar", ["--data.partitioner.num_clients", "2"]),
    ],
)
def test_recipes_run_from_a_local_folder(recipe, dataset, arguments, request, tmp_path, capsys):
    settings = ["--loop.max_rounds", "1", "--loop.local_steps", "1", "--loop.clients_per_round", "2"]
    path = request.getfixturevalue(dataset)
    command = ["fit", "--config", recipe, "--data.path", path, "--data.batch_size", "4", *settings, *arguments]
    assert main([*command, "--loop.out_dir", str(tmp_path)]) == 0
    header, row = (line.split(",") for line in (tmp_path / "version_0/metrics.csv").read_text().splitlines())
    assert np.isfinite(float(dict(zip(header, row, strict=True))["val_loss"]))


def test_the_partitioner_of_the_documentation_runs_from_a_recipe(cifar, tmp_path, monkeypatch, capsys):
    page = (Path(__file__).parents[2] / "docs/own_module.md").read_text()
    for name in ("regions.py", "regions.yaml"):
        (block,) = re.findall(rf"```\w+\n(# {name}\n.*?)```", page, re.DOTALL)
        (tmp_path / name).write_text(block)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    recipe = ["--config", "cifar10", "--config", "regions.yaml", "--data.path", cifar, "--data.batch_size", "4"]
    assert main(["data", *recipe]) == 0
    assert "Cifar(3 clients, 60 samples)" in capsys.readouterr().out
    assert main(["fit", *recipe, "--loop.max_rounds", "1", "--loop.local_steps", "1", "--loop.out_dir", "runs"]) == 0
    resolved = yaml.safe_load(Path("runs/version_0/recipe.yaml").read_text())
    assert resolved["data"]["init_args"]["partitioner"]["class_path"] == "regions.Regions"


def test_bases_of_data_modules_are_abstract():
    assert inspect.isabstract(NaturalDataModule)
    assert not inspect.isabstract(Femnist)
    assert "NaturalDataModule" not in shipped_classes(FederatedDataModule)
    with pytest.raises(TypeError, match="abstract"):
        NaturalDataModule("folder", None, 1, 0.5, 1, 1, 0)


@pytest.mark.parametrize(("task", "min_samples"), [(Femnist, 100), (Shakespeare, 1000)])
def test_arguments_of_natural_data_modules_are_those_of_their_base(task, min_samples):
    """Written out in each class, because the command line reads names, defaults and help from the signature."""
    inherited = list(inspect.signature(NaturalDataModule).parameters)
    own = inspect.signature(task).parameters
    assert [name for name in own if name != "max_eval_samples"] == inherited
    defaults = {name: own[name].default for name in inherited if name != "path"}
    assert defaults == {
        **{"num_clients": 100, "min_samples": min_samples, "train_fraction": 0.9},
        **{"batch_size": 50, "eval_batch_size": 500, "seed": 0},
    }
