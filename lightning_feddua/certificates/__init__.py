"""Certificates of rounds, and their verification."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_feddua.certificates.verification import Verification, verify_run

__all__ = ["Verification", "verify_run"]


def __getattr__(name: str) -> Any:
    """Import verification when it is asked for: it needs the loop, which needs the certificates."""
    if name not in __all__:
        raise AttributeError(f"module `{__name__}` has no attribute `{name}`")
    from lightning_feddua.certificates import verification

    return getattr(verification, name)
