"""``feddua completion``: a script for the shell. It holds all names, because Python takes seconds to start."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from typing import Literal, get_args, get_origin

from jsonargparse import ArgumentParser

from lightning_feddua._private import options_of
from lightning_feddua.cli.recipe_classes import LOOP_SKIPS, SECTIONS, shipped_classes
from lightning_feddua.cli.recipes import load_recipe, shipped_recipes, split_presets
from lightning_feddua.loop import FederatedLoop

# Before the cursor: the command, the option that the word belongs to, and the recipe, if one is named.
# No reply leaves the word to the shell, which completes the names of files.
_SCRIPT = """\
_feddua() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" option="" recipe="" words="" i
    COMPREPLY=()
    for (( i = 2; i < COMP_CWORD; i++ )); do
        case "${{COMP_WORDS[i]}}" in
            --config) option=--config; recipe="${{COMP_WORDS[i + 1]}}" ;;
            -*) option="${{COMP_WORDS[i]}}" ;;
        esac
    done
    if (( COMP_CWORD == 1 )); then
        words="{commands} --help --version"
    elif [[ $current == -* ]]; then
        case "${{COMP_WORDS[1]}}" in
{options}
        esac
    else
        [[ $current == = ]] && current=""
        case "$option" in
{values}
            --preset|--methods)
                case "$recipe" in
{presets}
                esac ;;
        esac
    fi
    COMPREPLY=( $(compgen -W "$words" -- "$current") )
}}
complete -o default -F _feddua feddua
"""
_ZSH = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"


def add_completion_arguments(parser: ArgumentParser) -> None:
    """What ``feddua completion`` takes."""
    parser.add_argument("shell", type=Literal["bash", "zsh"], help="the shell; save what is printed where it looks")


def completion(shell: Literal["bash", "zsh"], parsers: Mapping[str, ArgumentParser]) -> None:
    """Print the script.

    Args:
        shell: for which; zsh runs what is written for bash.
        parsers: the commands, each with its options.
    """
    print((_ZSH if shell == "zsh" else "") + completion_script(parsers), end="")


def completion_script(parsers: Mapping[str, ArgumentParser]) -> str:
    """The script for bash."""
    options = {name: [o for o in _options(parser) if not o.endswith(".help")] for name, parser in parsers.items()}
    sections = tuple(f"--{section}" for section in (*SECTIONS, "loop") if section != "server")
    for name in ("compare", "sweep"):
        options[name] += [option for option in options["fit"] if option.startswith(sections)]
    values = {"--config": list(shipped_recipes()), "--search": ["grid", "random", "optuna"], "--mode": ["min", "max"]}
    values |= _loop_values()
    for section in SECTIONS:
        values[f"--{section}"] = sorted(shipped_classes(SECTIONS[section]))
    presets = {name: list(split_presets(load_recipe(path))[1]) for name, path in shipped_recipes().items()}
    presets["*"] = values["--server"]
    return _SCRIPT.format(
        commands=" ".join(parsers),
        options=_cases(options, indent=12),
        values=_cases(values, indent=12),
        presets=_cases(presets, indent=20),
    )


def _options(parser: ArgumentParser) -> list[str]:
    return [option for option in options_of(parser) if option.startswith("--")]


def _loop_values() -> dict[str, list[str]]:
    """Values of the loop's settings: those of a type that has few, or else those that its docstring quotes."""
    described = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", inspect.getdoc(FederatedLoop) or "", re.MULTILINE)
    quoted = {name: re.findall(r'``"([\w-]+)"``', text) for name, text in described}
    values: dict[str, list[str]] = {}
    for name, parameter in inspect.signature(FederatedLoop, eval_str=True).parameters.items():
        kind = parameter.annotation
        few = get_args(kind) if get_origin(kind) is Literal else ("true", "false") if kind is bool else quoted.get(name)
        if name not in LOOP_SKIPS and few:
            values[f"--loop.{name}"] = list(dict.fromkeys(few))
    return values


def _cases(words: Mapping[str, Iterable[str]], indent: int) -> str:
    return "\n".join(f'{" " * indent}{name}) words="{" ".join(known)}" ;;' for name, known in words.items())
