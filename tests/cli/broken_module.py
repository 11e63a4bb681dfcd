"""A user's module that fails when it is imported."""

Model = 1 / 0
