"""What the file of a checkpoint declares, looked at before any of it is loaded.

``torch.load`` believes a file: how large a tensor's memory is, and which part of it a tensor shows. Here both are
compared with what the file really has, without a tensor being made or code of the file being run.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import zipfile
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

# The flag of a folder among the attributes of an entry in a ZIP archive.
_FOLDER = 0x10
# How many bytes an element has in each kind of memory; newer types of numbers are all kept in the last.
_ELEMENT_BYTES = {"ComplexDouble": 16, "ComplexFloat": 8, "Double": 8, "Long": 8, "Float": 4, "Int": 4, "QInt32": 4}
_ELEMENT_BYTES |= {"Half": 2, "BFloat16": 2, "Short": 2, "Char": 1, "Byte": 1, "Bool": 1, "QInt8": 1, "QUInt8": 1}
_ELEMENT_BYTES |= {"Untyped": 1}
_MEMO = ("PUT", "BINPUT", "LONG_BINPUT", "GET", "BINGET", "LONG_BINGET")


class NotIntactError(ValueError):
    """Something in a file is not as it was written; the message says what, as a part of a sentence."""


def check_archive(path: Path) -> None:
    """Look at a file that ``torch.save`` has written.

    Raises:
        NotIntactError: it has another size or content than it declares.
        zipfile.BadZipFile: it is no such file at all.
    """
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        for entry in entries:
            # Nothing unpacks to more than the file itself, and what looks like a folder would be read as nothing.
            if entry.compress_type != zipfile.ZIP_STORED or entry.external_attr & _FOLDER:
                raise NotIntactError(f"is damaged in `{entry.filename}`")
        if sum(entry.file_size for entry in entries) > path.stat().st_size:
            raise NotIntactError("declares more than the file has")
        # `torch.load` does not look at the checksums that `torch.save` has written.
        if (damaged := archive.testzip()) is not None:
            raise NotIntactError(f"is damaged in `{damaged}`")
        sizes = {entry.filename.partition("/")[2]: entry.file_size for entry in entries}
        content = next((archive.read(entry) for entry in entries if entry.filename.endswith("/data.pkl")), None)
    if content is None:
        raise NotIntactError("is damaged or no checkpoint at all")
    _check_memo(content)
    _Declared(content, sizes).load()


def _check_memo(content: bytes) -> None:
    """The unpickler takes memory up to the largest place that is named, be anything there or not."""
    for opcode, argument, _ in pickletools.genops(content):
        if opcode.name in _MEMO and int(argument or 0) > len(content):
            raise NotIntactError("is damaged in `data.pkl`")


class _Inert:
    """Stands for any object that is no tensor: it can be made and filled, and does nothing."""

    def __init__(self, *args: Any) -> None:
        pass

    def __call__(self, *args: Any) -> _Inert:
        return _Inert()

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, item: Any) -> None:
        pass

    def extend(self, items: Any) -> None:
        pass


@dataclass(frozen=True)
class _Kind:
    """What the elements of a tensor's memory are."""

    element_bytes: int


@dataclass(frozen=True)
class _Storage:
    """The memory of a tensor: how many elements it has."""

    elements: int


class _Declared(pickle.Unpickler):
    def __init__(self, content: bytes, sizes: dict[str, int]) -> None:
        super().__init__(io.BytesIO(content))
        self._sizes = sizes

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch._utils" and name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3"):
            return self._tensor if name.endswith("2") else self._untyped_tensor
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module in ("torch", "torch.storage") and name.removesuffix("Storage") in _ELEMENT_BYTES:
            return _Kind(_ELEMENT_BYTES[name.removesuffix("Storage")])
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        return _Inert

    def persistent_load(self, pid: Any) -> Any:
        try:
            _, kind, key, _, elements = pid
            declared = elements * kind.element_bytes
        except (TypeError, ValueError, AttributeError):
            raise NotIntactError("declares a tensor in no known way") from None
        found = self._sizes.get(f"data/{key}")
        if declared != found:
            raise NotIntactError(f"declares {declared} bytes of a tensor where it has {found or 0}")
        return _Storage(elements)

    def _untyped_tensor(self, storage: Any, offset: Any, shape: Any, strides: Any, *more: Any) -> Any:
        dtype = more[2] if len(more) > 2 else None
        if not isinstance(storage, _Storage) or not isinstance(dtype, torch.dtype):
            raise NotIntactError("declares a tensor in no known way")
        return self._tensor(_Storage(storage.elements // dtype.itemsize), offset, shape, strides)

    def _tensor(self, storage: Any, offset: Any, shape: Any, strides: Any, *more: Any) -> Any:
        numbers = (offset, *shape, *strides)
        if not isinstance(storage, _Storage) or len(shape) != len(strides):
            raise NotIntactError("declares a tensor in no known way")
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise NotIntactError("declares a tensor with a size that is none")
        extent = offset + 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        if math.prod(shape) and extent > storage.elements:
            raise NotIntactError(f"declares a tensor of shape {tuple(shape)} where it has {storage.elements} elements")
        return _Inert()
