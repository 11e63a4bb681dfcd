"""``feddua validate``, ``test`` and ``predict``: what a recipe's model does with the weights of a checkpoint."""

from __future__ import annotations

from argparse import SUPPRESS
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from jsonargparse import ArgumentParser, Namespace

from lightning_feddua.cli.fit import add_recipe_arguments, make_run
from lightning_feddua.errors import ConfigurationError
from lightning_feddua.files import whole_file

_CKPT_HELP = (
    "a checkpoint whose weights the model gets; `last` for the newest run in `loop.out_dir`, `best` for the best"
    " checkpoint of that run"
)


def add_validate_arguments(parser: ArgumentParser) -> None:
    """What ``feddua validate`` takes."""
    _add_arguments(parser)
    parser.add_argument(
        "--per_client", type=bool, default=False, help="whether to validate on each client's own data, and list them"
    )


def add_test_arguments(parser: ArgumentParser) -> None:
    """What ``feddua test`` takes."""
    _add_arguments(parser)


def add_predict_arguments(parser: ArgumentParser) -> None:
    """What ``feddua predict`` takes."""
    _add_arguments(parser)
    parser.add_argument("--out", type=str, default="predictions.pt", help="the file for the list of outputs")


def _add_arguments(parser: ArgumentParser) -> None:
    add_recipe_arguments(parser)
    parser.add_argument("--ckpt_path", type=str, default=SUPPRESS, help=_CKPT_HELP)


def evaluate(stage: Literal["validate", "test"], parser: ArgumentParser, config: Namespace) -> None:
    """Print a model's metrics.

    Args:
        stage: which of its steps to run.
        parser: the command's.
        config: what it has parsed.
    """
    ckpt_path, per_client = config.pop("ckpt_path", None), config.pop("per_client", False)
    loop, model, data = make_run(parser, config)
    if stage == "validate":
        metrics = loop.validate(model, data, per_client=per_client, ckpt_path=ckpt_path)
    else:
        metrics = loop.test(model, data, ckpt_path=ckpt_path)
    if not metrics:
        step = "validation" if stage == "validate" else stage
        raise ConfigurationError(
            f"There is nothing to {stage}: no {step} data, or no `{step}_step` that logs.", "Add what is missing."
        )
    if not loop.fabric.is_global_zero:
        return
    if per_client:
        _print_clients(loop.client_metrics)
    width = max(map(len, metrics))
    for name, value in metrics.items():
        print(f"{name:<{width}}  {value:.6g}")


validate, test = partial(evaluate, "validate"), partial(evaluate, "test")


def predict(parser: ArgumentParser, config: Namespace) -> None:
    """Save a model's predictions."""
    ckpt_path, out = config.pop("ckpt_path", None), Path(config.pop("out"))
    if not out.parent.is_dir():
        raise ConfigurationError(f"The folder of `--out {out}` does not exist.", "Make it first, or give another file.")
    loop, model, data = make_run(parser, config)
    predictions = loop.predict(model, data, ckpt_path=ckpt_path)
    if loop.fabric.is_global_zero:
        with whole_file(out, "wb") as file:
            torch.save(predictions, file)
        print(f"{len(predictions)} outputs in {out}")


def _print_clients(clients: Mapping[str, Mapping[str, Any]]) -> None:
    """A line for each client, and an empty one."""
    names = list(dict.fromkeys(name for metrics in clients.values() for name in metrics))
    rows = [["client", *names]]
    rows += [
        [client, *(f"{metrics[name]:.6g}" if name in metrics else "" for name in names)]
        for client, metrics in clients.items()
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
    print()
