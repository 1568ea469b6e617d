"""Byte counts for people, in one form everywhere. Loads no torch."""

from ddo.sizes import show_nbytes

__all__ = ["show_nbytes"]
