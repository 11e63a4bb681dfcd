"""Several client algorithms at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from lightning_feddua.aggregation.update import RoundUpdate
from lightning_feddua.checks import check_instance
from lightning_feddua.clients.local_training import LocalRound, LocalTraining, change_in_place
from lightning_feddua.errors import ConfigurationError

# The dictionaries of a round in which each part has names of its own.
LOCAL = ("state", "scratch", "scalars")
SENT = ("extra_vectors", "scalars")
# Methods that change their first argument in place.
IN_PLACE = ("correct", "project")


def _flag(name: str, combine: Callable[[Iterable[bool]], bool] = any) -> Any:
    return property(lambda self: combine(getattr(part, name) for part in self.algorithms))


def _names(kind: str) -> Any:
    return property(lambda self: tuple(prefix + name for prefix, part in self._named for name in getattr(part, kind)))


def _values(kind: str) -> Any:
    """The dictionaries of all parts as one; setting it gives each part its own."""

    def get_all(self: Combined) -> dict[str, Any]:
        return {prefix + name: value for prefix, part in self._named for name, value in getattr(part, kind).items()}

    def set_each(self: Combined, values: Mapping[str, Any]) -> None:
        for prefix, part in self._named:
            setattr(part, kind, _own(values, prefix))

    return property(get_all, set_each)


def _each(method: str) -> Any:
    return lambda self, *arguments: self._call(method, *arguments) and None


class Combined(LocalTraining):
    """Several algorithms in one. Each does its part, in the given order.

    Each part sees its own names in ``vectors``, ``local.state``, ``local.scratch`` and so on, so parts do not have to
    know of each other. The order matters if one part changes what another one has computed.

    Args:
        algorithms: the parts.

    Example:
        >>> from lightning_feddua import FedProx, Scaffold
        >>> Combined([FedProx(mu=0.1), Scaffold()]).client_state
        ('1.Scaffold.c_i',)
    """

    client_state = _names("client_state")
    extra_vectors = _names("extra_vectors")
    client_scalars = _names("client_scalars")
    vectors = _values("vectors")
    numbers = _values("numbers")
    coordinate_adaptive = _flag("coordinate_adaptive")
    client_adaptive = _flag("client_adaptive")
    needs_full_gradient = _flag("needs_full_gradient")
    needs_anchor_gradient = _flag("needs_anchor_gradient")
    needs_mean_gradient = _flag("needs_mean_gradient")
    needs_constant_lr = _flag("needs_constant_lr")
    needs_all_clients = _flag("needs_all_clients")
    needs_local_steps = _flag("needs_local_steps")
    touches_steps = _flag("touches_steps")
    draws_steps = _flag("draws_steps")
    corrects = _flag("corrects")
    supports_vectorized = _flag("supports_vectorized", all)

    check_server = _each("check_server")
    set_up = _each("set_up")
    begin_round = _each("begin_round")
    start = _each("start")
    correct = _each("correct")
    project = _each("project")
    aggregate = _each("aggregate")

    def __init__(self, algorithms: list[LocalTraining]) -> None:
        if not isinstance(algorithms, list | tuple) or not algorithms:
            raise ConfigurationError(f"`algorithms={algorithms!r}` has no algorithms.", "Give a list of at least one.")
        for algorithm in algorithms:
            check_instance("algorithm", algorithm, LocalTraining)
        if len({id(algorithm) for algorithm in algorithms}) < len(algorithms):
            raise ConfigurationError("`algorithms` has the same object twice.", "Create one for each place.")
        drawing = [type(algorithm).__name__ for algorithm in algorithms if algorithm.draws_steps]
        if len(drawing) > 1:
            raise ConfigurationError(
                f"`{'` and `'.join(drawing)}` both draw the number of local steps.", "Combine only one such algorithm."
            )
        self.algorithms = list(algorithms)
        # Each part with what its names begin with in the whole.
        self._named = [(f"{i}.{type(part).__name__}.", part) for i, part in enumerate(algorithms)]

    @property
    def parts(self) -> list[LocalTraining]:
        """The single algorithms, those of combined parts included."""
        return [single for part in self.algorithms for single in part.parts]

    def _call(self, method: str, *arguments: Any) -> dict[str, Any]:
        """Call a method of each part, in order; its results by prefix. What a part sees of a round is its own."""
        results = {}
        for prefix, part in self._named:
            own = [_own_round(argument, prefix) for argument in arguments]
            call = change_in_place if method in IN_PLACE else _call_method
            results[prefix] = call(part, method, *own)
            for whole, seen in zip(arguments, own, strict=True):
                if isinstance(whole, LocalRound):
                    _write_back(whole, seen, prefix)
        return results

    def local_steps(self, rng: np.random.Generator, local_steps: int | None) -> int | None:
        """As the part says that draws them, if any does."""
        for part in self.algorithms:
            local_steps = part.local_steps(rng, local_steps)
        return local_steps

    def finish(self, delta: Tensor, local: LocalRound) -> dict[str, Tensor]:
        """Finish each part, and send the extra vectors of all."""
        sent = self._call("finish", delta, local)
        return {prefix + name: vector for prefix, vectors in sent.items() for name, vector in vectors.items()}

    def state_dict(self) -> dict[str, Any]:
        """The states of all parts."""
        return {"algorithm": type(self).__name__, "parts": list(self._call("state_dict").values())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the state of another run of the same parts."""
        self._check_state(state)
        for part, own in zip(self.algorithms, state["parts"], strict=True):
            part.load_state_dict(own)


def _call_method(part: LocalTraining, method: str, *arguments: Any) -> Any:
    return getattr(part, method)(*arguments)


def _own(whole: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """What a part owns of a dictionary, under the part's own names."""
    return {name.removeprefix(prefix): value for name, value in whole.items() if name.startswith(prefix)}


def _own_round(whole: Any, prefix: str) -> Any:
    """A round as a part sees it; any other argument as it is."""
    if not isinstance(whole, LocalRound | RoundUpdate):
        return whole
    kinds = LOCAL if isinstance(whole, LocalRound) else SENT
    own: Any = {kind: _own(getattr(whole, kind), prefix) for kind in kinds}
    return replace(whole, **own)


def _write_back(whole: LocalRound, own: LocalRound, prefix: str) -> None:
    """Let the whole know what a part has changed in its dictionaries."""
    for kind in LOCAL:
        known, changed = getattr(whole, kind), {prefix + name: v for name, v in getattr(own, kind).items()}
        for name in [name for name in known if name.startswith(prefix) and name not in changed]:
            del known[name]
        known.update(changed)
