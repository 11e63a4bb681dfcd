"""The command line: ``feddua fit``, ``validate``, ``test``, ``predict``, ``data``, ``compare`` and so on."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentError
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import yaml
from jsonargparse import ArgumentParser, Namespace

from lightning_feddua.__about__ import __version__
from lightning_feddua._private import options_of
from lightning_feddua.cli.argument_errors import sentences
from lightning_feddua.cli.completion import add_completion_arguments, completion
from lightning_feddua.cli.construction import ConstructionError
from lightning_feddua.cli.data import add_data_arguments, describe_data
from lightning_feddua.cli.evaluate import (
    add_predict_arguments,
    add_test_arguments,
    add_validate_arguments,
    predict,
    test,
    validate,
)
from lightning_feddua.cli.fit import add_fit_arguments, add_loop_arguments, fit, resolved_text
from lightning_feddua.cli.own_frames import own_traceback
from lightning_feddua.cli.recipe_arguments import resolve_recipe
from lightning_feddua.cli.recipe_classes import SECTIONS
from lightning_feddua.cli.recipes import shipped_recipes
from lightning_feddua.cli.verify import add_verify_arguments, take_recipe, verify
from lightning_feddua.errors import ClientError, ConfigurationError, NotFiniteError, choices
from lightning_feddua.experiments.compare import (
    add_compare_arguments,
    add_plot_arguments,
    add_report_arguments,
    compare,
    plot,
    report,
)
from lightning_feddua.experiments.many_runs import ManyRuns, overrides_last
from lightning_feddua.experiments.sweep import Sweep, add_sweep_arguments, sweep


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns 0, or 1 if one of several runs failed (those of a sweep may diverge) or code of the user's raised an
    exception, or 2 for bad input, or 130 when interrupted; other errors are raised.
    """
    # As with `python -m`: a recipe may name modules in the current folder.
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return _run(list(sys.argv[1:] if arguments is None else arguments))
    except KeyboardInterrupt:
        print("feddua: interrupted", file=sys.stderr)
        return 130
    except ConstructionError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"{error.traceback}feddua: error: {error}", file=sys.stderr)
        return 1
    except Exception as error:
        # jsonargparse wraps what a class's constructor raises.
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, ConfigurationError):
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            own = own_traceback(error)
            # Several runs go on where one has diverged.
            if own is None or isinstance(error, NotFiniteError):
                raise
            print(f"{own}feddua: error: {_in_a_sentence(error)}", file=sys.stderr)
            return 1
        # Under torchrun every rank finds the same mistake; one of them says so.
        if os.environ.get("RANK", "0") == "0":
            print(f"feddua: error: {cause}", file=sys.stderr)
        return 2


def _in_a_sentence(error: Exception) -> str:
    """What failed; a client's error says it by itself."""
    if isinstance(error, ClientError):
        return str(error)
    message = f"{type(error).__name__}: {' '.join(str(error).split()).rstrip('.')}"
    return f"The run failed with {message}. The traceback above shows where."


def _run(arguments: list[str]) -> int:
    command = arguments[0] if arguments else ""
    if not command.startswith("-") and command not in COMMANDS:
        problem = f"There is no command `{command}`." if command else "There is no command."
        raise ConfigurationError(problem, f"Choose one of {choices(COMMANDS)}; `feddua --help` explains them.")
    parser = _parser(
        prog="feddua",
        description="Federated learning for PyTorch Lightning, with FedDuA's server.",
        epilog=f"Start with `feddua fit --config synthetic`. Shipped recipes: {choices(shipped_recipes())}. Exit codes:"
        " 0; 1 if a run failed; 2 for bad input; 130 after Ctrl-C; 143 after SIGTERM.",
        version=__version__,
    )
    subcommands = parser.add_subcommands(required=True)
    subparsers = {
        name: _parser(description=one.description, epilog=f"Example: feddua {name} {one.example}")
        for name, one in COMMANDS.items()
    }
    # Imports the classes that are asked for, so that the parser knows what they derive from.
    if command in COMMANDS:
        arguments = [command, *COMMANDS[command].prepare(arguments[1:])]
    for name, subparser in subparsers.items():
        # What the others take would only cost time.
        if name == command:
            COMMANDS[name].add_arguments(subparser)
        subcommands.add_subcommand(name, subparser, help=_first_sentence(COMMANDS[name].description))
    config = _parse(parser, arguments, command if command in COMMANDS else "")
    return COMMANDS[command].run(subparsers[command], config[command]) or 0


def _parse(parser: ArgumentParser, arguments: list[str], command: str) -> Namespace:
    try:
        return parser.parse_args(arguments)
    except ArgumentError as error:
        raise ConfigurationError(*sentences(error, command, partial(_options, command))) from error


def _options(command: str) -> list[str]:
    """All that a command takes, overrides included."""
    if command not in COMMANDS:
        return []
    parser = _parser()
    COMMANDS[command].add_arguments(parser)
    if COMMANDS[command].prepare is overrides_last:
        add_loop_arguments(parser)
    return options_of(parser)


def _first_sentence(text: str) -> str:
    """As a phrase: without its capital and its full stop."""
    return text[0].lower() + text[1:].split(".")[0]


def _parser(**arguments: Any) -> ArgumentParser:
    return ArgumentParser(exit_on_error=False, allow_abbrev=False, **arguments)


def _resolve_fit(arguments: list[str]) -> dict[str, Any]:
    """What ``feddua fit`` would run."""
    arguments = resolve_recipe(arguments, [*SECTIONS, "loop"])
    parser = _parser()
    add_fit_arguments(parser)
    config = _parse(parser, arguments, "compare")
    return yaml.safe_load(resolved_text(parser, config))


def _complete(_: ArgumentParser, config: Namespace) -> None:
    parsers = {name: _parser() for name in COMMANDS}
    for name, parser in parsers.items():
        COMMANDS[name].add_arguments(parser)
    completion(config.shell, parsers)


class Command(NamedTuple):
    """A subcommand.

    Args:
        description: its first sentence is the line in ``feddua --help``.
        example: arguments that somebody may give it.
        add_arguments: to a parser.
        prepare: changes the command line before it is parsed.
        run: does it, given the parser and what it has parsed; returns the exit code, or None for 0.
    """

    description: str
    example: str
    add_arguments: Callable[[ArgumentParser], None]
    prepare: Callable[[list[str]], list[str]]
    run: Callable[[ArgumentParser, Namespace], int | None]


COMMANDS = {
    "fit": Command(
        "Train a recipe's model over its clients. `--preset NAME` applies one of the recipe's presets;"
        " `--server NAME` does so, too, where the recipe has one of this name.",
        "--config synthetic --server FedExP --loop.max_rounds 100",
        add_fit_arguments,
        lambda arguments: resolve_recipe(arguments, [*SECTIONS, "loop"]),
        fit,
    ),
    "validate": Command(
        "Print the validation metrics of a recipe's model. `--ckpt_path` gives it the weights of a checkpoint.",
        "--config synthetic --ckpt_path last",
        add_validate_arguments,
        lambda arguments: resolve_recipe(arguments, [*SECTIONS, "loop"]),
        validate,
    ),
    "test": Command(
        "Print the test metrics of a recipe's model. `--ckpt_path` gives it the weights of a checkpoint.",
        "--config cifar10 --ckpt_path last",
        add_test_arguments,
        lambda arguments: resolve_recipe(arguments, [*SECTIONS, "loop"]),
        test,
    ),
    "predict": Command(
        "Save the predictions of a recipe's model. They are what `predict_step` returns, batch by batch.",
        "--config cifar10 --ckpt_path last --out predictions.pt",
        add_predict_arguments,
        lambda arguments: resolve_recipe(arguments, [*SECTIONS, "loop"]),
        predict,
    ),
    "verify": Command(
        "Repeat some rounds of a finished run, and compare their certificates. Other arguments change its recipe, such"
        " as `--loop.devices 2` for another number of ranks.",
        "runs/synthetic/version_0 --rounds 5",
        add_verify_arguments,
        take_recipe,
        verify,
    ),
    "data": Command(
        "Describe a recipe's clients. With `--plot`, draw how labels are distributed over them.",
        "--config cifar10 --plot labels.png",
        add_data_arguments,
        lambda arguments: resolve_recipe(arguments, ["data"]),
        describe_data,
    ),
    "compare": Command(
        "Run a recipe's methods over seeds, in parallel. Ends with a figure, a table and a report; what is finished is"
        " not run again.",
        "--config synthetic --methods FedAvg FedDuAdam --seeds 3 --loop.max_rounds 100",
        add_compare_arguments,
        overrides_last,
        lambda _, config: compare(_resolve_fit, ManyRuns(**vars(config))),
    ),
    "sweep": Command(
        "Tune the hyperparameters of a recipe's methods, in parallel. Ends with a table, a figure of how much each key"
        " matters, and the best recipe of each method; what is finished is not run again.",
        "--config synthetic --methods FedAvg --space model.lr=0.01,0.1 server.eta_g=log:0.1:10:5",
        add_sweep_arguments,
        overrides_last,
        lambda _, config: sweep(_resolve_fit, Sweep(**vars(config))),
    ),
    "plot": Command(
        "Draw the curves of finished runs.",
        "runs/synthetic/compare --metric val_loss --out curves.pdf",
        add_plot_arguments,
        list,
        lambda _, config: plot(**vars(config)),
    ),
    "report": Command(
        "Write an HTML report on finished runs.",
        "runs/synthetic --out report.html",
        add_report_arguments,
        list,
        lambda _, config: report(**vars(config)),
    ),
    "completion": Command(
        "Print a script by which bash or zsh completes commands, options and names.",
        "bash > feddua.bash",
        add_completion_arguments,
        list,
        _complete,
    ),
}
