"""What each command takes and does. Imported when a command is run, because it needs all of the package."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import yaml
from jsonargparse import ArgumentParser, Namespace

from lightning_feddua._private import options_of
from lightning_feddua.cli.completion import add_completion_arguments, completion
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
from lightning_feddua.cli.parsing import new_parser, parse
from lightning_feddua.cli.recipe_arguments import resolve_recipe
from lightning_feddua.cli.recipes import SECTION_NAMES
from lightning_feddua.cli.verify import add_verify_arguments, take_recipe, verify
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


class Action(NamedTuple):
    """What a subcommand does.

    Args:
        add_arguments: to a parser.
        prepare: changes the command line before it is parsed.
        run: does it, given the parser and what it has parsed; returns the exit code, or None for 0.
    """

    add_arguments: Callable[[ArgumentParser], None]
    prepare: Callable[[list[str]], list[str]]
    run: Callable[[ArgumentParser, Namespace], int | None]


def options(command: str) -> list[str]:
    """All that a command takes, overrides included."""
    if command not in ACTIONS:
        return []
    parser = new_parser()
    ACTIONS[command].add_arguments(parser)
    if ACTIONS[command].prepare is overrides_last:
        add_loop_arguments(parser)
    return options_of(parser)


def resolve_fit(arguments: list[str]) -> dict[str, Any]:
    """What ``feddua fit`` would run."""
    arguments = _whole_recipe(arguments)
    parser = new_parser()
    add_fit_arguments(parser)
    config = parse(parser, arguments, "compare", partial(options, "compare"))
    return yaml.safe_load(resolved_text(parser, config))


def _whole_recipe(arguments: list[str]) -> list[str]:
    return resolve_recipe(arguments, [*SECTION_NAMES, "loop"])


def _complete(_: ArgumentParser, config: Namespace) -> None:
    parsers = {name: new_parser() for name in ACTIONS}
    for name, parser in parsers.items():
        ACTIONS[name].add_arguments(parser)
    completion(config.shell, parsers)


ACTIONS = {
    "fit": Action(add_fit_arguments, _whole_recipe, fit),
    "validate": Action(add_validate_arguments, _whole_recipe, validate),
    "test": Action(add_test_arguments, _whole_recipe, test),
    "predict": Action(add_predict_arguments, _whole_recipe, predict),
    "verify": Action(add_verify_arguments, take_recipe, verify),
    "data": Action(add_data_arguments, lambda arguments: resolve_recipe(arguments, ["data"]), describe_data),
    "compare": Action(
        add_compare_arguments, overrides_last, lambda _, config: compare(resolve_fit, ManyRuns(**vars(config)))
    ),
    "sweep": Action(add_sweep_arguments, overrides_last, lambda _, config: sweep(resolve_fit, Sweep(**vars(config)))),
    "plot": Action(add_plot_arguments, list, lambda _, config: plot(**vars(config))),
    "report": Action(add_report_arguments, list, lambda _, config: report(**vars(config))),
    "completion": Action(add_completion_arguments, list, _complete),
}
