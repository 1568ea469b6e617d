"""The native backend behind the offloader's protocol: on the fake driver, and on a GPU."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import native
from ddo.backend import NativeBackend, open_backend, torch_memory
from ddo.blocks import map_shared
from ddo.torch_backend import DeviceError
from ddo.transfer import HostCopy, Ring, RingBlock
from ddo.weight_files import FileIdentity
from tests.support.fake_driver import fake_driver

PAGE = 64 << 10
MIB = 1 << 20
ROOT = Path(__file__).resolve().parents[2]

MakeBackend = Callable[..., NativeBackend]


@pytest.fixture(params=["fake", pytest.param("cuda", marks=pytest.mark.gpu)])
def make_backend(request: pytest.FixtureRequest) -> Iterator[MakeBackend]:
    drivers: list[native.FakeDriver] = []

    def make(seed: int = 0, limit_bytes: int = 64 * MIB) -> NativeBackend:
        if request.param == "fake":
            drivers.append(fake_driver(seed))
            return NativeBackend(
                drivers[-1],
                torch.device("cpu"),
                limit_bytes=limit_bytes,
                host_budget_bytes=64 * MIB,
            )
        return cuda_backend(limit_bytes)

    yield make
    gc.collect()
    for driver in drivers:
        driver.run_all()
        assert driver.violations() == []


def cuda_backend(limit_bytes: int) -> NativeBackend:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.cuda.init()
    return NativeBackend.on_cuda(
        torch.device("cuda", 0), limit_bytes=limit_bytes, host_budget_bytes=64 * MIB
    )


def mapped_file(path: Path, nbytes: int) -> torch.Tensor:
    path.write_bytes(os.urandom(nbytes))
    memory = map_shared(path, FileIdentity.of(path))
    assert memory is not None
    return memory


def test_the_name_tells_a_fake_device(make_backend: MakeBackend) -> None:
    backend = make_backend()
    assert backend.name == ("native-fake" if backend.device.type == "cpu" else "native")


@pytest.mark.parametrize("seed", range(5))
def test_blocks_stream_through_a_small_ring_bit_for_bit(
    make_backend: MakeBackend, tmp_path: Path, seed: int
) -> None:
    """The offloader's ring on native memory, copies and fences, with a ring of two blocks."""
    backend = make_backend(seed)
    nbytes, count = 50_000 // 256 * 256, 7
    weights = mapped_file(tmp_path / "weights", nbytes * count + 64)
    memory = backend.allocate(2 * nbytes)
    sources = [weights[64 + i * nbytes : 64 + (i + 1) * nbytes] for i in range(count)]
    backend.pin(sources)
    blocks = [
        RingBlock(nbytes=nbytes, begin=i % 2 * nbytes, copies=[HostCopy(sources[i], 0)])
        for i in range(count)
    ]
    ring = Ring(backend, memory, blocks, list(range(count)))
    ring.prefetch()
    for _ in range(3):
        for index in range(count):
            block = ring.acquire(index)
            assert torch.equal(block.cpu(), sources[index])
            ring.release(index)
    ring.drain()
    del ring, blocks
    del memory, block
    backend.close()
    if isinstance(driver := backend.native_device.driver, native.FakeDriver):
        assert driver.violations() == []


def test_memory_beyond_the_limit_is_torchs_own_error(make_backend: MakeBackend) -> None:
    backend = make_backend(limit_bytes=8 * MIB)
    held = backend.allocate(6 * MIB)
    with pytest.raises(torch.OutOfMemoryError, match="device range"):
        backend.allocate(4 * MIB)
    del held
    again = backend.allocate(8 * MIB)
    assert again.numel() == 8 * MIB


def test_memory_may_outlive_its_backend(make_backend: MakeBackend) -> None:
    backend = make_backend()
    memory = backend.allocate(MIB)
    del backend
    gc.collect()
    memory.fill_(3)
    assert int(memory.max()) == 3
    del memory


def test_dropped_memory_outlasts_the_copies_into_it(
    make_backend: MakeBackend, tmp_path: Path
) -> None:
    backend = make_backend()
    source = mapped_file(tmp_path / "weights", 2 * MIB)
    backend.pin([source])
    memory = backend.allocate(2 * MIB)
    ready = backend.fence()
    backend.submit(backend.prepare([HostCopy(source, 0)], memory), [], ready)
    del memory
    backend.synchronize(ready)
    backend.arena.collect()
    assert backend.num_host_waits == 1
    backend.close()
    if isinstance(driver := backend.native_device.driver, native.FakeDriver):
        driver.run_all()
        assert driver.violations() == []


def test_copies_are_timed_and_the_link_has_a_rate(
    make_backend: MakeBackend, tmp_path: Path
) -> None:
    backend = make_backend(limit_bytes=128 * MIB)
    assert backend.measure_link() > 1e9
    begin, end = backend.fence(is_timed=True), backend.fence(is_timed=True)
    backend.record(begin)
    backend.record(end)
    backend.synchronize(end)
    elapsed_s = backend.elapsed_s(begin, end)
    assert elapsed_s is not None
    assert elapsed_s >= 0
    assert backend.free_bytes() > 0


def test_a_registration_that_is_refused_falls_back(tmp_path: Path) -> None:
    driver = fake_driver(has_host_registration=False)
    backend = NativeBackend(
        driver, torch.device("cpu"), limit_bytes=64 * MIB, host_budget_bytes=64 * MIB
    )
    source = mapped_file(tmp_path / "weights", 100_000)
    backend.pin([source])
    assert backend.pins.counters.num_refused > 0
    memory = backend.allocate(100_000)
    ready = backend.fence()
    backend.submit(backend.prepare([HostCopy(source, 0)], memory), [], ready)
    backend.wait(ready)
    assert torch.equal(memory, source)
    del memory
    backend.close()


def test_a_private_mapping_is_copied_to_a_slab_not_registered(
    make_backend: MakeBackend, tmp_path: Path
) -> None:
    """Read-only registration of private file pages has been seen to hang."""
    backend = make_backend()
    (tmp_path / "weights").write_bytes(os.urandom(2 * MIB))
    source = torch.from_file(
        str(tmp_path / "weights"), shared=False, size=2 * MIB, dtype=torch.uint8
    )
    backend.pin([source])
    assert backend.pins.counters.registered_bytes == 0
    assert backend.pins.counters.slab_bytes == 2 * MIB
    memory = backend.allocate(2 * MIB)
    ready = backend.fence()
    backend.submit(backend.prepare([HostCopy(source, 0)], memory), [], ready)
    backend.wait(ready)
    assert torch.equal(memory.cpu(), source)
    backend.synchronize(ready)
    backend.close()


def test_a_device_that_is_none_is_refused() -> None:
    with pytest.raises(DeviceError, match="cuda"):
        open_backend(torch.device("cpu"), limit_bytes=MIB, host_budget_bytes=MIB)


def test_on_a_cpu_the_torch_scope_does_nothing() -> None:
    backend = NativeBackend(
        fake_driver(), torch.device("cpu"), limit_bytes=MIB, host_budget_bytes=MIB
    )
    with torch_memory(backend):
        assert torch.ones(3).sum() == 3
    assert backend.arena.stats().used_bytes == 0


# ---- on a GPU --------------------------------------------------------------------------------


@pytest.mark.gpu
def test_torch_allocates_below_the_shared_limit_and_recovers() -> None:
    backend = cuda_backend(256 * MIB)
    with torch_memory(backend):
        kept = torch.ones(10 * MIB, dtype=torch.uint8, device="cuda")
        assert backend.arena.stats().used_by_use["torch"] >= 10 * MIB
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(300 * MIB, dtype=torch.uint8, device="cuda")
        assert int(kept.sum(dtype=torch.int64)) == 10 * MIB
        del kept
    torch.cuda.synchronize()
    gc.collect()
    backend.arena.collect()
    assert backend.arena.stats().used_by_use["torch"] == 0
    backend.arena.close()


@pytest.mark.gpu
def test_torchs_need_demotes_residents_after_their_work() -> None:
    backend = cuda_backend(256 * MIB)
    resident = backend.arena.reserve(200 * MIB)
    resident.commit()
    resident.set_demotion_order(0)
    with torch_memory(backend):
        large = torch.full((100 * MIB,), 7, dtype=torch.uint8, device="cuda")
        assert resident.state is native.RangeState.RESERVED
        (event,) = backend.arena.take_pressure_events()
        assert event.was_met
        assert int(large.max()) == int(large.min()) == 7
        del large


@pytest.mark.gpu
def test_a_tensor_outlives_the_torch_scope() -> None:
    backend = cuda_backend(256 * MIB)
    with torch_memory(backend):
        kept = torch.full((5 * MIB,), 3, dtype=torch.uint8, device="cuda")
    other = torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda")
    assert int(kept.sum(dtype=torch.int64)) == 15 * MIB
    with pytest.raises(native.BusyError):
        backend.arena.close()
    del kept, other
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    backend.arena.collect()
    backend.arena.close()


SCOPE_PROGRAM = """
import torch
from ddo.backend import NativeBackend, torch_memory
torch.cuda.init()
backend = NativeBackend.on_cuda(
    torch.device("cuda", 0), limit_bytes=256 << 20, host_budget_bytes=1 << 20
)
with torch_memory(backend):
    x = torch.ones(1000, 1000, device="cuda")
    y = (x @ x).sum().item()
    used = backend.arena.stats().used_by_use["torch"]
print(abs(y - 1e9) < 1e5, used > 0)
# and out, with a tensor alive: the process must end quietly
"""


@pytest.mark.gpu
@pytest.mark.parametrize(
    "setting",
    ["", "expandable_segments:True", "max_split_size_mb:128", "garbage_collection_threshold:0.6"],
)
def test_other_allocator_settings_do_no_harm(setting: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    result = subprocess.run(
        [sys.executable, "-c", SCOPE_PROGRAM],
        env={**os.environ, "PYTORCH_CUDA_ALLOC_CONF": setting, "PYTORCH_ALLOC_CONF": setting},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (result.returncode, result.stdout.strip()) == (0, "True True"), result.stderr
