"""Whether a device that was asked for is there, said before anything is loaded for it."""

from __future__ import annotations

import torch

from stages.errors import DependencyError


def require_device(device: str) -> None:
    """Return if stages can compute on a device.

    Args:
        device: `cpu`, `cuda` or `cuda:N`.

    Raises:
        DependencyError: It is not there, or torch or the driver cannot use it.
    """
    if device == "cpu":
        return
    if not torch.cuda.is_available():
        raise DependencyError(f"device {device} was asked for: {why_no_cuda()}")
    count, (_, _, index) = torch.cuda.device_count(), device.partition(":")
    if int(index or 0) >= count:
        known = "cuda:0" if count == 1 else f"cuda:0 to cuda:{count - 1}"
        raise DependencyError(
            f"device {device} was asked for, this process sees {known}; choose one of these, or "
            "look at CUDA_VISIBLE_DEVICES"
        )


def why_no_cuda(reason: str = "") -> str:
    """Why torch can use no CUDA device, with a remedy.

    Args:
        reason: What the driver itself says.
    """
    if torch.version.cuda is None:
        return (
            f"torch {torch.__version__} is built without CUDA, so no stage can use a GPU; install "
            "a build of torch for CUDA, or set device cpu"
        )
    found = f": {reason}" if reason else ""
    return f"torch sees no usable CUDA device{found}; check the driver, or set device cpu"
