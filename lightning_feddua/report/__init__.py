from lightning_feddua.report.page import write_report

__all__ = ["write_report"]
