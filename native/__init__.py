"""Device memory of a stage process: a thin package over the C++ extension."""

from native._core import available

__all__ = ["available"]
