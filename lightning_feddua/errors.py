"""Errors a user can act upon."""

import difflib
from collections.abc import Iterable


class ConfigurationError(ValueError):
    """Bad input, found before any work starts.

    Args:
        problem: what is wrong, with the value; one sentence.
        remedy: what to do; one sentence.
    """

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"{problem} {remedy}")
        self.problem, self.remedy = problem, remedy

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        # So that one rank can tell the others.
        return type(self), (self.problem, self.remedy)


class UnsavedError(ConfigurationError):
    """All rounds are done, but what was to be saved of the last ones could not be."""


class UnequalClientsError(RuntimeError):
    """A training step asks for what differs between the clients of a stack."""


def choices(names: object) -> str:
    """Allowed values for an error message, sorted and in backticks.

    >>> choices({"b": 1, "a": 2})
    '`a`, `b`'
    """
    return ", ".join(f"`{name}`" for name in sorted(map(str, names)))  # type: ignore[call-overload]


def instead_of(name: str, allowed: Iterable[str]) -> str:
    """What to write instead of a name that does not exist, as a sentence: the nearest one, or any of those there are.

    >>> instead_of("max_round", ["max_rounds", "seed"]), instead_of("qqq", ["max_rounds", "seed"])
    ('Write `max_rounds` if that was meant.', 'Choose among `max_rounds`, `seed`.')
    """
    near = difflib.get_close_matches(str(name), known := list(allowed), n=1)
    return f"Write `{near[0]}` if that was meant." if near else f"Choose among {choices(known)}."


def hint(name: str, allowed: Iterable[str], initial: str = "c") -> str:
    """The beginning of a sentence, up to the first letter of the word that follows it, such as "choose"."""
    near = difflib.get_close_matches(str(name), list(allowed), n=1)
    return f"Write `{near[0]}` if that was meant, or {initial}" if near else initial.upper()


class ClientError(RuntimeError):
    """Something failed in a client; the cause is chained.

    Args:
        client_id: the client.
        round: the round, from 0.
        stage: what the client was doing.
        cause: the exception; or what else is wrong, and what to do, in words.
    """

    def __init__(self, client_id: str, round: int, stage: str, cause: BaseException | str) -> None:
        self.problem = cause if isinstance(cause, str) else f"{type(cause).__name__}: {str(cause).rstrip('.')}."
        where = "" if isinstance(cause, str) else " The traceback above shows where."
        # Not `super`: a subclass has another base with arguments of its own.
        RuntimeError.__init__(
            self, f"Client `{client_id}` failed in round {round} during {stage}: {self.problem}{where}"
        )
        self.client_id, self.round, self.stage = client_id, round, stage
        self.__cause__ = None if isinstance(cause, str) else cause


class NotFiniteError(RuntimeError):
    """A number of a round is not finite that would be in all later rounds.

    Args:
        message: what it is.
        round: the round, from 0.
    """

    def __init__(self, message: str, round: int) -> None:
        super().__init__(message)
        self.round = round


class DivergenceError(ClientError, NotFiniteError):
    """Something that a client sends is not finite."""


class RankError(RuntimeError):
    """Another rank has failed, or does not answer."""


class RemoteTraceback(Exception):
    """The traceback of an exception in another process, as text."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"
