from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from ddo.native_facts import facts_of, native_facts
from ddo.rates import best_s, measure_rates
from ddo.torch_backend import DeviceError
from tests.support.fake_driver import FAKE_GRANULARITY, fake_driver


def test_the_facts_are_those_of_the_device():
    native = pytest.importorskip("native", reason="the native extension is not built")
    driver = fake_driver(has_read_only_registration=False)
    found = facts_of(native.Device(driver))
    assert found.is_available
    assert found.granularity_bytes == FAKE_GRANULARITY
    assert found.has_read_only_registration is False
    assert 0 < found.free_bytes <= found.total_bytes
    assert facts_of(native.Device(fake_driver())).has_read_only_registration is True


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_without_a_driver_the_reason_is_told():
    found = native_facts()
    assert not found.is_available
    assert found.reason
    with pytest.raises(DeviceError, match="no CUDA device is usable"):
        measure_rates("cuda")


def test_asking_for_facts_loads_no_torch():
    code = "import sys; from ddo.native_facts import native_facts; native_facts(); "
    code += "print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


def test_the_quickest_of_three_runs_counts_and_the_first_one_does_not():
    calls = []
    assert best_s(lambda: calls.append(1), torch.device("cpu")) > 0
    assert len(calls) == 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_every_rate_is_measured():
    facts, rates = native_facts(), measure_rates("cuda")
    assert rates.pinned_bytes_per_s > 0 and rates.pageable_bytes_per_s > 0
    assert rates.flops_per_s > 0
    if facts.is_available:
        assert facts.name == torch.cuda.get_device_name()
        assert rates.fallback_reason is None
