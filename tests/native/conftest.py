"""Every test of this folder leaves the native library as empty as it found it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import native
from tests.support.fake_driver import DeviceRig, fake_driver


@pytest.fixture(autouse=True)
def no_native_object_is_left() -> Iterator[None]:
    """Invariant 10, after each test."""
    gc.collect()
    before = native.live_objects(), len(native.leaks())
    yield
    gc.collect()
    assert (native.live_objects(), len(native.leaks())) == before, native.leaks()


@pytest.fixture(params=["fake", pytest.param("cuda", marks=pytest.mark.gpu)])
def make_rig(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., DeviceRig]:
    """Builds rigs on the fake driver and, where there is one, on the real one."""

    def make(seed: int = 0, **options: int) -> DeviceRig:
        if request.param == "cuda":
            driver: native.Driver = _cuda_driver()
        else:
            driver = fake_driver(seed)
        return DeviceRig(driver, tmp_path / "weights.bin", **options)

    return make


def _cuda_driver() -> native.Driver:
    try:
        return native.open_driver()
    except native.DriverUnavailableError as error:
        pytest.skip(f"no CUDA driver: {error}")
