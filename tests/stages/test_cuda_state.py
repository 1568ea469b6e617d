"""CUDA's state is read off the driver's answers, by calls that change nothing."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from stages import cuda_state


def test_a_process_without_the_driver_has_not_initialised_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda_state, "_is_driver_loaded", lambda: False)
    monkeypatch.setattr(cuda_state.ctypes, "CDLL", None)
    assert not cuda_state.is_cuda_initialised()


@pytest.mark.parametrize(("answer", "expected"), [(3, False), (0, True), (999, True)])
def test_only_a_driver_that_says_so_is_not_initialised(
    monkeypatch: pytest.MonkeyPatch, answer: int, expected: bool
) -> None:
    asked = []
    driver = SimpleNamespace(cuDeviceGetCount=lambda count: asked.append(count) or answer)
    monkeypatch.setattr(cuda_state, "_is_driver_loaded", lambda: True)
    monkeypatch.setattr(cuda_state.ctypes, "CDLL", lambda name: {"libcuda.so.1": driver}[name])
    assert cuda_state.is_cuda_initialised() is expected
    assert len(asked) == 1
