"""Everything that a few Python objects hold, remembered so that changes show and can be undone in place."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from itertools import chain
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import numpy as np
from torch import Tensor, nn

from lightning_feddua._private import MODULE_REGISTRIES
from lightning_feddua.host.hidden import parts
from lightning_feddua.host.hidden.comparison import Compared
from lightning_feddua.host.hidden.global_names import globals_of
from lightning_feddua.host.hidden.iterators import Progress, is_iterator
from lightning_feddua.host.hidden.parts import Attributes, Cells, ClassAttributes, Elements, Items, Part, Registry
from lightning_feddua.host.hidden.reach import ATOMS, OTHERS, is_followed, is_torchs_own, package_of_class, slots_of
from lightning_feddua.host.hidden.same_values import generator_state
from lightning_feddua.host.hidden.tensor_groups import Group, groups_of
from lightning_feddua.host.hidden.tensors import ArrayContent, Flags, GeneratorState, Gradient, TensorContent

# What is followed among a class's own attributes.
_OF_CLASSES = (dict, list, set, deque, Tensor, np.ndarray)
# A longer container is compared item by item only in a deep comparison, and so are all beyond so many parts.
_LONG, _MANY = 1000, 10_000
# So are larger arrays; in bytes.
_LARGE = 1 << 14


class Snapshot:
    """Remembers objects and what can be reached from them: attributes, containers, tensors, arrays, generators.

    Also variables of closures, optimizers and schedulers of torch's, and the global variables, classes among them, that
    methods of a user's own code name. Of iterators it shows whether they have been advanced, which cannot be undone.
    Not followed are classes of other packages than the owners' that are no modules, what a function keeps in its cache
    (``lru_cache``), data sets, loggers, and other objects of Lightning and torch that are no modules.

    Args:
        owners: the objects, by what a user knows them by.
        managed: objects that somebody else looks after, such as trained parameters and their optimizers.
        before: an earlier snapshot of the same objects, whose copies are used again where they still hold.
        restless: the ids of large things that are known to change, and compared each time.
    """

    def __init__(
        self,
        owners: Mapping[str, object],
        managed: Collection[object] = (),
        before: Snapshot | None = None,
        restless: Collection[int] = (),
    ) -> None:
        self.parts: list[Part] = []
        self._tensors: list[TensorContent | Group] = []
        # Compared each time; by length, and more closely in deep comparisons; and all at once, with what they held.
        self._each: list[Part] = []
        self._long: list[Any] = []
        self._deep: list[Part] = []
        self._compared = Compared()
        self._restless = restless
        # Tensors and arrays, until all are known.
        self._pending: list[tuple[str, Any]] = []
        # Ids hold for as long as the objects live, which the parts see to.
        self._seen = {id(value) for value in managed}
        self._parents: list[Any] = []
        queue: deque[tuple[str, Any]] = deque(owners.items())
        roots = {id(owner) for owner in owners.values()}
        # Where classes of helpers count, and not only those of modules.
        self._packages = {package_of_class(cls) for owner in owners.values() for cls in type(owner).__mro__} - OTHERS
        while queue:
            label, value = queue.popleft()
            if id(value) not in self._seen:
                self._seen.add(id(value))
                queue.extend(self._remember(label, value, id(value) in roots))
        self._add_numbers([] if before is None else before.parts)
        self._note()

    def same(self, deep: bool = False) -> bool:
        """Whether nothing has changed.

        Args:
            deep: compare everything; or else long containers by their length alone, and tensors and large arrays not
                by their elements.
        """
        if not self._compared.same():
            return False
        if self._present_versions() != self._versions or [*map(len, self._long)] != self._lengths:
            return False
        return all(part.same() for part in self._each) and not (deep and any(not part.same() for part in self._deep))

    def changes(self) -> list[str]:
        """What has another value now, by label."""
        return [label for part in self.parts for label in part.changes()]

    def unseen_changes(self) -> list[Part]:
        """What has changed, though nothing but a deep comparison shows it; compared each time from now on."""
        longer = {id(c) for c, length in zip(self._long, self._lengths, strict=True) if len(c) != length}
        written = {id(part.value) for part in self._written()}
        found = [p for p in self._deep if id(p.value) not in longer and id(p.value) not in written and not p.same()]
        if found:
            ids = {id(part) for part in found}
            self._deep = [part for part in self._deep if id(part) not in ids]
            self._each += found
        return found

    def restore(self, deep: bool = False) -> None:
        """Undo changes, in place.

        Args:
            deep: as in :meth:`same`.
        """
        for part in self._changed(deep):
            part.restore()
        self._versions = self._present_versions()

    def renew(self) -> bool:
        """Take the present values for those to come back to; False if other objects are held, which takes a new one."""
        renewed = [part.renew() for part in self._changed(deep=True)]
        self._note()
        return all(renewed)

    def _changed(self, deep: bool) -> list[Part]:
        """What has changed, or may have."""
        longer = [p for p in self._deep if isinstance(p, Items) and len(p.value) != len(p.saved)]
        closer: list[Part] = [*self._each, *self._written(), *(self._deep if deep else longer)]
        return list(dict.fromkeys([*self._compared.changed(), *(part for part in closer if not part.same())]))

    def registries(self) -> Iterator[Registry]:
        """Where modules keep parameters, buffers and submodules."""
        return (part for part in self.parts if isinstance(part, Registry))

    def iterators(self) -> Iterator[Progress]:
        """Iterators, which cannot be brought back."""
        return (part for part in self._each if isinstance(part, Progress))

    def label_of(self, tensor: Tensor) -> str | None:
        """What a user knows a tensor by; None if it is not here."""
        return next((label for label, known in self.tensors() if known is tensor), None)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors, but for those that somebody else looks after."""
        return chain.from_iterable(part.tensors() for part in self._tensors)

    def _written(self) -> list[TensorContent | Group]:
        """Tensors that may have been written to."""
        return [part for part, version in zip(self._tensors, self._versions, strict=True) if part.version() != version]

    def _present_versions(self) -> list[Any]:
        return [part.version() for part in self._tensors]

    def _note(self) -> None:
        """What is compared before anything else."""
        self._lengths = list(map(len, self._long))
        self._versions = self._present_versions()
        self._compared.note()

    def _remember(self, label: str, value: Any, is_root: bool) -> Iterator[tuple[str, Any]]:
        """Remember one object; gives what it holds."""
        if isinstance(value, Tensor | np.ndarray):
            self._pending.append((label, value))
            if isinstance(value, Tensor) and value.requires_grad and value.is_leaf:
                self._add(Gradient(label, value), self._each)
                yield f"{label}.grad", value.grad
        elif isinstance(value, nn.Module):
            yield from self._remember_module(label, value)
        elif isinstance(value, dict | list | set | deque):
            self._add_items(Items(label, value))
            items = value.items() if isinstance(value, dict) else enumerate(value)
            yield from ((f"{label}[{key!r}]", item) for key, item in items if type(item) not in ATOMS)
        elif isinstance(value, tuple | frozenset):
            self._parents.append(value)
            yield from ((f"{label}[{i}]", item) for i, item in enumerate(value) if type(item) not in ATOMS)
        elif generator_state(value) is not None:
            self._add(GeneratorState(label, value), self._each)
        elif isinstance(value, bytearray | array):
            self._add(Elements(label, value), self._each)
        elif isinstance(value, memoryview):
            self._parents.append(value)
            yield label, value.obj
        elif isinstance(value, MethodType | BuiltinFunctionType):
            self._parents.append(value)
            yield label, value.__self__
        elif isinstance(value, FunctionType):
            yield from self._remember_function(label, value)
        elif isinstance(value, partial):
            self._parents.append(value)
            yield from ((label, item) for item in (value.func, value.args, value.keywords, vars(value)))
        elif is_iterator(value):
            self._add(Progress(label, value), self._each)
        elif is_root or is_followed(value):
            yield from self._remember_object(label, value)
            if package_of_class(type(value)) in self._packages:
                yield from self._remember_classes(type(value))
        else:
            self._parents.append(value)

    def _remember_module(self, label: str, module: nn.Module) -> Iterator[tuple[str, Any]]:
        for kind in MODULE_REGISTRIES:
            registry = vars(module).get(kind)
            if isinstance(registry, dict):
                self._seen.add(id(registry))
                self._add_items(Registry(label, registry, kind, module))
                yield from ((f"{label}.{name}", value) for name, value in registry.items() if value is not None)
        yield from self._remember_object(label, module)
        own = dict(module.named_parameters(recurse=False))
        if own:
            self._add(Flags(label, own), self._each)
        yield from self._remember_classes(type(module))

    def _remember_classes(self, kind: type) -> Iterator[tuple[str, Any]]:
        for cls in kind.__mro__:
            if package_of_class(cls) not in OTHERS:
                yield from self._of_class(cls)

    def _of_class(self, cls: type) -> Iterator[tuple[str, Any]]:
        """What a class keeps, and what its methods find in global variables."""
        if id(cls) in self._seen:
            return
        self._seen.add(id(cls))
        self._add_items(ClassAttributes(cls.__name__, cls))
        for name, value in vars(cls).items():
            if isinstance(value, _OF_CLASSES) and not name.startswith("__"):
                yield f"{cls.__name__}.{name}", value
            elif isinstance(function := getattr(value, "__func__", value), FunctionType):
                yield from self._globals_of(function)

    def _globals_of(self, function: FunctionType) -> Iterator[tuple[str, Any]]:
        part, named = globals_of(function)
        if part is not None:
            self._add(part, self._each)
        for label, value in named:
            yield from self._of_class(value) if isinstance(value, type) else [(label, value)]

    def _remember_function(self, label: str, function: FunctionType) -> Iterator[tuple[str, Any]]:
        self._parents.append(function)
        if (function.__module__ or "").partition(".")[0] in OTHERS:
            return
        yield from self._globals_of(function)
        if function.__closure__:
            part = Cells(label, function)
            self._add(part, self._each)
            yield from ((label, item) for item in part.saved)
        yield from ((label, item) for item in (function.__defaults__, function.__kwdefaults__, vars(function)))

    def _remember_object(self, label: str, value: Any) -> Iterator[tuple[str, Any]]:
        self._parents.append(value)
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            self._add_items(Attributes(label, attributes, isinstance(value, nn.Module) and is_torchs_own(value)))
            for name, item in attributes.items():
                if type(item) not in ATOMS:
                    yield f"{label}.{name}", item
        slots = [name for cls in type(value).__mro__ for name in slots_of(cls)]
        if slots:
            part = parts.Slots(label, value, slots)
            self._add(part, self._each)
            yield from ((f"{label}.{name}", item) for name, item in part.saved.items() if type(item) not in ATOMS)

    def _add(self, part: Part, kind: list[Part]) -> None:
        self.parts.append(part)
        kind.append(part)

    def _add_items(self, part: Part) -> None:
        """Attributes and containers, which are compared all at once."""
        self.parts.append(part)
        small = len(part.saved) <= _LONG and len(self.parts) <= _MANY
        if small or id(part.value) in self._restless:
            self._compared.add(part)
        else:
            self._long.append(part.value)
            self._deep.append(part)

    def _add_numbers(self, before: Collection[Part]) -> None:
        """Tensors and arrays: many small ones together, the others one by one."""
        copies = {part.identity: part for part in before if isinstance(part, Group | TensorContent | ArrayContent)}
        groups, rest = groups_of(self._pending, copies)
        self._pending = []
        for group in groups:
            self._tensors.append(group)
            self._add(group, self._each if group.identity in self._restless else self._deep)
        for label, value in rest:
            known = copies.get(id(value))
            kept = known.saved if known is not None and known.value is value and known.same() else None
            restless = id(value) in self._restless
            if isinstance(value, Tensor):
                part = TensorContent(label, value, kept)
                self._tensors.append(part)
                self._add(part, self._each if restless else self._deep)
            else:
                small = value.nbytes <= _LARGE and len(self.parts) <= _MANY
                self._add(ArrayContent(label, value, kept), self._each if restless or small else self._deep)
