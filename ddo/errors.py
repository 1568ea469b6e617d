"""What can go wrong in this package, under one root."""

from __future__ import annotations


class DdoError(Exception):
    """Root of everything that this package raises on purpose."""
