"""Recipes with anything in them run, or say in a sentence what is wrong; `FEDDUA_TEST_RECIPES=500` tries more."""

import copy
import os
import random
import warnings

import yaml

from lightning_feddua import ClientError
from lightning_feddua.cli import main

RECIPES = int(os.environ.get("FEDDUA_TEST_RECIPES", 100))

BASE = {
    "model": {"class_path": "lightning_feddua.models.LinearRegression", "init_args": {"dim": 12, "lr": 0.05}},
    "data": {
        "class_path": "lightning_feddua.data.SyntheticRegression",
        "init_args": {"num_clients": 4, "samples_per_client": 5, "dim": 12, "decay": 1.1, "seed": 29},
    },
    "server": {"class_path": "FedDuAdam", "init_args": {"eps": 0.0, "beta1": 0.9}},
    "client": {"class_path": "lightning_feddua.FedProx", "init_args": {"mu": 0.1}},
    "loop": {
        **{"local_steps": 2, "clients_per_round": 2, "precision": "64-true", "engine": "sequential"},
        **{"client_weights": "uniform", "seed": 1, "lanes": 8, "on_client_error": "raise", "timeout": 10.0},
    },
    "presets": {"FedExP": {"server": {"class_path": "FedExP"}}},
}
JUNK = [
    *(None, "", " ", "x", "null", "1e", "ü", "a b", "[", "{}", "--help", True, False, 0, -1, 1, 3, 1.5, -0.0, 1e-300),
    *(1e308, float("inf"), float("nan"), 10**9, 10**30, [], [1], ["a", None], {}, {"a": 1}, {None: 1}, {1: {2: [3]}}),
    *({"class_path": "FedAvg"}, {"class_path": None}, {"init_args": {}}, {"class_path": "os.system", "init_args": 1}),
]
CLASSES = [
    *("FedFoo", "os.path", "os.system", "lightning_feddua", "lightning_feddua.", ".", "..", "a.b.c", "", "FedAvg"),
    *("torch.nn.Linear", "lightning.LightningModule", "tests.cli.broken_module.Model", "lightning_feddua.FedDuAServer"),
    *("lightning_feddua.data.FederatedDataModule", "builtins.dict", "lightning_feddua.models.CNN", "LocalTraining"),
]
# A cohort of a million clients would be no mistake, only large; such numbers stay out of what is really allocated.
TOO_LARGE = {"dim", "num_clients", "samples_per_client", "local_steps", "local_epochs", "lanes", "num_nodes", "devices"}


def paths(value, path=()):
    yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from paths(inner, (*path, key))


def mutate(recipe, draw):
    """Change one place: leave it out, misspell it, or put something else there."""
    path = draw.choice([path for path in paths(recipe) if path])
    *parents, key = path
    owner = recipe
    for parent in parents:
        owner = owner[parent]
    kind = draw.choice(["drop", "misspell", "junk", "junk", "junk", "class", "swap", "nest", "extra"])
    if kind == "drop":
        del owner[key]
    elif kind == "misspell":
        place = draw.randrange(len(str(key)) + 1)
        owner[str(key)[:place] + draw.choice(["x", "", "_", "é"]) + str(key)[place + 1 :]] = owner.pop(key)
    elif kind == "junk":
        value = draw.choice(JUNK)
        if not (key in TOO_LARGE and isinstance(value, int | float) and value > 1000):
            owner[key] = copy.deepcopy(value)
    elif kind == "class":
        owner[key] = draw.choice(CLASSES) if key == "class_path" else {"class_path": draw.choice(CLASSES)}
    elif kind == "swap":
        other = draw.choice(list(owner))
        owner[key], owner[other] = owner[other], owner[key]
    elif kind == "nest":
        owner[key] = {key: owner[key]}
    else:
        owner[
            draw.choice(["callbacks", "loggers", "seed", "strategy", "devices", "x", "init_args", "max_update_norm"])
        ] = draw.choice(JUNK[:29])


def recipe_text(seed):
    draw = random.Random(seed)
    recipe = copy.deepcopy(BASE)
    for _ in range(draw.choice([1, 1, 2, 3])):
        if recipe:
            mutate(recipe, draw)
    # What is forced below cannot be forced into something that is no section.
    text = yaml.safe_dump(recipe, allow_unicode=True)
    if draw.random() < 0.05:
        place = draw.randrange(len(text))
        text = text[:place] + draw.choice(["\t", ":", "[", "&", "\0", "}", "!!python/object:os.system "]) + text[place:]
    return text


def test_mutated_recipes(tmp_path, capsys):
    forced = ["--loop.max_rounds", "1", "--loop.accelerator", "cpu", "--loop.out_dir", str(tmp_path / "runs")]
    # An error in the sanity check would come before the client's, as it should.
    forced += ["--loop.enable_progress_bar", "false", "--loop.num_sanity_val_steps", "0"]
    ended = {0: 0, 2: 0, "client": 0}
    for seed in range(RECIPES):
        text = recipe_text(seed)
        path = tmp_path / "recipe.yaml"
        path.write_text(text)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                code = main(["fit", "--config", str(path), *forced])
            except ClientError:
                # The training step itself has failed, and its traceback is what one needs.
                code = "client"
            except BaseException as error:
                raise AssertionError(f"recipe {seed}: {text}") from error
        printed = capsys.readouterr()
        assert code in ended, (seed, code, text)
        ended[code] += 1
        if code == 2:
            line = printed.err.strip().splitlines()[-1]
            assert line.startswith("feddua: error: "), (seed, text, printed.err)
            assert line.count(". ") >= 1, (seed, text, line)
            assert len(line) < 1500, (seed, text, line)
            assert "Traceback" not in printed.err, (seed, text)
    # Neither all of them harmless nor all of them absurd.
    assert ended[0] > RECIPES / 20
    assert ended[2] > RECIPES / 2
