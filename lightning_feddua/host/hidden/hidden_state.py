"""What a module keeps in Python, besides parameters and buffers, so that no client leaves it to the next."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from lightning_feddua._private import BUFFERS, PARAMETERS
from lightning_feddua.errors import ConfigurationError
from lightning_feddua.host.hidden.parts import Registry
from lightning_feddua.host.hidden.snapshot import Snapshot

# Before so many clients of a run everything is compared, to find out what changes; later what is cheap to compare.
_DEEP_CLIENTS = 4


class HiddenState:
    """Attributes, containers, tensors, generators, hooks and flags of a module and of whatever it holds.

    What is looked into, and what is not, is said in :class:`~lightning_feddua.host.hidden.snapshot.Snapshot`.

    Taken when the local training of a round begins, and brought back before each client and at the end. So what a
    module keeps over rounds, such as the best accuracy in validation, survives, and what clients do to it does not.
    Writes to memory that do not show (through ``.data``, or in large arrays) are looked for before the first clients of
    a run and at the end of each round: what they are found to change is compared before each later client, and if they
    are found too late there is an error. There is one, too, for iterators that clients advance.

    Args:
        module: the module.
        managed: gives the objects that somebody else looks after, such as trained parameters and their optimizers.
    """

    def __init__(self, module: nn.Module, managed: Callable[[], Iterable[object]]) -> None:
        self._owners: dict[str, Any] = {"self": module}
        self._managed = managed
        self._taken: Snapshot | None = None
        self._restless: set[int] = set()
        self._deep_clients = _DEEP_CLIENTS
        # Clients since everything was compared last, and whether that was just now.
        self._since_deep = 0
        self._just_compared = False
        # How many have a snapshot that must not be renewed.
        self._lent = 0

    def watch(self, *owners: object) -> None:
        """Look after further objects, such as callbacks that run in clients."""
        for owner in owners:
            label = type(owner).__name__
            if label in self._owners and self._owners[label] is not owner:
                label = f"{label} {len(self._owners)}"
            self._owners[label] = owner
        self._taken = None

    def snapshot(self) -> Snapshot:
        """The state as it is now."""
        return Snapshot(self._owners, list(self._managed()), self._taken, self._restless)

    def take(self) -> None:
        """From now on :meth:`restore` comes back to the present state."""
        if self._taken is None:
            self._taken = self.snapshot()
        elif self._lent:
            self._taken = self.present(deep=True)
        elif not self._taken.same(deep=True) and not self._taken.renew():
            self._taken = self.snapshot()
        self._since_deep = 0
        self._just_compared = False

    def restore(self, deep: bool = False) -> None:
        """Bring back the state that was taken.

        Args:
            deep: compare everything, also what has not been seen to change so far.
        """
        taken = self._known
        if not deep and self._deep_clients > 0:
            self._deep_clients -= 1
            deep = True
        unseen = []
        if deep:
            self._since_deep = 0
            unseen = [] if self._just_compared else taken.unseen_changes()
            self._restless.update(part.identity for part in unseen)
        self._just_compared = False
        self._since_deep += 1
        # What has not been seen is compared each time from now on.
        if unseen or not taken.same():
            taken.restore()

    def changes(self) -> list[str]:
        """What has changed since the state was taken, by names such as ``self.counter``."""
        return [] if self._known.same(deep=True) else self._known.changes()

    def present(self, deep: bool = False) -> Snapshot:
        """The state as it is now; the one that was taken, if it is the same.

        Args:
            deep: as in :meth:`restore`.
        """
        return self._known if self._known.same(deep) else self.snapshot()

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Leave the state as it is, whatever happens inside."""
        before = self.present(deep=True)
        self._lent += 1
        try:
            yield
        finally:
            self._lent -= 1
            before.restore(deep=True)

    def check(self, deep: bool = False) -> None:
        """One clear error for what a client has done and cannot be undone, or has been seen too late.

        Args:
            deep: whether this is the end of local training.
        """
        taken = self._known
        if not taken.same():
            for registry in taken.registries():
                for name in registry.others():
                    _check_entry(registry, name)
        for iterator in taken.iterators():
            if not iterator.is_known or not iterator.same():
                raise ConfigurationError(
                    f"The module keeps the iterator `{iterator.label}`, and what one client reads from it is lost for"
                    " the next.",
                    "Make it in `on_train_start`, or keep a position and read from a list by it.",
                )
        if not deep or self._since_deep <= 1:
            return
        if unseen := taken.unseen_changes():
            label = next(unseen[0].changes(), unseen[0].label)
            raise ConfigurationError(
                f"A client has changed `{label}` in a way that shows only in its elements, and clients after"
                " it may have seen that.",
                "Register it as a buffer, or assign a new value instead of writing to the old one's memory.",
            )
        # So that the end of local training need not compare it again.
        self._just_compared = True

    @property
    def _known(self) -> Snapshot:
        if self._taken is None:
            self.take()
        assert self._taken is not None
        return self._taken


def _check_entry(registry: Registry, name: str) -> None:
    """One clear error for a parameter, a buffer or a submodule with either that local steps have made or replaced."""
    label, value = f"{registry.label}.{name}".removeprefix("self."), registry.value.get(name)
    in_init = "Make it in `__init__`, `setup` or `configure_model`"
    if registry.kind == PARAMETERS:
        raise ConfigurationError(
            f"A client's local steps made, replaced or removed the parameter `{label}`.", f"{in_init}."
        )
    if registry.kind == BUFFERS and name in registry.module.state_dict():
        raise ConfigurationError(
            f"The buffer `{label}` has no value before a client's local steps, which give it one.",
            f"{in_init}, or register it with `persistent=False` if each client can make its own.",
        )
    if isinstance(value, nn.Module) and (inside := next(iter(value.state_dict()), None)) is not None:
        raise ConfigurationError(
            f"A client's local steps made or replaced the submodule `{label}`, which has `{inside}`.", f"{in_init}."
        )


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Numbers, strings and truth values among a module's attributes, those of its submodules included, by name."""
    return {
        f"{path}.{name}".lstrip("."): value
        for path, owner in module.named_modules()
        for name, value in vars(owner).items()
        if isinstance(value, bool | int | float | str)
    }
