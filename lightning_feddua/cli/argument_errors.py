"""Mistakes in a command line, in a sentence each."""

import difflib
import inspect
import re
from argparse import ArgumentError
from collections.abc import Callable, Sequence
from pathlib import Path

from lightning_feddua.cli.recipe_classes import SECTIONS, import_class, no_such_class
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
        return _not_accepted(match[1], match[2], _whole_key(text[: match.start()]))
    if match := re.search(r"Multiple subclasses with name (\w+)\..*?: (.*)\.", text):
        return f"There are several classes `{match[1]}`.", f"Choose one of {choices(match[2].split(', '))}."
    if match := re.search(r"class_path '([\w.]+)':\s+the following arguments are required: (.*)", text):
        return _incomplete(match[1], match[2].split(", "), text[: match.start()], text[match.end() :])
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
        # A section that chooses a class may be left out, but never be none.
        kinds = [_kind(a or b) for a, b in expected if key not in SECTIONS or (a or b) != "NoneType"]
        bases = dict.fromkeys(re.findall(r"(?:subclass of|Expected a subclass of) (\w+)", text))
        if bases:
            # A type of this package's that stands for two of Lightning's.
            names = (base.replace("AnyDataModule", "LightningDataModule") for base in bases)
            paths = f"the `class_path` of {' or '.join(f'a `{name}`' for name in names)}"
            kinds = [paths, *(kind for kind in kinds if not kind.startswith("a value of type path"))]
        if value and kinds:
            return f"`{key}` cannot be `{_given(value[1])}`.", f"Give {' or '.join(kinds)}."
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


def _not_accepted(class_path: str, name: str, key: str) -> tuple[str, str]:
    """What to say of an argument that a class does not have by name."""
    problem, cls = f"`{class_path.rpartition('.')[2]}` has no argument `{name}`.", import_class(class_path)
    if cls is None:
        return problem, "Choose among what its documentation says."
    parameters = inspect.signature(cls).parameters.values()
    named = [one.name for one in parameters if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)]
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return (
            problem,
            f"Write `--{key}.dict_kwargs.{name}` to pass it on by keyword, or choose among {choices(named)}.",
        )
    return problem, f"Choose among {choices(named)}."


def _incomplete(class_path: str, names: Sequence[str], before: str, after: str) -> tuple[str, str]:
    """What to say of a class whose required arguments are not given, and where they belong.

    Args:
        class_path: the class.
        names: the arguments.
        before: what jsonargparse says before that; it names the key.
        after: what it says then; it shows the value.
    """
    key, needed = _whole_key(before), " and ".join(f"`{name}`" for name in names)
    them = "it" if len(names) == 1 else "them"
    if "Given value type: <class 'list'>" in after:
        remedy = f"Give {them} in the `init_args` of its entry in `{key}`."
    else:
        remedy = f"Give {them}, as in `{' '.join(f'--{key}.{name} VALUE' for name in names)}`."
    return f"`{class_path.rpartition('.')[2]}` needs {needed}.", remedy


def _given(value: str) -> str:
    """A value as somebody may have written it: of a class, its path alone."""
    path = re.match(r"\[?(?:Namespace\(|\{|NestedArg\(key='\w+', )'?(?:class_path|val)'?(?:=|: )'([\w.]+)'", value)
    return path[1] if path else value


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
    if expected.endswith("Sequence"):
        return "a list"
    return "none" if expected == "NoneType" else f"a value of type {expected}"
