"""Mistakes in a command line, in a sentence each."""

import difflib
import inspect
import re
from argparse import ArgumentError
from collections.abc import Callable, Sequence
from pathlib import Path

from lightning_feddua.cli.recipe_classes import import_class, no_such_class
from lightning_feddua.cli.recipes import shipped_recipes
from lightning_feddua.errors import choices

# What a command line lacks, and what to write; the first that fits is said.
_REQUIRED = {
    "folders": ("no folder", "Give a run's, as in `feddua {} runs/synthetic/version_0`"),
    "shell": ("no shell", "Give it, as in `feddua {} bash`"),
    "config": ("no recipe", "Give one, as in `feddua {} --config synthetic`"),
    "model|data": ("no model or no data", "Give a recipe, as in `feddua {} --config synthetic`"),
    "space": ("nothing to vary", "Give a key and values, as in `feddua {} --space model.lr=0.01,0.1`"),
}


def sentences(error: ArgumentError, command: str, options: Callable[[], Sequence[str]]) -> tuple[str, str]:
    """What is wrong with a command line, and what to write instead.

    Args:
        error: what jsonargparse says, often over many lines.
        command: the subcommand.
        options: gives all options that it has.
    """
    text = str(error)
    if match := re.search(r"class_path '([\w.]+)':\s+Option '([\w.]+)' is not accepted", text):
        cls = import_class(match[1])
        allowed = choices(inspect.signature(cls).parameters) if cls is not None else "what its documentation says"
        return f"A `{match[1].rpartition('.')[2]}` has no argument `{match[2]}`.", f"Choose among {allowed}."
    if match := re.search(r"Parser key \"(\w+)\":\s+Problem with.*'([\w.]+)':\s+the following.* required: (\w+)", text):
        section, class_path, name = match.groups()
        return f"A `{class_path.rpartition('.')[2]}` needs `{name}`.", f"Give it, as in `--{section}.{name} VALUE`."
    if match := re.search(r"Multiple subclasses with name (\w+)\..*?: (.*)\.", text):
        return f"There are several classes `{match[1]}`.", f"Choose one of {choices(match[2].split(', '))}."
    if match := re.search(r"class_path '([\w.]+)':\s+(?:module .* has no attribute|No module named)", text):
        return f"There is no class `{match[1]}`.", "Give the import path of a class that exists."
    if match := re.search(r'Parser key "([\w.]+)"(?!.*Parser key)', text, re.DOTALL):
        key = _whole_key(text)
        # What is said of the innermost argument, up to its value.
        text = "".join(re.split(r"((?:Given|Got) value: .*)", text[match.start() :])[:2])
        base = re.search(r"Subtypes: \[<class '(\w+\.[\w.]+)'>", text)
        if base and (given := re.search(r"Expected a dot import path string: (\S+)", text)):
            return no_such_class(match[1].replace("_", " "), given[1], import_class(base[1]))
        value = re.search(r"(?:Given value|Got value): (.*)", text)
        expected = dict.fromkeys(
            re.findall(r"Expected an? (?:<class '([\w.]+)'>|([\w.\[\]', ]+?)(?:\. Got|\n|$))", text)
        )
        kinds = " or ".join(_kind(a or b) for a, b in expected)
        if value and kinds:
            return f"`{key}` cannot be `{value[1]}`.", f"Give {kinds}."
    problem = " ".join(text.split()).rstrip(".")
    if "arguments are required" in problem:
        for missing, (what, example) in _REQUIRED.items():
            if re.search(rf"\b{missing}\b", problem):
                return f"The command line names {what}.", f"{example.format(command)}."
    see = f"`{f'feddua {command}'.strip()} --help`"
    unknown = re.search(r"unrecognized arguments: (\S+)", problem)
    meant = _meant(unknown[1], options()) if unknown else None
    advice = f"Write `{meant}` if that was meant; {see} has all options." if meant else f"See {see}."
    return f"The command line cannot be read: {problem}.", advice


def _whole_key(text: str) -> str:
    """The innermost key that jsonargparse complains of, with those around it, which stand above it and further left."""
    around: list[tuple[int, str]] = []
    for indent, key in re.findall(r'^([ -]*)Parser key "([\w.]+)"', text, re.MULTILINE):
        around = [*((depth, name) for depth, name in around if depth < len(indent)), (len(indent), key)]
    return ".".join(name for _, name in around)


def _meant(argument: str, options: Sequence[str]) -> str | None:
    """What somebody who wrote an argument that does not exist had in mind, if it can be guessed."""
    if not argument.startswith("-"):
        return f"--config {argument}" if argument in shipped_recipes() or Path(argument).is_file() else None
    name = argument.partition("=")[0]
    inner = [option for option in options if option.endswith(f".{name.lstrip('-')}")]
    return next(iter([*inner, *difflib.get_close_matches(name, options, n=1)]), None)


def _kind(expected: str) -> str:
    """What jsonargparse expects, for people."""
    if expected.startswith("typing.Literal"):
        values = re.findall(r"'(.*?)'", expected)
        return f"one of {choices(values)}"
    return "none" if expected == "NoneType" else f"a value of type {expected}"
