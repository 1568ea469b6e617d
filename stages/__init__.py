"""Stages of a generation run; importing this package loads no torch."""

from stages.contracts import ArtifactRef, StageContext, StageRequest, StageResult

__all__ = ["ArtifactRef", "StageContext", "StageRequest", "StageResult"]
