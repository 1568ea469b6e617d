"""One small declaration per model family; importing this package loads no torch."""

from stages.families.family import FAMILIES, Family, family_named

__all__ = ["FAMILIES", "Family", "family_named"]
