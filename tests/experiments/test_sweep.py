"""``feddua sweep``: real runs in forked processes, as small as those of the comparison."""

import importlib.util
import math
import os
import re
import signal
import time

import matplotlib
import numpy as np
import pytest
import yaml

from lightning_feddua.cli import main
from lightning_feddua.experiments.comparison_table import Cell
from lightning_feddua.experiments.plots import STYLES
from lightning_feddua.experiments.sweep import search as searches
from lightning_feddua.experiments.sweep.figure import Line, Panel, plot_panels
from lightning_feddua.experiments.sweep.outcome import Outcome, Trial
from lightning_feddua.experiments.sweep.search import OptunaSearch, grid_search, random_search
from lightning_feddua.experiments.sweep.space import Choice, Range, parse_space
from tests.experiments.run_folders import started_command
from tests.experiments.test_compare import read, without_seconds, write_recipe

SPACE = ["--space", "model.lr=0.01,0.1", "server.eps_g=0,1"]
needs_optuna = pytest.mark.skipif(importlib.util.find_spec("optuna") is None, reason="Optuna is an extra")


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("swept")
    recipe = write_recipe(folder / "tiny.yaml")
    arguments = ["sweep", "--config", recipe, "--methods", "FedAvg", "FedDuAdam", "--seeds", "2", *SPACE]
    arguments += ["--out", str(folder / "out")]
    assert main(arguments) == 0
    return folder, arguments


def test_a_metric_that_nobody_logs_ends_the_sweep_after_the_first_run(tmp_path, capsys):
    recipe, out = write_recipe(tmp_path / "tiny.yaml"), tmp_path / "out"
    arguments = ["sweep", "--config", recipe, "--methods", "FedAvg", "--space", "model.lr=0.01,0.02,0.03"]
    arguments += ["--jobs", "1", "--out", str(out), "--metric"]
    # The second time what is there already says so.
    for _ in range(2):
        assert main([*arguments, "val_los"]) == 2
        assert "No run has logged `val_los`. Choose one of" in capsys.readouterr().err
        assert len(list(out.glob("FedAvg/*/version_*"))) <= 2
    # What was done is not lost.
    assert main([*arguments, "val_loss"]) == 0
    assert "3 runs, 1 of them finished before" in capsys.readouterr().out


def test_table_is_that_of_the_logs_and_the_best_has_the_smallest_mean(swept):
    out = swept[0] / "out"
    rows = read(out / "table.csv")
    # FedAvg has no eps_g.
    assert sorted((row["method"], row["model.lr"], row["server.eps_g"]) for row in rows) == [
        ("FedAvg", "0.01", ""),
        ("FedAvg", "0.1", ""),
        *(("FedDuAdam", lr, eps_g) for lr in ("0.01", "0.1") for eps_g in ("0", "1")),
    ]
    for row in rows:
        settings = ",".join(f"{key}={row[key]}" for key in ("model.lr", "server.eps_g") if row[key])
        last = []
        for seed in range(2):
            run = out / row["method"] / f"{settings},seed_{seed}/version_0"
            last.append(np.mean([float(line["val_loss"]) for line in read(run / "metrics.csv")[-5:]]))
            recipe = yaml.safe_load((run / "recipe.yaml").read_text())
            assert recipe["model"]["init_args"]["lr"] == float(row["model.lr"])
            assert recipe["server"]["init_args"].get("eps_g", "") == (
                row["server.eps_g"] and float(row["server.eps_g"])
            )
        assert float(row["mean"]) == pytest.approx(np.mean(last), rel=1e-12)
        assert float(row["std"]) == pytest.approx(abs(last[0] - last[1]) / math.sqrt(2), rel=1e-9)
        others = [float(other["mean"]) for other in rows if other["method"] == row["method"]]
        assert (row["best"] == "1") == (float(row["mean"]) == min(others))
    markdown = (out / "table.md").read_text()
    for row in rows:
        number = f"{float(row['mean']):.4g} ± {float(row['std']):.2g}"
        bold = f"**{number}**" if row["best"] == "1" else number
        assert f"| {row['method']} | {row['model.lr']} | {row['server.eps_g'] or '–'} | {bold} |" in markdown


def test_what_is_best_can_be_chosen(swept, capsys):
    folder, arguments = swept
    assert main([*arguments, "--mode", "max"]) == 0
    assert "val_loss, larger is better: the mean of the last 5 values" in capsys.readouterr().out
    rows = read(folder / "out/table.csv")
    for row in rows:
        others = [float(other["mean"]) for other in rows if other["method"] == row["method"]]
        assert (row["best"] == "1") == (float(row["mean"]) == max(others))
    assert main(arguments) == 0
    assert "val_loss, smaller is better: the mean of the last 5 values" in capsys.readouterr().out


def test_the_best_recipe_runs_as_it_is(swept, tmp_path, monkeypatch):
    out = swept[0] / "out"
    monkeypatch.chdir(tmp_path)
    best = next(row for row in read(out / "table.csv") if row["method"] == "FedDuAdam" and row["best"] == "1")
    run = out / f"FedDuAdam/model.lr={best['model.lr']},server.eps_g={best['server.eps_g']},seed_0/version_0"
    assert main(["fit", "--config", str(out / "best/FedDuAdam.yaml")]) == 0
    assert without_seconds(run / "metrics.csv") == without_seconds(tmp_path / "runs/version_0/metrics.csv")
    together = yaml.safe_load((out / "best.yaml").read_text())
    assert together.pop("presets").keys() == {"FedAvg", "FedDuAdam"}
    assert together == yaml.safe_load((out / "best/FedAvg.yaml").read_text())
    assert main(["compare", "--config", str(out / "best.yaml"), "--out", str(tmp_path / "compared")]) == 0
    for method in ("FedAvg", "FedDuAdam"):
        (best,) = (row for row in read(out / "table.csv") if row["method"] == method and row["best"] == "1")
        (recipe,) = (tmp_path / "compared" / method).glob("seed_0/version_0/recipe.yaml")
        assert yaml.safe_load(recipe.read_text())["model"]["init_args"]["lr"] == float(best["model.lr"])


def test_finished_runs_are_kept_and_a_larger_space_adds_to_them(swept, capsys):
    folder, arguments = swept
    marks = {path: path.stat().st_mtime_ns for path in folder.glob("out/*/*/finished.json")}
    assert len(marks) == 12
    larger = [argument.replace("0.01,0.1", "0.01,0.1,0.3") for argument in arguments]
    assert main(larger) == 0
    assert "18 runs, 12 of them finished before" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in marks} == marks


@pytest.mark.slow
@pytest.mark.parametrize(("signal_number", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)])
def test_a_sweep_cut_short_ends_as_if_it_had_not_been(tmp_path, signal_number, code):
    recipe = write_recipe(tmp_path / "tiny.yaml")
    arguments = ["sweep", "--config", recipe, "--methods", "FedAvg", "--space", "model.lr=0.01,0.1", "--jobs", "1"]
    arguments += ["--loop.max_rounds", "100", "--out"]
    out = tmp_path / "out"
    command = started_command(*arguments, str(out))
    first, second = (out / f"FedAvg/model.lr={lr},seed_0" for lr in ("0.01", "0.1"))
    deadline = time.monotonic() + 60
    while not (second / "version_0/metrics.csv").is_file() and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(command.pid, signal_number)
    command.join(60)
    assert command.exitcode == code
    before = (first / "finished.json").stat().st_mtime_ns
    assert not (second / "finished.json").exists()

    assert main([*arguments, str(out)]) == 0
    assert (first / "finished.json").stat().st_mtime_ns == before
    assert main([*arguments, str(tmp_path / "never stopped")]) == 0
    for file in ("table.csv", "table.md", "best/FedAvg.yaml"):
        assert (out / file).read_text() == (tmp_path / "never stopped" / file).read_text()


def test_what_fails_or_diverges_is_never_the_best(tmp_path, capsys):
    recipe = write_recipe(tmp_path / "tiny.yaml")
    space = ["--space", "loop.clients_per_round=2,99", "model.lr=1e200,0.1"]
    arguments = ["sweep", "--config", recipe, "--methods", "FedAvg", "--out", str(tmp_path / "out"), *space]
    assert main(arguments) == 1
    rows = {(row["loop.clients_per_round"], row["model.lr"]): row for row in read(tmp_path / "out/table.csv")}
    assert [key for key, row in rows.items() if row["best"] == "1"] == [("2", "0.1")]
    markdown = (tmp_path / "out/table.md").read_text()
    # An update that is not finite ends its run.
    assert "| FedAvg | 2 | 1e200 | diverged |" in markdown
    assert "| FedAvg | 99 | 0.1 | failed |" in markdown
    assert "failed: FedAvg loop.clients_per_round=99,model.lr=0.1 seed 0, see" in capsys.readouterr().out


def test_a_point_that_diverges_is_a_result(tmp_path, capsys):
    recipe = write_recipe(tmp_path / "tiny.yaml")
    arguments = ["sweep", "--config", recipe, "--methods", "FedAvg", "--out", str(tmp_path / "out")]
    arguments += ["--space", "model.lr=1e200,0.1"]
    assert main(arguments) == 0
    assert "failed:" not in capsys.readouterr().out
    table = (tmp_path / "out/table.md").read_text()
    assert "| FedAvg | 1e200 | diverged |" in table
    assert main(arguments) == 0
    assert "2 runs, 2 of them finished before" in capsys.readouterr().out
    assert (tmp_path / "out/table.md").read_text() == table
    # Unless there is nothing else.
    assert main([*arguments[:-1], "model.lr=1e200"]) == 1
    # Its curve is no result.
    assert main(["plot", str(tmp_path / "out/FedAvg/model.lr=1e200,seed_0"), "--out", str(tmp_path / "x.png")]) == 2


@needs_optuna
def test_optuna_goes_on_with_more_trials_and_shows_all(tmp_path, capsys):
    recipe = write_recipe(tmp_path / "tiny.yaml")
    arguments = ["sweep", "--config", recipe, "--methods", "FedAvg", "--search", "optuna", "--loop.max_rounds", "2"]
    arguments += ["--space", "model.lr=log:0.01:0.3", "--jobs", "1", "--out", str(tmp_path / "out")]
    assert main([*arguments, "--trials", "1"]) == 0
    assert main([*arguments, "--trials", "2"]) == 0
    assert "1 of them finished before" in capsys.readouterr().out
    rows = read(tmp_path / "out/table.csv")
    assert len({row["model.lr"] for row in rows}) == 2
    assert all(0.01 <= float(row["model.lr"]) <= 0.3 for row in rows)


@needs_optuna
def test_optuna_cut_short_proposes_what_it_would_have(tmp_path):
    space = parse_space(["x=log:0.001:1", "n=int:1:9", "c=a,b"])

    def score(point):
        return (math.log(float(point["x"])) + 3) ** 2 + int(point["n"]) + (point["c"] == "a")

    def run(search, rounds=math.inf):
        points = []
        while len(points) < rounds and (asked := search.ask(2)):
            points += asked
            search.tell([score(point) for point in asked])
        return points

    whole = run(OptunaSearch(space, 16, 3, tmp_path / "whole", "study"))
    assert len(whole) == 16
    first = OptunaSearch(space, 16, 3, tmp_path / "parts", "study")
    before = run(first, rounds=6)
    # Asked and never told, as by a kill.
    before += first.ask(2)
    after = run(OptunaSearch(space, 16, 3, tmp_path / "parts", "study"))
    assert after[:8] == before == whole[:8]
    assert after == whole
    # It learns: the later points are better than random ones.
    assert np.mean([score(p) for p in whole[10:]]) < np.mean([score(p) for p in whole[:10]])


def test_without_optuna_it_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(searches, "find_spec", lambda name: None)
    arguments = ["--config", write_recipe(tmp_path / "tiny.yaml"), *SPACE, "--search", "optuna"]
    assert main(["sweep", *arguments, "--out", str(tmp_path / "out")]) == 2
    assert "Optuna is not installed, and `--search optuna` was asked for. Run `pip install" in capsys.readouterr().err


def test_random_points_depend_on_seed_number_and_key_alone():
    space = parse_space(["model.lr=log:0.001:0.1", "loop.local_steps=int:1:3", "x=lin:-1:1", "c=a,b"])
    points = random_search(space, 400, seed=0).ask(1)
    assert random_search({"c": space["c"], "x": space["x"]}, 7, seed=0).ask(1) == [
        {"c": point["c"], "x": point["x"]} for point in points[:7]
    ]
    assert random_search(space, 1, seed=1).ask(1) != points[:1]
    lr = np.log10([float(point["model.lr"]) for point in points])
    assert -3 <= lr.min() < -2.95
    assert -1.05 < lr.max() <= -1
    assert abs(lr.mean() + 2) < 0.1
    for value in ("1", "2", "3"):
        assert abs(sum(point["loop.local_steps"] == value for point in points) / 400 - 1 / 3) < 0.1
    assert abs(np.mean([float(point["x"]) for point in points])) < 0.15
    # Few values are drawn once each.
    assert sorted(point["c"] for point in random_search({"c": space["c"]}, 50, seed=0).ask(1)) == ["a", "b"]


def test_grid_is_the_product():
    search = grid_search(parse_space(["a=1,2", "b=log:0.1:10:3"]))
    points = search.ask(1)
    assert points == [{"a": a, "b": b} for a in ("1", "2") for b in ("0.1", "1", "10")]
    assert search.ask(1) == []


@pytest.mark.parametrize(
    ("text", "dimension"),
    [
        ("lr=1e-3,0.10,null,true", Choice(("1e-3", "0.1", "null", "true"))),
        ("lr=[1, 2],[3],[3]", Choice(("[1, 2]", "[3]"))),
        ("lr=FedProx", Choice(("FedProx",))),
        ("lr=log:0.001:0.1:5", Choice(("0.001", "0.00316228", "0.01", "0.0316228", "0.1"))),
        ("lr=lin:-1:1:3", Choice(("-1", "0", "1"))),
        ("lr=log:1e-3:1", Range("log", 0.001, 1.0)),
        ("--lr=int:1:5", Range("int", 1.0, 5.0)),
    ],
)
def test_spaces(text, dimension):
    assert parse_space([text]) == {"lr": dimension}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--space", "model.lr"], "`--space model.lr` is not `KEY=VALUES`. "),
        (["--space", "model.lr=0.1", "model.lr=1"], "`model.lr` is twice in the space. "),
        (["--space", "model.lr=[0.1"], "`[0.1` is not a list of values. "),
        (["--space", "model.lr=log:0:1"], "`log:0:1` is not a range. "),
        (["--space", "model.lr=log:1:x"], "`log:1:x` is not a range. "),
        (["--space", "model.lr=lin:2:1"], "`lin:2:1` is not a range. "),
        (["--space", "loop.seed=int:1:2.5"], "`int:1:2.5` is not a range. "),
        (["--space", "model.lr=log:0.1:1"], "The range of `model.lr` has no number of points"),
        (["--space", "lr=1"], "`lr` cannot be varied. Give a key that begins with one of `client`"),
        (["--space", "server=FedAvg"], "`server` cannot be varied. Choose rules with `--methods`."),
        (["--space", "model.lrr=1"], "`model`, a `LinearRegression`, has no argument `lrr`. Write `lr`"),
        (["--space", "server.eta=1"], "`server`, a `FedAvg`, has no argument `eta`. Write `eta_g`"),
        (["--space", "loop.max_round=1"], "has no argument `max_round`. Write `max_rounds`"),
        (["--space", "model.lr=0.1,fast"], "`model.lr` cannot be `fast`. "),
        ([*SPACE, "--trials", "0"], "`--trials 0` is less than 1. "),
        ([*SPACE, "--search", "best"], "`search` cannot be `best`. "),
        ([*SPACE, "--methods", "FedFoo"], "There is no server `FedFoo`. "),
        ([*SPACE, "--out", "/dev/null"], "The folder `/dev/null` cannot be written: "),
    ],
)
def test_bad_input(tmp_path, capsys, arguments, message):
    out = tmp_path / "out"
    recipe = write_recipe(tmp_path / "tiny.yaml")
    assert main(["sweep", "--config", recipe, "--out", str(out), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def make_trial(method, mean, **settings):
    return Trial(method, {key.replace("_dot_", "."): value for key, value in settings.items()}, {}, [], Cell(mean, 0.5))


def test_a_key_is_shown_with_the_others_at_their_best():
    outcome = Outcome(parse_space(["a=1,2", "b=1,2"]), "val_loss")
    means = {("1", "1"): 3.0, ("1", "2"): 2.0, ("2", "1"): 4.0, ("2", "2"): math.nan}
    outcome._trials = [make_trial("FedAvg", mean, a=a, b=b) for (a, b), mean in means.items()]
    outcome._trials.append(make_trial("FedExP", 1.0, a="1"))
    by_key = {panel.key: {line.method: line.cells for line in panel.lines} for panel in outcome.panels()}
    assert {value: cell.mean for value, cell in by_key["a"]["FedAvg"].items()} == {"1": 2.0, "2": 4.0}
    assert {value: cell.mean for value, cell in by_key["b"]["FedAvg"].items()} == {"1": 3.0, "2": 2.0}
    assert by_key["b"].keys() == {"FedAvg"}
    # Of an accuracy, the best is the largest.
    outcome._metric = "val_acc"
    assert outcome.best()["FedAvg"].cell.mean == 4.0
    outcome._metric = "val_answer_acc"
    assert outcome.best()["FedAvg"].cell.mean == 4.0
    outcome._mode = "min"
    assert outcome.best()["FedAvg"].cell.mean == 2.0


def test_figure_has_the_methods_in_their_colours(tmp_path, monkeypatch):
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    lines = [Line(name, {"0": Cell(1.0, 0.1), "0.1": Cell(0.1, 0.1)}) for name in ("FedExP", "FedDuAdam")]
    words = [Line("FedAvg", {"small": Cell(1e-3, math.nan), "large": Cell(2.0, math.nan)})]
    panels = [Panel("server.eps_g", "val_loss", lines), Panel("data.size", "val_loss", words, connected=False)]
    plot_panels(panels, tmp_path / "sensitivity.svg")
    svg = (tmp_path / "sensitivity.svg").read_text()
    texts = re.findall(r"<text[^>]*>([^<]+)</text>", svg)
    for text in ("server.eps_g", "data.size", "val_loss", "FedExP", "FedDuAdam", "FedAvg", "small", "large"):
        assert text in texts
    assert {STYLES[name].color.lower() for name in ("FedExP", "FedDuAdam", "FedAvg")} <= set(
        re.findall(r"stroke: (#\w{6})", svg)
    )
