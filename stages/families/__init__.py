"""One small declaration per model family; importing this package loads no torch."""

from stages.families.family import FAMILIES, Family, Reading, family_named, require_model_of

__all__ = ["FAMILIES", "Family", "Reading", "family_named", "require_model_of"]
