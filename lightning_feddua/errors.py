"""Errors a user can act upon."""


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


def choices(names: object) -> str:
    """Allowed values for an error message, sorted and in backticks.

    >>> choices({"b": 1, "a": 2})
    '`a`, `b`'
    """
    return ", ".join(f"`{name}`" for name in sorted(map(str, names)))  # type: ignore[call-overload]


class ClientError(RuntimeError):
    """Something failed in a client; the cause is chained.

    Args:
        client_id: the client.
        round: the round, from 0.
        stage: what the client was doing.
    """

    def __init__(self, client_id: str, round: int, stage: str, cause: BaseException) -> None:
        super().__init__(
            f"Client `{client_id}` failed in round {round} during {stage}: {type(cause).__name__}: {cause}."
            " The traceback above shows where."
        )
        self.client_id, self.round, self.stage = client_id, round, stage
