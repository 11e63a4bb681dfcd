"""What an engine is, what the loop and its engines say to each other, and how an engine is found by name."""

from __future__ import annotations

import importlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from torch import Tensor

from lightning_feddua.aggregation.update import ClientUpdate
from lightning_feddua.data.client_data import ClientData, limited
from lightning_feddua.errors import ClientError, ConfigurationError, choices

if TYPE_CHECKING:
    from lightning_feddua.aggregation.client_states import ClientStates
    from lightning_feddua.clients.local_training import LocalTraining
    from lightning_feddua.host.federation import Federation

# What a loop may be asked for besides an engine: whichever a trial shows to be the fastest.
AUTO = "auto"


@dataclass(frozen=True)
class Clipping:
    """How gradients are clipped.

    Args:
        value: the largest global norm, or the largest absolute value of an element.
        algorithm: which of the two: ``"norm"`` or ``"value"``.
    """

    value: float
    algorithm: str = "norm"


@dataclass(frozen=True)
class LocalWork:
    """How much a client does in a round.

    Args:
        steps: the number of optimizer steps; or None, and
        epochs: the number of passes over the client's data.
        batch_size: the size of a minibatch.
        clip: how gradients are clipped; None for no clipping.
        accumulate: the number of minibatches whose gradients are added up for one step.
        limit: the number of minibatches in a pass, or the fraction of them if a float; None for all.
        drop_last: whether passes leave out a last minibatch that is smaller than the others.
        timeout: seconds after which a client is interrupted; None for never.
    """

    steps: int | None
    epochs: int | None
    batch_size: int
    clip: Clipping | None = None
    accumulate: int = 1
    limit: int | float | None = None
    drop_last: bool = False
    timeout: float | None = None

    def pass_length(self, size: int) -> int:
        """The number of minibatches in a pass over this many samples; at least one."""
        length = -(-size // self.batch_size)
        if self.steps is not None:
            return length
        if self.drop_last:
            length = max(size // self.batch_size, 1)
        return max(limited(length, self.limit), 1)

    def batches(self, size: int) -> int:
        """The number of minibatches that a client with this many samples reads."""
        if self.steps is not None:
            return self.steps * self.accumulate
        assert self.epochs is not None
        return self.epochs * self.pass_length(size)

    def minibatch_sizes(self, size: int) -> list[int]:
        """The size of each minibatch of a client with this many samples, in order."""
        if self.steps is not None or size <= self.batch_size:
            return [min(size, self.batch_size)] * self.batches(size)
        assert self.epochs is not None
        starts = range(0, size, self.batch_size)[: self.pass_length(size)]
        return [min(self.batch_size, size - start) for start in starts] * self.epochs

    def optimizer_steps(self, size: int) -> int:
        """The number of optimizer steps of a client with this many samples."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        return self.epochs * -(-self.pass_length(size) // self.accumulate)

    def ends_pass(self, size: int, index: int) -> bool:
        """Whether the minibatch at a place, counted from the client's first, is the last of a pass."""
        if size <= self.batch_size:
            return True
        if self.steps is None:
            return (index + 1) % self.pass_length(size) == 0
        return (index + 1) * self.batch_size // size > index * self.batch_size // size


@dataclass(frozen=True)
class GlobalState:
    """What every client of a round starts from, besides the buffers that the federation keeps.

    Args:
        round: the round, from 0.
        seed: the run's seed.
        weights: the global weights, flat.
        work: how much each client does.
        lr_factor: multiplies the module's learning rates.
    """

    round: int
    seed: int
    weights: Tensor
    work: LocalWork
    lr_factor: float = 1.0


@dataclass(frozen=True)
class Client:
    """A member of a round's cohort.

    Args:
        position: its place in the cohort.
        index: its place in the data module.
        name: its name.
        data: its samples.
        weight: its weight in the mean.
        lane: where in the order of summation its update comes.
    """

    position: int
    index: int
    name: str
    data: ClientData
    weight: float = 1.0
    lane: int = 0


@dataclass(frozen=True)
class ClientEvents:
    """What to call for each client. The module then holds the global weights and buffers, or the client's own.

    Args:
        start: called before a client's local steps, with the global state in the module; None if nobody needs it.
        end: called after them, with the client's own state in the module; None if nobody needs it.
    """

    start: Callable[[Client], None] | None = None
    end: Callable[[Client], None] | None = None


class Engine(ABC):
    """Runs the local steps of a rank's clients.

    A subclass has a ``name`` and implements :meth:`run`. ``FederatedLoop(engine=...)`` takes the class itself, its
    import path such as ``"my_module.MyEngine"``, or its name once it is registered with :func:`register_engine`. A run
    is resumed only by an engine of the same name, so engines that round differently need different names.

    Args:
        federation: the module and its clients, with optimizers.
        algorithm: what clients do.
        states: what they keep between rounds.
        compile: whether to compile the local steps, if the engine can.

    Example:
        An engine that prints each client before it trains them as usual:

        >>> from lightning_feddua.engines import SequentialEngine
        >>> class Printing(SequentialEngine):
        ...     def run(self, clients, state, events):
        ...         print(*[client.name for client in clients])
        ...         yield from super().run(clients, state, events)
    """

    name: ClassVar[str]
    # Whether clients are trained one after another, so that their updates can be added in a fixed order, lane by lane.
    in_lanes: ClassVar[bool] = True

    def __init__(
        self, federation: Federation, algorithm: LocalTraining, states: ClientStates, compile: bool = False
    ) -> None:
        self.federation = federation
        self.algorithm = algorithm
        self.states = states

    @classmethod
    def obstacle(cls, federation: Federation, algorithm: LocalTraining) -> str | None:
        """Why the engine cannot run this module, as the end of a sentence; None if nothing is known.

        Args:
            federation: the module and its clients, with optimizers.
            algorithm: what clients do.
        """
        return None

    @abstractmethod
    def run(
        self, clients: list[Client], state: GlobalState, events: ClientEvents
    ) -> Iterator[ClientUpdate | ClientError]:
        """Train clients from the same global state.

        Args:
            clients: this rank's part of the cohort.
            state: what they start from.
            events: what to call before and after the local steps of each client.

        Yields:
            The clients' updates one by one, in any order; an error for a client that fails.
        """


_ENGINES: dict[str, type[Engine]] = {}
AnyEngine = TypeVar("AnyEngine", bound=type[Engine])


def register_engine(engine: AnyEngine) -> AnyEngine:
    """Make an engine available under its name; a class decorator."""
    name = _checked(engine, engine).name
    known = _ENGINES.get(name)
    # A cell of a notebook that runs twice defines the same class twice.
    if name == AUTO or (known is not None and known.__qualname__ != engine.__qualname__):
        raise ConfigurationError(f"The name `{name}` of `{engine.__qualname__}` is taken.", "Choose another name.")
    _ENGINES[name] = engine
    return engine


def is_registered(name: str) -> bool:
    """Whether an engine is available under a name."""
    return name in _ENGINES


def find_engine(engine: str | type[Engine]) -> type[Engine]:
    """The class of an engine.

    Args:
        engine: the name of a registered engine, an import path such as ``"my_module.MyEngine"``, or the class itself.
    """
    if isinstance(engine, str):
        return _ENGINES[engine] if engine in _ENGINES else _checked(_imported(engine), engine)
    return _checked(engine, engine)


def _imported(path: str) -> Any:
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        known = choices([AUTO, *_ENGINES])
        reason = f": {error}" if module else ""
        raise ConfigurationError(
            f"There is no engine `{path}`{reason}.",
            f"Choose one of {known}, or give an `Engine` class or its import path.",
        ) from error


def _checked(found: Any, asked: Any) -> type[Engine]:
    """One clear error for what is not an engine that can be used."""
    if not (isinstance(found, type) and issubclass(found, Engine)):
        raise ConfigurationError(
            f"The engine `{asked}` is not a subclass of `Engine`.",
            f"Choose one of {choices([AUTO, *_ENGINES])}, or give an `Engine` class or its import path.",
        )
    if inspect.isabstract(found) or not isinstance(getattr(found, "name", None), str):
        raise ConfigurationError(
            f"The engine `{found.__qualname__}` has no `name`, or no method `run`.", "Define both in the class."
        )
    return found
