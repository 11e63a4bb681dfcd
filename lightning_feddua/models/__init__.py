from lightning_feddua.models.linear import LinearRegression

__all__ = ["LinearRegression"]
