"""Folders as runs leave them behind, written by hand."""

import csv
import json

import yaml


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
