"""A digest of everything in a checkpoint."""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import torch
from torch import Tensor

from lightning_feddua._private import metadata_of

# More are no checkpoint of ours, and deeper ones would exhaust the stack.
_DEPTH = 100


def digest(tree: Any) -> str:
    """A digest of a tree of tensors and plain values, of types and orders as well as values."""
    found = hashlib.sha256()
    _add(found, tree, 0)
    return found.hexdigest()


def _add(found: Any, value: Any, depth: int) -> None:
    if depth > _DEPTH:
        raise ValueError("it is nested too deeply")
    if isinstance(value, Tensor):
        found.update(_head("tensor", f"{value.dtype} {tuple(value.shape)}"))
        if value.layout is torch.strided and not value.is_quantized and value.numel():
            # Every value of every type has bytes, but NumPy does not know every type.
            found.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, dict):
        found.update(_head("dict", len(value)))
        for key, item in value.items():
            _add(found, key, depth + 1)
            _add(found, item, depth + 1)
        if (metadata := metadata_of(value)) is not None:
            _add(found, dict(metadata), depth + 1)
    elif type(value) in (list, tuple, torch.Size):
        found.update(_head(type(value).__name__, len(value)))
        for item in value:
            _add(found, item, depth + 1)
    elif type(value) in (set, frozenset):
        found.update(_head("set", sorted(digest(item) for item in value)))
    elif type(value) is float:
        found.update(b"float" + struct.pack("<d", value))
    elif type(value) is bytes:
        found.update(_head("bytes", len(value)) + value)
    elif type(value) is str:
        content = value.encode(errors="surrogatepass")
        found.update(_head("str", len(content)) + content)
    else:
        found.update(_head(type(value).__name__, value))


def _head(kind: str, value: Any) -> bytes:
    return f"{kind} {value};".encode()
