"""The command line: ``feddua fit``, ``validate``, ``test``, ``predict``, ``data``, ``compare`` and so on."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from lightning_feddua.__about__ import __version__
from lightning_feddua.cli.construction import ConstructionError
from lightning_feddua.cli.own_frames import own_traceback
from lightning_feddua.cli.parsing import new_parser, parse
from lightning_feddua.cli.recipes import shipped_recipes
from lightning_feddua.errors import ClientError, ConfigurationError, NotFiniteError, choices

if TYPE_CHECKING:
    from lightning_feddua.cli.actions import Action


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
    parser = new_parser(
        prog="feddua",
        description="Federated learning for PyTorch Lightning, with FedDuA's server.",
        epilog=f"Start with `feddua fit --config synthetic`. Shipped recipes: {choices(shipped_recipes())}. Exit codes:"
        " 0; 1 if a run failed; 2 for bad input; 130 after Ctrl-C; 143 after SIGTERM.",
        version=__version__,
    )
    subcommands = parser.add_subcommands(required=True)
    subparsers = {
        name: new_parser(description=one.description, epilog=f"Example: feddua {name} {one.example}")
        for name, one in COMMANDS.items()
    }
    action: Action | None = None
    options: Callable[[], list[str]] = list
    if command in COMMANDS:
        action, options = _action(command)
        # Imports the classes that are asked for, so that the parser knows what they derive from.
        arguments = [command, *action.prepare(arguments[1:])]
        # What the others take would only cost time.
        action.add_arguments(subparsers[command])
    for name, subparser in subparsers.items():
        subcommands.add_subcommand(name, subparser, help=_first_sentence(COMMANDS[name].description))
    config = parse(parser, arguments, command if action else "", options)
    if action is None:
        raise ConfigurationError(f"`{command}` stands before the command.", "Begin with the command.")
    return action.run(subparsers[command], config[command]) or 0


def _action(command: str) -> tuple[Action, Callable[[], list[str]]]:
    """What a command does, and what gives its options; imports torch, which the help of all commands does without."""
    from lightning_feddua.cli.actions import ACTIONS, options

    return ACTIONS[command], partial(options, command)


def _first_sentence(text: str) -> str:
    """As a phrase: without its capital and its full stop."""
    return text[0].lower() + text[1:].split(".")[0]


class Command(NamedTuple):
    """What the help says of a subcommand; what it does is in :mod:`lightning_feddua.cli.actions`.

    Args:
        description: its first sentence is the line in ``feddua --help``.
        example: arguments that somebody may give it.
    """

    description: str
    example: str


COMMANDS = {
    "fit": Command(
        "Train a recipe's model over its clients. `--preset NAME` applies one of the recipe's presets;"
        " `--server NAME` does so, too, where the recipe has one of this name.",
        "--config synthetic --server FedExP --loop.max_rounds 100",
    ),
    "validate": Command(
        "Print the validation metrics of a recipe's model. `--ckpt_path` gives it the weights of a checkpoint.",
        "--config synthetic --ckpt_path last",
    ),
    "test": Command(
        "Print the test metrics of a recipe's model. `--ckpt_path` gives it the weights of a checkpoint.",
        "--config cifar10 --ckpt_path last",
    ),
    "predict": Command(
        "Save the predictions of a recipe's model. They are what `predict_step` returns, batch by batch.",
        "--config cifar10 --ckpt_path last --out predictions.pt",
    ),
    "verify": Command(
        "Repeat some rounds of a finished run, and compare their certificates. Other arguments change its recipe, such"
        " as `--loop.devices 2` for another number of ranks.",
        "runs/synthetic/version_0 --rounds 5",
    ),
    "data": Command(
        "Describe a recipe's clients. With `--plot`, draw how labels are distributed over them.",
        "--config cifar10 --plot labels.png",
    ),
    "compare": Command(
        "Run a recipe's methods over seeds, in parallel. Ends with a figure, a table and a report; what is finished is"
        " not run again.",
        "--config synthetic --methods FedAvg FedDuAdam --seeds 3 --loop.max_rounds 100",
    ),
    "sweep": Command(
        "Tune the hyperparameters of a recipe's methods, in parallel. Ends with a table, a figure of how much each key"
        " matters, and the best recipe of each method; what is finished is not run again.",
        "--config synthetic --methods FedAvg --space model.lr=0.01,0.1 server.eta_g=log:0.1:10:5",
    ),
    "plot": Command(
        "Draw the curves of finished runs.",
        "runs/synthetic/compare --metric val_loss --out curves.pdf",
    ),
    "report": Command(
        "Write an HTML report on finished runs.",
        "runs/synthetic --out report.html",
    ),
    "completion": Command(
        "Print a script by which bash or zsh completes commands, options and names.",
        "bash > feddua.bash",
    ),
}
