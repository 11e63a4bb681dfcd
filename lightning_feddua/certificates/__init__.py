from lightning_feddua.certificates.verification import Verification, verify_run

__all__ = ["Verification", "verify_run"]
