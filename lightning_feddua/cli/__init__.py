from lightning_feddua.cli.commands import main

__all__ = ["main"]
