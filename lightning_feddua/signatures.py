"""The arguments of one class as those of another's constructor, in signatures and in docstrings."""

from collections.abc import Callable
from inspect import Parameter, Signature, signature
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
Owner = TypeVar("Owner")


def takes(settings: Callable[P, Any]) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """Give a constructor, for type checkers, editors and ``help``, the arguments of another class."""

    def decorate(function: Callable[..., None]) -> Callable[Concatenate[Any, P], None]:
        own = Parameter("self", Parameter.POSITIONAL_OR_KEYWORD)
        parameters = [own, *signature(settings).parameters.values()]
        function.__signature__ = Signature(parameters, return_annotation=None)  # type: ignore[attr-defined]
        return function

    return decorate


def documents(settings: type) -> Callable[[type[Owner]], type[Owner]]:
    """Put the arguments of another class into a class's docstring, before its example."""

    def decorate(owner: type[Owner]) -> type[Owner]:
        text, example, rest = (owner.__doc__ or "").partition("    Example:")
        arguments = (settings.__doc__ or "").partition("\n\n")[2].rstrip()
        owner.__doc__ = f"{text}{arguments}\n\n{example}{rest}"
        return owner

    return decorate
