from lightning_feddua.experiments.sweep.command import add_sweep_arguments, sweep

__all__ = ["add_sweep_arguments", "sweep"]
