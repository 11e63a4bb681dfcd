"""What a sweep varies: a key of the recipe, and its values or their range."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import yaml

from lightning_feddua.errors import ConfigurationError

Kind = Literal["log", "lin", "int"]
# A point of the space: the value of each key, as on the command line.
Settings = Mapping[str, str]


@dataclass(frozen=True)
class Choice:
    """A few values, as on the command line."""

    values: tuple[str, ...]

    @property
    def probes(self) -> tuple[str, ...]:
        """Values that show whether all are of the right type."""
        return self.values

    def draw(self, rng: np.random.Generator) -> str:
        """One of them, each as likely as the others."""
        return self.values[rng.integers(len(self.values))]


@dataclass(frozen=True)
class Range:
    """All numbers between two: with a uniform logarithm, uniform, or whole."""

    kind: Kind
    low: float
    high: float

    @property
    def probes(self) -> tuple[str, ...]:
        """Values that show whether all are of the right type."""
        return self.text(self.low), self.text(self.high)

    def draw(self, rng: np.random.Generator) -> str:
        """One of them."""
        return self.text(self.at(rng.random()))

    def at(self, share: float) -> float:
        """The number at a share, from 0 to 1, of the way."""
        if self.kind == "log":
            return math.exp(math.log(self.low) + share * math.log(self.high / self.low))
        if self.kind == "int":
            return min(math.floor(self.low + share * (self.high - self.low + 1)), self.high)
        return self.low + share * (self.high - self.low)

    def text(self, number: float) -> str:
        """Six digits, which tables and folder names can bear."""
        return str(round(number)) if self.kind == "int" else f"{number:.6g}"


Dimension = Choice | Range
Space = Mapping[str, Dimension]


def parse_space(texts: Iterable[str]) -> dict[str, Dimension]:
    """A space given as ``KEY=VALUES``.

    Values are separated by commas, or are a range: ``log:LOW:HIGH``, ``lin:LOW:HIGH`` or ``int:LOW:HIGH``. With a
    number of points at its end, as in ``log:0.001:0.1:5``, a range becomes these points.

    >>> parse_space(["model.lr=log:0.001:0.1:3", "server.eps_g=0,1e-3"])
    {'model.lr': Choice(values=('0.001', '0.01', '0.1')), 'server.eps_g': Choice(values=('0', '1e-3'))}
    """
    space: dict[str, Dimension] = {}
    for text in texts:
        key, equals, values = text.partition("=")
        key = key.removeprefix("--").replace(".init_args.", ".")
        if not (key and equals and values):
            raise ConfigurationError(f"`--space {text}` is not `KEY=VALUES`.", "Write, say, `model.lr=0.01,0.1`.")
        if key in space:
            raise ConfigurationError(f"`{key}` is twice in the space.", "Give all of its values at once.")
        space[key] = _parse_range(values) if values.split(":")[0] in ("log", "lin", "int") else _parse_choice(values)
    return space


def _parse_choice(text: str) -> Choice:
    try:
        # A list of YAML, so that a value may itself be a list.
        items = yaml.safe_load(f"[{text}]")
    except yaml.YAMLError as error:
        raise ConfigurationError(f"`{text}` is not a list of values.", "Separate values by commas.") from error
    values = (item if isinstance(item, str) else json.dumps(item, default=str) for item in items)
    return Choice(tuple(dict.fromkeys(values)))


def _parse_range(text: str) -> Dimension:
    kind, *numbers = text.split(":")
    try:
        low, high = (float(number) for number in numbers[:2])
        count = int(numbers[2]) if len(numbers) == 3 else None
        sound = len(numbers) <= 3 and -math.inf < low < high < math.inf and (count is None or count > 1)
    except ValueError:
        sound = False
    if not sound or (kind == "log" and low <= 0) or (kind == "int" and (low % 1 or high % 1 or count)):
        raise ConfigurationError(
            f"`{text}` is not a range.",
            "Write `log:LOW:HIGH` with 0 < LOW < HIGH, or `lin:LOW:HIGH`, with `:COUNT` for so many points, or"
            " `int:LOW:HIGH`.",
        )
    whole = Range(kind, low, high)  # type: ignore[arg-type]
    if count is None:
        return whole
    return Choice(tuple(whole.text(whole.at(i / (count - 1))) for i in range(count)))
