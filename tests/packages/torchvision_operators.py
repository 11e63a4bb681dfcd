"""Lets torchvision be imported beside a torch for which its compiled part is not built, such as a CPU build."""

import contextlib
import importlib.util
import sys

import torch

# What torchvision's Python part looks up on import. Calling one of them is still an error.
_NAMES = ("nms", "qnms")
# Operators last as long as the library that declares them.
_libraries = []


def declare_missing_operators():
    """Declare them where they are missing. To be called before torchmetrics is imported, which imports torchvision."""
    if importlib.util.find_spec("torchvision") is None:
        return
    # It loads its operators first, and then fails because they are missing.
    with contextlib.suppress(RuntimeError):
        import torchvision  # noqa: F401
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in _NAMES:
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            for module in [module for module in sys.modules if module.partition(".")[0] == "torchvision"]:
                del sys.modules[module]
    _libraries.append(library)
