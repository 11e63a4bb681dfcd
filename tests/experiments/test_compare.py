"""``feddua compare``: real runs in forked processes, small enough to take a fraction of a second each."""

import csv
import json
import os
import signal
import time

import numpy as np
import pytest
import yaml

from lightning_feddua.cli import main
from lightning_feddua.experiments import jobs
from lightning_feddua.experiments.many_runs import _move_seeds
from lightning_feddua.locks import locked
from tests.experiments.run_folders import started_command

METHODS = ["FedAvg", "FedDuAdagrad", "FedDuAdam"]


def write_recipe(path, **presets):
    recipe = {
        "model": {"class_path": "lightning_feddua.models.LinearRegression", "init_args": {"dim": 8, "lr": 0.1}},
        "data": {
            "class_path": "lightning_feddua.data.SyntheticRegression",
            "init_args": {"num_clients": 4, "dim": 8, "seed": 5},
        },
        "server": {"class_path": "FedDuAdagrad"},
        "loop": {"max_rounds": 7, "local_steps": 2, "precision": "64-true", "engine": "sequential"},
        "presets": presets or {name: {"server": {"class_path": name}} for name in METHODS},
    }
    path.write_text(yaml.safe_dump(recipe))
    return str(path)


def read(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def without_seconds(path):
    return [{name: value for name, value in row.items() if name != "seconds"} for row in read(path)]


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compared")
    arguments = ["compare", "--config", write_recipe(folder / "tiny.yaml"), "--seeds", "2", "--jobs", "2"]
    arguments += ["--out", str(folder / "out")]
    assert main(arguments) == 0
    return folder, arguments


def test_table_is_that_of_the_logs(compared):
    out = compared[0] / "out"
    expected = {}
    for method in METHODS:
        last = [
            np.mean([float(row["val_loss"]) for row in read(out / method / f"seed_{s}/version_0/metrics.csv")[-5:]])
            for s in range(2)
        ]
        expected[method] = (np.mean(last), np.sqrt(np.sum((last - np.mean(last)) ** 2) / (len(last) - 1)))
    table = read(out / "table.csv")
    assert [(row["metric"], row["seeds"]) for row in table] == [("val_loss", "2")] * 3
    for row in table:
        assert (float(row["mean"]), float(row["std"])) == pytest.approx(expected[row["method"]], rel=1e-12)
    markdown = (out / "table.md").read_text()
    best = min(expected, key=lambda method: expected[method][0])
    for method, (mean, std) in expected.items():
        number = f"{mean:.4g} ± {std:.2g}"
        assert f"| {method} | {f'**{number}**' if method == best else number} |" in markdown


def test_a_run_is_an_ordinary_fit_and_seeds_move_on_from_the_recipe(compared, tmp_path):
    folder, _ = compared
    run = folder / "out/FedDuAdam/seed_1/version_0"
    recipe = yaml.safe_load((run / "recipe.yaml").read_text())
    assert (recipe["loop"]["seed"], recipe["data"]["init_args"]["seed"]) == (1, 6)
    arguments = ["--loop.seed", "1", "--data.seed", "6", "--loop.out_dir", str(tmp_path)]
    assert main(["fit", "--config", str(folder / "tiny.yaml"), "--preset", "FedDuAdam", *arguments]) == 0
    assert without_seconds(run / "metrics.csv") == without_seconds(tmp_path / "version_0/metrics.csv")


def test_it_ends_with_a_figure_a_table_and_a_report(compared):
    out = compared[0] / "out"
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "curves.pdf").read_bytes().startswith(b"%PDF")
    assert (out / "report.html").read_text().startswith("<!DOCTYPE html>")


def test_checkpoints_can_be_left_out(compared, tmp_path):
    folder, _ = compared
    assert len(list(folder.rglob("last.ckpt"))) == 2 * len(METHODS)
    arguments = ["--config", str(folder / "tiny.yaml"), "--seeds", "1", "--methods", "FedAvg", "--out", str(tmp_path)]
    assert main(["compare", *arguments, "--loop.enable_checkpointing", "false"]) == 0
    run = "FedAvg/seed_0/version_0/metrics.csv"
    assert without_seconds(tmp_path / run) == without_seconds(folder / "out" / run)
    assert not list(tmp_path.rglob("*.ckpt"))


def test_finished_runs_are_kept_and_changed_ones_run_anew(compared, capsys):
    folder, arguments = compared
    marks = sorted(folder.glob("out/*/*/finished.json"))
    assert len(marks) == 6
    before = [mark.stat().st_mtime_ns for mark in marks]
    assert main(arguments) == 0
    assert "6 runs, 6 of them finished before" in capsys.readouterr().out
    assert [mark.stat().st_mtime_ns for mark in marks] == before

    assert main([*arguments, "--methods", "FedAvg", "--seeds", "1", "--loop.max_rounds", "3"]) == 0
    assert json.loads((folder / "out/FedAvg/seed_0/finished.json").read_text())["version"] == "version_1"
    assert len(read(folder / "out/FedAvg/seed_0/version_1/metrics.csv")) == 3
    assert [mark.stat().st_mtime_ns for mark in marks[1:]] == before[1:]
    # The table is that of the new version.
    last = np.mean([float(row["val_loss"]) for row in read(folder / "out/FedAvg/seed_0/version_1/metrics.csv")])
    assert float(read(folder / "out/table.csv")[0]["mean"]) == pytest.approx(last, rel=1e-12)


def test_a_metric_and_what_is_best_of_it_can_be_chosen(compared, capsys):
    folder, arguments = compared
    assert main([*arguments, "--metric", "eta_g", "--mode", "max"]) == 0
    printed = capsys.readouterr().out
    assert "| method | eta_g |" in printed
    assert "The best are bold: eta_g, larger is better." in printed
    assert "eta_g, larger is better" in (folder / "out/report.html").read_text()
    rows = {row["method"]: float(row["mean"]) for row in read(folder / "out/table.csv")}
    best = max(rows, key=lambda method: rows[method])
    assert f"| {best} | **" in printed
    assert main([*arguments, "--metric", "eta_g", "--mode", "min"]) == 0
    worst = min(rows, key=lambda method: rows[method])
    printed = capsys.readouterr().out
    assert f"| {worst} | **" in printed
    assert "eta_g, smaller is better" in printed
    assert main(arguments) == 0
    assert "The best are bold: val_loss, smaller is better." in capsys.readouterr().out
    assert main([*arguments, "--metric", "val_los"]) == 2
    assert "No run has logged `val_los`. Choose one of" in capsys.readouterr().err


@pytest.mark.parametrize(("signal_number", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)])
def test_a_command_cut_short_takes_its_runs_along_and_can_go_on(tmp_path, signal_number, code):
    fast = {"server": {"class_path": "FedAvg"}}
    recipe = write_recipe(tmp_path / "tiny.yaml", Fast=fast, Slow={"loop": {"max_rounds": 1_000_000}})
    arguments = ["compare", "--config", recipe, "--jobs", "1", "--out", str(tmp_path / "out")]
    command = started_command(*arguments)
    slow = tmp_path / "out/Slow/seed_0/version_0/metrics.csv"
    deadline = time.monotonic() + 60
    while not slow.is_file() and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(command.pid, signal_number)
    command.join(60)
    assert command.exitcode == code

    # The runs hold the lock, so it is free only when they are gone.
    with locked(tmp_path / "out/.lock", seconds=5):
        pass
    done = tmp_path / "out/Fast/seed_0/finished.json"
    before = done.stat().st_mtime_ns
    assert not (tmp_path / "out/Slow/seed_0/finished.json").exists()
    write_recipe(tmp_path / "tiny.yaml", Fast=fast, Slow={"loop": {"max_rounds": 2}})
    assert main(arguments) == 0
    assert done.stat().st_mtime_ns == before
    assert [row["method"] for row in read(tmp_path / "out/table.csv")] == ["Fast", "Slow"]
    assert len(read(tmp_path / "out/Slow/seed_0/version_1/metrics.csv")) == 2


def test_a_failed_run_is_named_and_does_not_stop_the_others(tmp_path, capsys):
    recipe = write_recipe(tmp_path / "tiny.yaml", Broken={"loop": {"clients_per_round": 99}}, Sound={"loop": {}})
    out = tmp_path / "out"
    assert main(["compare", "--config", recipe, "--out", str(out)]) == 1
    printed = capsys.readouterr().out
    log = out / "Broken/seed_0/log.txt"
    assert f"failed: Broken seed 0, see {log}" in printed
    assert "`clients_per_round=99` is more than the 4 clients there are." in printed
    assert "`clients_per_round=99` is more than the 4 clients there are." in log.read_text()
    assert [row["method"] for row in read(out / "table.csv")] == ["Sound"]
    assert not (out / "Broken/seed_0/finished.json").exists()


def test_a_run_that_diverged_is_tried_again(tmp_path, capsys):
    """In a comparison it is a failure, as it is not in a sweep."""
    recipe = write_recipe(tmp_path / "tiny.yaml")
    arguments = ["compare", "--config", recipe, "--methods", "FedAvg", "--model.lr", "1e200"]
    for tries in (1, 2):
        assert main([*arguments, "--out", str(tmp_path / "out")]) == 1
        assert "failed: FedAvg seed 0" in capsys.readouterr().out
        assert len(list((tmp_path / "out/FedAvg/seed_0").glob("version_*"))) == tries


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "FedFoo"], "There is no server `FedFoo`. "),
        (["--loop.max_round", "3"], "`loop`, a `FederatedLoop`, has no argument `max_round`. "),
        (["--methods", "FedAvg", "--server.eps", "0"], "`server`, a `FedAvg`, has no argument `eps`. "),
        (["--loop.max_rounds", "few"], "`loop.max_rounds` cannot be `few`. "),
        (["--server", "FedAvg"], "`--server` was given to a comparison of servers. "),
        (["--seeds", "0"], "`--seeds 0` is less than 1. "),
        (["--jobs", "-1"], "`--jobs -1` is less than 1. "),
        (["--mode", "best"], "`mode` cannot be `best`. Give one of `max`, `min` or none."),
        (["--jbos", "2"], "unrecognized arguments: --jbos. Write `--jobs` if that was meant"),
        (["--max_rounds", "2"], "unrecognized arguments: --max_rounds. Write `--loop.max_rounds` if that was meant"),
        (["--out", "/dev/null"], "The folder `/dev/null` cannot be written: "),
    ],
)
def test_bad_input(tmp_path, capsys, arguments, message):
    out = tmp_path / "out"
    recipe = write_recipe(tmp_path / "tiny.yaml")
    assert main(["compare", "--config", recipe, "--out", str(out), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_a_recipe_without_presets_needs_methods(tmp_path, capsys):
    recipe = yaml.safe_load((tmp_path / write_recipe(tmp_path / "tiny.yaml")).read_text())
    del recipe["presets"]
    (tmp_path / "plain.yaml").write_text(yaml.safe_dump(recipe))
    arguments = ["compare", "--config", str(tmp_path / "plain.yaml"), "--out", str(tmp_path / "out")]
    assert main(arguments) == 2
    assert "has no presets to compare. Name some servers" in capsys.readouterr().err
    assert main([*arguments, "--methods", "FedExP", "--loop.max_rounds", "1"]) == 0


def test_two_commands_do_not_share_a_folder(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(jobs, "_LOCK_SECONDS", 0.0)
    (tmp_path / "out").mkdir()
    with locked(tmp_path / "out/.lock"):
        assert main(["compare", "--config", write_recipe(tmp_path / "tiny.yaml"), "--out", str(tmp_path / "out")]) == 2
    assert "Another command is at work in " in capsys.readouterr().err


def test_runs_on_several_ranks(tmp_path):
    arguments = ["--loop.devices", "2", "--loop.strategy", "ddp_fork", "--loop.max_rounds", "2", "--methods", "FedAvg"]
    recipe = write_recipe(tmp_path / "tiny.yaml")
    assert main(["compare", "--config", recipe, "--out", str(tmp_path / "out"), *arguments]) == 0
    assert "on 2 ranks" in (tmp_path / "out/FedAvg/seed_0/log.txt").read_text()


def test_a_system_without_forks_is_told_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("multiprocessing.get_all_start_methods", lambda: ["spawn"])
    assert main(["compare", "--config", write_recipe(tmp_path / "tiny.yaml"), "--out", str(tmp_path / "out")]) == 2
    assert "need forked processes, which this system does not have. Use Linux" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_torchrun_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "any")
    assert main(["compare", "--config", write_recipe(tmp_path / "tiny.yaml"), "--out", str(tmp_path / "out")]) == 2
    assert "Leave torchrun out." in capsys.readouterr().err


def test_every_seed_of_the_data_moves():
    data = {"init_args": {"seed": 3, "partitioner": {"init_args": {"seed": 0, "alpha": 0.3}}, "other": [1]}}
    _move_seeds(data, 2)
    assert data == {"init_args": {"seed": 5, "partitioner": {"init_args": {"seed": 2, "alpha": 0.3}}, "other": [1]}}


def test_devices_are_dealt_to_slots_unless_the_recipe_chooses(tmp_path):
    job = jobs.Job("any", tmp_path, {"loop": {"devices": "auto"}})
    assert jobs._fit_arguments(job, slot=3, devices=2)[3:] == ["--loop.devices", "[1]"]
    assert jobs._fit_arguments(job, slot=3, devices=0)[3:] == []
    job = jobs.Job("any", tmp_path, {"loop": {"devices": 2}})
    assert jobs._fit_arguments(job, slot=3, devices=4)[3:] == []
