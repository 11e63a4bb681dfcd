from lightning_feddua.experiments.sweep.command import Sweep, add_sweep_arguments, sweep

__all__ = ["Sweep", "add_sweep_arguments", "sweep"]
