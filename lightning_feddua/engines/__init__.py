"""How a rank runs the local steps of its clients."""

from lightning_feddua.engines.base import ClientEvents, Engine, register_engine
from lightning_feddua.engines.compiled_engine import CompiledEngine
from lightning_feddua.engines.sequential import SequentialEngine
from lightning_feddua.engines.vectorized import VectorizedEngine

__all__ = ["ClientEvents", "CompiledEngine", "Engine", "SequentialEngine", "VectorizedEngine", "register_engine"]
