"""Folders as runs leave them behind, written by hand, and commands that make them, to be interrupted."""

import atexit
import csv
import json
import multiprocessing
import signal
import sys

import yaml

from lightning_feddua.cli import main


def write_run(folder, rows, server="FedAvg", seed=0, **loop):
    """A run's folder with some rows of metrics, each without its round."""
    folder.mkdir(parents=True)
    names = ["round", *dict.fromkeys(name for row in rows for name in row)]
    with (folder / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows({"round": i, **row} for i, row in enumerate(rows))
    beta1 = {"beta1": 0.9} if server in ("FedAvgM", "FedAdam", "FedDuAdam") else {}
    recipe = {
        "server": {"class_path": f"lightning_feddua.{server}", "init_args": beta1},
        "data": {"class_path": "x.Data", "init_args": {"seed": seed}},
        "loop": {"seed": seed, "out_dir": str(folder), **loop},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    (folder / "run.json").write_text(
        json.dumps({"header": [f"{server} on Net"], "environment": {"torch": "2.13", "machine": "Linux"}})
    )
    return folder


def started_command(*arguments):
    """A `feddua` command in a process of its own, which Ctrl-C reaches."""

    def run():
        # Shells start what is to run in the background with SIGINT ignored, pytest included.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.exit(main(list(arguments)))

    command = multiprocessing.get_context("fork").Process(target=run)
    command.start()
    # A test that fails leaves it behind, and pytest would wait for its end.
    atexit.register(command.kill)
    return command
