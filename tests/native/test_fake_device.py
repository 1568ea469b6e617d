"""What only a fake device can show, and what needs a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import native
from native import Hold, RangeState, TierOutcome
from tests.support.fake_driver import DeviceRig, fake_driver


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[DeviceRig]:
    rig = DeviceRig(fake_driver(), tmp_path / "weights.bin")
    yield rig
    vars(rig).clear()  # pytest keeps the fixture's value for longer than the test


def test_results_say_that_they_come_from_the_fake(rig: DeviceRig) -> None:
    assert rig.device.driver.is_fake
    assert rig.device.name == "fake device"


def test_5_steady_state_never_synchronises(rig: DeviceRig) -> None:
    source = rig.open()
    source.register_pages(0, rig.file_nbytes)
    ring = native.TransferRing(
        rig.arena, num_slots=3, slot_nbytes=rig.page, copy_stream=rig.copies.handle
    )
    unit = native.Unit([(source, 0, 1000, 0)])
    for _ in range(30):
        ticket = ring.try_submit(unit)
        assert ticket is not None
        ring.acquire(ticket, rig.compute.handle)
        ring.release(ticket, rig.compute.handle)
    assert isinstance(rig.driver, native.FakeDriver)
    # A synchronising call would have run what was pending; the copies alone are more.
    assert rig.driver.num_pending > 3 * 30
    ring.close()
    assert rig.driver.num_pending == 0


def test_9_python_runs_while_a_native_call_waits(tmp_path: Path) -> None:
    """A thread that waits for a disk must not hold the interpreter's lock."""
    rig = DeviceRig(fake_driver(), tmp_path / "weights.bin")
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    errors: list[BaseException] = []

    def open_fifo() -> None:
        try:
            native.FileMapping(str(fifo))  # blocks in open() until there is a writer
        except native.SizeError as error:
            errors.append(error)

    waiting = threading.Thread(target=open_fifo)
    waiting.start()
    with fifo.open("wb"):  # reached only if the thread let go of the lock
        waiting.join()
    assert len(errors) == 1
    assert rig.violations() == []


@pytest.mark.parametrize("has_registration", [True, False])
def test_a_device_without_registration_takes_the_next_tier(
    tmp_path: Path, has_registration: bool
) -> None:
    driver = fake_driver(has_read_only_registration=has_registration)
    rig = DeviceRig(driver, tmp_path / "weights.bin")
    result = rig.open().register_pages(0, 1000)
    expected = TierOutcome.COMPLETE if has_registration else TierOutcome.UNSUPPORTED
    assert (result.outcome, rig.device.has_read_only_registration) == (expected, has_registration)


def test_a_device_without_virtual_memory_is_refused() -> None:
    with pytest.raises(native.DriverUnavailableError, match="virtual memory"):
        native.Device(fake_driver(has_virtual_memory=False))


def test_torch_views_a_range_without_a_copy_and_keeps_it(rig: DeviceRig) -> None:
    import torch
    from torch.utils.dlpack import from_dlpack

    memory = rig.arena.reserve(rig.page)
    memory.commit()
    tensor = from_dlpack(memory.export(offset=256, nbytes=1024))
    assert (tensor.shape, tensor.dtype) == ((1024,), torch.uint8)
    assert tensor.data_ptr() == memory.address + 256
    weights = tensor.view(torch.bfloat16).view(16, 32)
    weights.fill_(1.5)
    del tensor
    memory.retire()
    assert memory.state is RangeState.DRAINING
    assert weights.sum() == 1.5 * 512
    with pytest.raises(native.BusyError):
        rig.arena.close()
    del weights
    assert memory.state is RangeState.RETIRED
    rig.arena.close()


def test_an_unused_capsule_ends_its_view(rig: DeviceRig) -> None:
    memory = rig.arena.reserve(rig.page)
    memory.commit()
    capsule = memory.export(hold=Hold.ADDRESS)
    assert native.live_objects()["export"] == 1
    del capsule
    assert native.live_objects()["export"] == 0


def test_views_end_from_any_thread(rig: DeviceRig) -> None:
    from torch.utils.dlpack import from_dlpack

    memory = rig.arena.reserve(rig.page)
    memory.commit()
    tensors = [from_dlpack(memory.export()) for _ in range(50)]
    memory.demote()
    threads = [threading.Thread(target=tensors.pop) for _ in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert memory.state is RangeState.RESERVED


FORKED = """
import os, sys
import native
from tests.support.fake_driver import DeviceRig, fake_driver
from pathlib import Path
driver = fake_driver()
rig = DeviceRig(driver, Path(sys.argv[1]))
staging = native.StagingRing(rig.device, rig.host_budget, num_buffers=2, buffer_bytes=4096)
memory = rig.arena.reserve(1000)
memory.commit()
ring = native.TransferRing(
    rig.arena, num_slots=1, slot_nbytes=100, copy_stream=rig.copies.handle, staging=staging
)
source = rig.open()
unit = native.Unit([(source, 0, 100, 0)])
calls = [
    lambda: rig.arena.reserve(1),
    memory.commit,
    memory.demote,
    memory.acquire,
    lambda: memory.release(0),
    lambda: ring.try_submit(unit),
    lambda: ring.close(),
    lambda: rig.arena.close(),
    lambda: rig.device.memory_info(),
    lambda: native.Stream(rig.device),
    lambda: native.EventFence(rig.device),
    lambda: source.register_pages(0, 10),
    lambda: source.load_slab(0, 10),
    lambda: native.Arena(rig.device, limit_bytes=1 << 20, reserve_bytes=0),
    lambda: native.upload(memory, unit, 0),
    memory.export,
]
child = os.fork()
if child == 0:
    code = 0
    for index, call in enumerate(calls):
        try:
            call()
        except native.ForkedError:
            continue
        os._exit(10 + index)
    num_calls = driver.num_calls
    del calls, call, ring, staging, memory, source, unit, rig
    # Dropping everything made no driver call: the objects are the parent's.
    os._exit(0 if driver.num_calls == num_calls else 1)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0, os.waitstatus_to_exitcode(status)
ring.close()  # the parent goes on as before
rig.arena.reserve(10).commit()
fresh = os.fork()
if fresh == 0:
    # A device that the child opened itself is its own.
    native.Arena(native.Device(fake_driver()), limit_bytes=1 << 20, reserve_bytes=0).close()
    os._exit(0)
_, status = os.waitpid(fresh, 0)
assert os.waitstatus_to_exitcode(status) == 0
"""


def test_11_use_after_a_fork_is_refused(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKED, tmp_path / "w.bin"],
        check=True,
        cwd=root,
        timeout=60,
    )


def test_the_library_imports_without_a_driver() -> None:
    is_available, reason = native.available()
    if is_available:
        pytest.skip("this machine has a CUDA driver")
    assert "libcuda" in reason
    with pytest.raises(native.DriverUnavailableError, match="libcuda"):
        native.open_driver()


def test_the_stub_names_what_the_module_has() -> None:
    import ast

    from native import _core

    stub = Path(native.__file__).with_name("_core.pyi")
    tree = ast.parse(stub.read_text())
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            members = {
                item.name if isinstance(item, ast.FunctionDef) else item.targets[0].id  # type: ignore[attr-defined]
                for item in node.body
                if isinstance(item, ast.FunctionDef | ast.Assign)
            }
            found = {
                name
                for name in vars(getattr(_core, node.name))
                if not name.startswith("_") or name == "__init__"
            }
            assert members | {"__init__"} == found | {"__init__"}, node.name
    stubbed = {n.name for n in tree.body if isinstance(n, ast.ClassDef | ast.FunctionDef)}
    assert stubbed == {name for name in vars(_core) if not name.startswith("_")}


def test_the_references_example_runs() -> None:
    text = (Path(__file__).parents[2] / "docs/reference/native.md").read_text()
    (snippet,) = (part.split("```")[0] for part in text.split("```python\n")[1:])
    names: dict[str, object] = {}
    exec(compile(snippet, "docs/reference/native.md", "exec"), names)
    names.clear()
