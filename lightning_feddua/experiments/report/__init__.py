from lightning_feddua.experiments.report.page import write_report

__all__ = ["write_report"]
