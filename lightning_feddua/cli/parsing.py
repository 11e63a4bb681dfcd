"""Parsers of command lines, and one clear error for what they cannot read."""

from __future__ import annotations

from argparse import ArgumentError
from collections.abc import Callable, Sequence
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from lightning_feddua.errors import ConfigurationError


def new_parser(**arguments: Any) -> ArgumentParser:
    """A parser that raises instead of ending the process."""
    return ArgumentParser(exit_on_error=False, allow_abbrev=False, **arguments)


def parse(
    parser: ArgumentParser, arguments: list[str], command: str, options: Callable[[], Sequence[str]]
) -> Namespace:
    """What a command line says.

    Args:
        parser: what it may say.
        arguments: the command line.
        command: the subcommand, for messages.
        options: gives all options that it has.
    """
    try:
        return parser.parse_args(arguments)
    except ArgumentError as error:
        # It needs the classes that a recipe may name, and with them torch, which takes seconds.
        from lightning_feddua.cli.argument_errors import sentences

        raise ConfigurationError(*sentences(error, command, options)) from error
