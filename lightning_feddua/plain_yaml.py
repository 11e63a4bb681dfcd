"""YAML files of plain values, as somebody else may have written them: small, and no larger than they look."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

# Of a recipe. YAML can name a part and repeat it, so that a small file stands for more than any memory holds.
_MOST_BYTES = 10_000_000
_MOST_VALUES = 1_000_000
_DEPTH = 100


def load_yaml(path: Path, loader: type[yaml.SafeLoader] = yaml.SafeLoader) -> Any:
    """The content of a YAML file.

    Args:
        path: the file.
        loader: which loader makes values of it.

    Raises:
        ValueError: it is not valid, or too large or too deep; the message is a part of a sentence.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise ValueError(f"it has more than {_MOST_BYTES:,} bytes")
    try:
        reader = loader(content.decode())
        try:
            node = reader.get_single_node()
            if node is None:
                return None
            _check_size(node, {})
            return reader.construct_document(node)
        finally:
            reader.dispose()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeDecodeError:
        raise ValueError("it is no text") from None
    # A value may look like a date and be none.
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise ValueError(" ".join(str(error).split())) from error


def _check_size(node: yaml.Node, known: dict[yaml.Node, tuple[int, int]]) -> tuple[int, int]:
    """How many values a node stands for, with everything that it repeats, and how deep they are."""
    if node not in known:
        # What contains itself has no end.
        known[node] = (_MOST_VALUES + 1, 0)
        parts = node.value if isinstance(node, yaml.CollectionNode) else []
        parts = [part for pair in parts for part in pair] if isinstance(node, yaml.MappingNode) else parts
        sizes = [_check_size(part, known) for part in parts]
        known[node] = (1 + sum(size for size, _ in sizes), 1 + max((depth for _, depth in sizes), default=0))
    size, depth = known[node]
    if size > _MOST_VALUES:
        raise ValueError(f"it stands for more than {_MOST_VALUES:,} values")
    if depth > _DEPTH:
        raise ValueError("it is nested too deeply")
    return size, depth
