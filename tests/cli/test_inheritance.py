"""Recipes that change another recipe instead of copying it."""

import pytest
import yaml

from lightning_feddua.cli import main, recipes
from lightning_feddua.cli.recipes import find_recipe, load_recipe, recipe_dirs, shipped_recipes

CIFAR = {"cifar10", "cifar100", "cifar100_vit", "cifar10_scaffold", "cifar10_fedprox"}


def shipped(name):
    return load_recipe(find_recipe(name))


def write(path, **content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


@pytest.mark.parametrize("client", ["scaffold", "fedprox"])
def test_a_client_algorithm_on_cifar10_changes_nothing_else(client):
    base, own = shipped("cifar10"), shipped(f"cifar10_{client}")
    assert own.pop("client")["class_path"].lower() == client
    assert own["loop"].pop("out_dir") == f"runs/cifar10_{client}"
    assert base["loop"].pop("out_dir") == "runs/cifar10"
    presets, base_presets = own.pop("presets"), base.pop("presets")
    assert own == base
    assert list(presets) == ["FedDuAdagrad", "FedDuAdam", "FedExP", "FedAvg"]
    assert presets.items() <= base_presets.items()


def test_synthetic_scaffold_is_synthetic_with_other_clients():
    base, own = shipped("synthetic"), shipped("synthetic_scaffold")
    assert own.pop("client") == {"class_path": "Scaffold", "init_args": {"option": "II"}}
    assert own["loop"].pop("out_dir") == "runs/synthetic_scaffold"
    assert base["loop"].pop("out_dir") == "runs/synthetic"
    presets, base_presets = own.pop("presets"), base.pop("presets")
    assert own == base
    assert list(presets) == ["FedDuAdagrad", "FedExP", "FedAvg", "FedAdagrad"]
    assert presets.pop("FedAdagrad")["model"] == {"init_args": {"lr": 0.1}}
    assert presets.items() <= base_presets.items()


def test_cifar100_is_cifar10_with_other_data_and_some_other_hyperparameters():
    base, own = shipped("cifar10"), shipped("cifar100")
    base["model"]["init_args"]["num_classes"] = 100
    base["data"]["init_args"].update(path="uoft-cs/cifar100", label_column="fine_label")
    base["loop"]["out_dir"] = "runs/cifar100"
    base["presets"]["FedDuAdam"]["server"]["init_args"]["eps_g"] = 0.1
    base["presets"]["FedExPM"]["server"]["init_args"]["eps_g"] = 0.001
    base["presets"]["FedAvgM"]["server"]["init_args"]["eta_g"] = 1.0
    assert own == base
    vit = shipped("cifar100_vit")
    assert vit["model"] == {
        "class_path": "lightning_feddua.models.ViT",
        "init_args": {"num_classes": 100, "weight_decay": 0.0001, "lr": 0.01},
    }
    assert {**vit, "model": own["model"], "loop": own["loop"]} == own
    assert {**vit["loop"], "out_dir": "runs/cifar100"} == own["loop"]


def test_a_recipe_is_its_base_with_changes(tmp_path):
    write(
        tmp_path / "base.yaml",
        model={"class_path": "A", "init_args": {"lr": 1, "dim": 2}},
        server={"class_path": "B", "init_args": {"eps": 1}},
        client={"class_path": "C"},
        loop={"max_rounds": 5, "seed": 1},
        presets={"one": {"server": {"class_path": "D"}, "model": {"init_args": {"lr": 3}}}, "two": {}, "three": {}},
    )
    write(
        tmp_path / "deeper/own.yaml",
        base="../base.yaml",
        model={"init_args": {"lr": 7}},
        server={"class_path": "E"},
        client=None,
        loop={"seed": None},
        presets={"one": {"loop": {"seed": 2}, "model": None}, "two": None, "four": {"loop": {}}},
    )
    assert load_recipe(tmp_path / "deeper/own.yaml") == {
        "model": {"class_path": "A", "init_args": {"lr": 7, "dim": 2}},
        "server": {"class_path": "E"},
        # A setting that is null is a value.
        "loop": {"max_rounds": 5, "seed": None},
        "presets": {"one": {"server": {"class_path": "D"}, "loop": {"seed": 2}}, "three": {}, "four": {"loop": {}}},
    }
    write(tmp_path / "heir.yaml", base="deeper/own.yaml", presets=None)
    assert load_recipe(tmp_path / "heir.yaml").keys() == {"model", "server", "loop"}


def test_the_resolved_recipe_is_whole(tmp_path, capsys):
    small = {"max_rounds": 1, "local_steps": 1, "out_dir": str(tmp_path / "runs"), "enable_progress_bar": False}
    dim = {"init_args": {"dim": 3}}
    path = write(tmp_path / "mine.yaml", base="synthetic", loop=small, model=dim, data=dim)
    assert main(["fit", "--config", str(path), "--server", "FedAvg"]) == 0
    saved = yaml.safe_load((tmp_path / "runs/version_0/recipe.yaml").read_text())
    with pytest.raises(SystemExit):
        main(["fit", "--config", str(path), "--server", "FedAvg", "--print_config"])
    printed = yaml.safe_load(capsys.readouterr().out)
    for recipe in (saved, printed):
        assert recipe.keys() == {"server", "client", "model", "data", "loop"}
        # The base's preset, and what it does not change.
        assert recipe["server"] == {"class_path": "lightning_feddua.FedAvg", "init_args": {"eta_g": 10.0}}
        assert recipe["model"]["init_args"] == {"dim": 3, "lr": 0.01}
        assert recipe["loop"]["precision"] == "64-true"
        assert recipe["data"]["init_args"]["num_clients"] == 20


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (
            {"base": "cifar11"},
            "has a base `cifar11`, which does not exist. Write `cifar10` if that was meant, or give a",
        ),
        ({"base": "../nowhere.yaml"}, "has a base `../nowhere.yaml`, which does not exist. Give a path relative to"),
        ({"base": 3}, "own.yaml` is `3`. Give the name of a shipped recipe, or a path."),
        ({"base": ["synthetic"]}, "own.yaml` is `['synthetic']`. Give the name of"),
        ({"base": None}, "own.yaml` is `None`. Give the name of"),
        ({"base": "own.yaml"}, "own.yaml` is its own base: own.yaml → own.yaml. Remove one of these"),
        (
            {"base": "synthetic", "modl": None},
            "removes the section `modl`, which its base does not have. Write `model`",
        ),
        (
            {"base": "synthetic", "presets": {"FedYogy": None}},
            "removes the preset `FedYogy`, which its base does not have. Write `FedYogi` if",
        ),
        ({"base": "synthetic", "presets": {"FedAvg": 3}}, "The recipe's `presets` are not mappings. "),
        ({"base": "synthetic", "presets": [1]}, "The recipe's `presets` are not mappings. "),
        ({"base": "synthetic", "data": None}, "has no section `data`. Add it, or give `--data CLASS`."),
        ({"bas": "synthetic"}, "The recipe has no section `bas`. Write `base` if that was meant"),
    ],
)
def test_bad_bases(tmp_path, capsys, own, message):
    path = write(tmp_path / "own.yaml", **own)
    assert main(["fit", "--config", str(path)]) == 2
    assert message in capsys.readouterr().err


def test_a_cycle(tmp_path, capsys):
    for name, base in (("a", "b"), ("b", "c"), ("c", "b")):
        write(tmp_path / f"{name}.yaml", base=f"{base}.yaml")
    assert main(["fit", "--config", str(tmp_path / "a.yaml")]) == 2
    assert "is its own base: a.yaml → b.yaml → c.yaml → b.yaml. " in capsys.readouterr().err


def test_a_base_belongs_outside_of_presets(tmp_path, capsys):
    path = write(tmp_path / "own.yaml", base="synthetic", presets={"Mine": {"base": "cifar10"}})
    assert main(["fit", "--config", str(path), "--preset", "Mine"]) == 2
    assert "A preset has a `base`. " in capsys.readouterr().err


def test_comparisons_take_the_presets_of_the_base(tmp_path):
    dim = {"init_args": {"dim": 3}}
    loop = {"max_rounds": 1, "local_steps": 1, "engine": "sequential"}
    path = write(tmp_path / "own.yaml", base="synthetic_scaffold", model=dim, data=dim, loop=loop)
    assert main(["compare", "--config", str(path), "--out", str(tmp_path / "out"), "--jobs", "2"]) == 0
    assert {folder.name for folder in (tmp_path / "out").iterdir() if folder.is_dir()} == {
        *("FedDuAdagrad", "FedExP", "FedAvg", "FedAdagrad")
    }


@pytest.mark.parametrize(
    ("project", "found"), [(None, set()), ("other-project", set()), ("lightning-feddua", {"theirs"})]
)
def test_recipes_beside_the_package_are_shipped_in_a_checkout_alone(tmp_path, monkeypatch, project, found):
    """Another package may have left a folder of this name in site-packages."""
    write(tmp_path / "site-packages/recipes/theirs.yaml", loop={})
    if project:
        (tmp_path / "site-packages/pyproject.toml").write_text(f'[project]\nname = "{project}"\n')
    monkeypatch.setattr(recipes, "__file__", str(tmp_path / "site-packages/lightning_feddua/cli/recipes.py"))
    assert shipped_recipes().keys() == found
    write(tmp_path / "site-packages/lightning_feddua/recipes/ours.yaml", loop={})
    assert shipped_recipes().keys() == {"ours", *found}


def test_this_checkout_ships_its_recipes():
    assert len(recipe_dirs()) == 1
    assert shipped_recipes().keys() >= {"synthetic", "femnist", "shakespeare", *CIFAR}


def test_a_key_of_a_merged_mapping_may_be_given_again(tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text("a: {b: &one {lr: 1}, c: &two {<<: *one, lr: 2}}\nd: {<<: *two, lr: 3}\n")
    assert load_recipe(path) == {"a": {"b": {"lr": 1}, "c": {"lr": 2}}, "d": {"lr": 3}}
