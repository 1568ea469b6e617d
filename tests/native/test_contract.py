"""One suite for the fake driver and the real one. Numbers are those of the invariants."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import native
from native import DeviceUse, RangeState, SlotState, TierOutcome
from tests.support.fake_driver import DeviceRig

MakeRig = Callable[..., DeviceRig]


def unit_of(
    source: native.HostSource, offset: int, nbytes: int, target_offset: int = 0
) -> native.Unit:
    return native.Unit([(source, offset, nbytes, target_offset)])


def ring_of(rig: DeviceRig, num_slots: int = 2, **options: object) -> native.TransferRing:
    return native.TransferRing(
        rig.arena,
        num_slots=num_slots,
        slot_nbytes=rig.page,
        copy_stream=rig.copies.handle,
        **options,  # type: ignore[arg-type]
    )


def consume(
    rig: DeviceRig, ring: native.TransferRing, ticket: int | None, nbytes: int
) -> native.Readback:
    assert ticket is not None
    ring.acquire(ticket, rig.compute.handle)
    seen = rig.read(ring.slot_address(ring.slot_of(ticket)), nbytes)
    ring.release(ticket, rig.compute.handle)
    return seen


def test_1_all_device_bytes_count_against_one_limit(make_rig: MakeRig) -> None:
    rig = make_rig(limit_bytes=0)
    ranges = [rig.arena.reserve(4 * rig.page, use=use) for use in DeviceUse]
    for memory in ranges:
        memory.commit()
    ring = ring_of(rig)
    more = rig.arena.reserve(3 * rig.page)
    with pytest.raises(native.OutOfMemoryError) as failure:
        more.commit()
    assert failure.value.requested_bytes == 3 * rig.page
    assert failure.value.free_bytes == 2 * rig.page
    assert failure.value.limit_bytes == rig.limit_bytes
    stats = rig.arena.stats()
    assert stats.used_bytes == 14 * rig.page
    assert stats.used_by_use == {
        "weights": 4 * rig.page,
        "ring": 6 * rig.page,
        "torch": 4 * rig.page,
    }
    ring.close()


def test_2_a_slot_is_not_written_while_its_reader_is_incomplete(make_rig: MakeRig) -> None:
    rig = make_rig(seed=7)
    source = rig.open()
    assert source.register_pages(0, rig.file_nbytes).outcome is TierOutcome.COMPLETE
    ring = ring_of(rig, num_slots=1)
    seen = []
    for step in range(8):
        ticket = ring.try_submit(unit_of(source, 100 * step, rig.page))
        seen.append(consume(rig, ring, ticket, rig.page))
    for step, readback in enumerate(seen):
        assert readback.take() == rig.contents[100 * step : 100 * step + rig.page]
    assert rig.violations() == []
    ring.close()


def test_3_pages_outlast_work_and_views(make_rig: MakeRig) -> None:
    rig = make_rig()
    memory = rig.arena.reserve(2 * rig.page)
    memory.commit()
    view = memory.export()
    seen = rig.read(memory.address, rig.page)
    memory.record_use(rig.compute.handle)
    memory.demote()
    assert memory.state is RangeState.DRAINING
    seen.take()
    rig.compute.synchronize()
    rig.arena.collect()
    assert memory.state is RangeState.DRAINING  # the view lives
    del view
    assert memory.state is RangeState.RESERVED
    assert rig.arena.stats().used_bytes == 0
    assert rig.violations() == []


def test_4_a_source_stays_registered_under_its_pending_copies(make_rig: MakeRig) -> None:
    rig = make_rig()
    source = rig.open()
    source.register_pages(0, rig.file_nbytes)
    ring = ring_of(rig)
    ticket = ring.try_submit(unit_of(source, 5, rig.page))
    source.release()
    del source
    assert consume(rig, ring, ticket, rig.page).take() == rig.contents[5 : 5 + rig.page]
    assert rig.violations() == []
    ring.close()
    assert rig.host_budget.used_bytes == 0


def test_6_a_failed_call_is_typed_and_leaves_everything_usable(make_rig: MakeRig) -> None:
    rig = make_rig()
    memory = rig.arena.reserve(rig.page)
    before = rig.arena.stats().used_bytes, native.live_objects()
    for nth in range(1, 4):
        rig.driver.inject_fault(nth, status=1)
        with pytest.raises(native.CudaError) as failure:
            memory.commit()
        assert failure.value.status_name == "CUDA_ERROR_INVALID_VALUE"
        assert failure.value.call.startswith("cu")
        assert (rig.arena.stats().used_bytes, native.live_objects()) == before
    rig.driver.inject_fault(0)
    memory.commit()
    assert memory.state is RangeState.COMMITTED


def test_6_a_refused_registration_is_a_result_and_disturbs_nothing(make_rig: MakeRig) -> None:
    rig = make_rig()
    source = rig.open()
    results = []
    for nth in range(1, 4):
        rig.driver.inject_fault(nth, status=2)
        results.append(source.register_pages(0, rig.file_nbytes))
        source.release()
    rig.driver.inject_fault(0)
    assert [result.outcome for result in results] == [TierOutcome.REFUSED] * 3
    assert {result.status_name for result in results} == {"CUDA_ERROR_OUT_OF_MEMORY"}
    ring = ring_of(rig)
    ticket = ring.try_submit(unit_of(source, 0, rig.page))  # the next tier: pageable
    assert consume(rig, ring, ticket, rig.page).take() == rig.contents[: rig.page]
    assert ring.stats().pageable_bytes == rig.page
    ring.close()


def test_7_any_order_of_destruction_is_right(make_rig: MakeRig) -> None:
    rig = make_rig()
    source = rig.open()
    source.register_pages(0, rig.file_nbytes)
    memory = rig.arena.reserve(1000)
    memory.commit()
    ring = ring_of(rig)
    ring.try_submit(unit_of(source, 0, 1000))
    view = memory.export(nbytes=10)
    del rig.arena, rig.device, source, memory
    del rig.copies, ring
    del rig, view


def test_8_hostile_sizes_are_refused(make_rig: MakeRig) -> None:
    rig = make_rig()
    source = rig.open()
    for nbytes in (0, 2**64 - 1):
        with pytest.raises(native.SizeError):
            rig.arena.reserve(nbytes)
    with pytest.raises(native.OutOfMemoryError):
        rig.arena.reserve(2**63)
    for alignment in (0, 3, 2**63):
        with pytest.raises(native.SizeError):
            rig.arena.reserve(1, alignment=alignment)
    for offset, nbytes in ((0, 0), (0, rig.file_nbytes + 1), (2**63, 2**63), (2**64 - 1, 2)):
        with pytest.raises(native.SizeError):
            source.register_pages(offset, nbytes)
        with pytest.raises(native.SizeError):
            source.load_slab(offset, nbytes)
        with pytest.raises(native.SizeError):
            native.Unit([(source, offset, nbytes, 0)])
    with pytest.raises(native.SizeError):
        native.Unit([(source, 0, 8, 2**64 - 4)])
    with pytest.raises(native.SizeError):
        native.Unit([(source, 0, 8, 0), (source, 100, 8, 7)])
    with pytest.raises(TypeError):
        rig.arena.reserve(-1)
    with pytest.raises(TypeError):
        rig.arena.reserve(2**64)
    with pytest.raises(TypeError):
        native.Unit([(None, 0, 8, 0)])  # type: ignore[list-item]
    for num_slots, slot_nbytes in ((0, 1), (1, 0), (2**20, 1), (2, 2**63), (2, 2**64 - 1)):
        with pytest.raises(native.SizeError):
            native.TransferRing(
                rig.arena,
                num_slots=num_slots,
                slot_nbytes=slot_nbytes,
                copy_stream=rig.copies.handle,
            )
    assert rig.arena.stats().used_bytes == 0


def test_8_closed_and_released_objects_say_so(make_rig: MakeRig) -> None:
    rig = make_rig()
    source = rig.open()
    ring = ring_of(rig)
    ticket = ring.try_submit(unit_of(source, 0, 10))
    assert ticket is not None
    ring.acquire(ticket, rig.compute.handle)
    with pytest.raises(native.BusyError):
        ring.close()
    with pytest.raises(native.BusyError):
        rig.arena.close()
    ring.release(ticket, rig.compute.handle)
    with pytest.raises(native.StateError):
        ring.release(ticket, rig.compute.handle)
    ring.close()
    for call in (ring.stats, ring.close):
        call()  # both stay legal
    with pytest.raises(native.StateError):
        ring.try_submit(unit_of(source, 0, 10))
    memory = rig.arena.reserve(10)
    memory.retire()
    with pytest.raises(native.StateError):
        memory.retire()
    with pytest.raises(native.StateError):
        memory.commit()
    rig.arena.close()
    rig.arena.close()
    with pytest.raises(native.StateError):
        rig.arena.reserve(10)


def test_10_after_close_device_memory_is_what_it_was(make_rig: MakeRig) -> None:
    rig = make_rig()
    free_before, _ = rig.device.memory_info()
    memory = rig.arena.reserve(3 * rig.page)
    memory.commit()
    ring = ring_of(rig)
    free_between, _ = rig.device.memory_info()
    ring.close()
    rig.arena.close()
    free_after, _ = rig.device.memory_info()
    assert free_between <= free_before - 5 * rig.page
    assert free_after == free_before


def test_12_pressure_demotes_in_order_and_tells(make_rig: MakeRig) -> None:
    rig = make_rig()
    residents = []
    for order in (1, 0):
        memory = rig.arena.reserve(8 * rig.page)
        memory.commit()
        memory.set_demotion_order(order)
        residents.append(memory)
    wanted = rig.arena.reserve(rig.page, use=DeviceUse.TORCH)
    wanted.commit()
    assert [memory.state for memory in residents] == [RangeState.COMMITTED, RangeState.RESERVED]
    (event,) = rig.arena.take_pressure_events()
    assert (event.was_met, event.demoted_range_ids) == (True, [residents[1].id])
    assert event.freed_bytes == 8 * rig.page
    assert not residents[1].acquire()
    assert rig.arena.take_pressure_events() == []


def test_a_slot_reports_its_states(make_rig: MakeRig) -> None:
    rig = make_rig()
    source = rig.open()
    source.register_pages(0, rig.file_nbytes)
    ring = ring_of(rig, num_slots=1)
    assert ring.state(0) is SlotState.FREE
    ticket = ring.try_submit(unit_of(source, 0, rig.page))
    assert ticket is not None
    assert ring.try_submit(unit_of(source, 0, rig.page)) is None
    rig.copies.synchronize()
    assert ring.state(0) is SlotState.READY
    ring.acquire(ticket, rig.compute.handle)
    assert ring.state(0) is SlotState.IN_USE
    ring.release(ticket, rig.compute.handle)
    rig.compute.synchronize()
    assert ring.state(0) is SlotState.FREE
    assert ring.is_current(ticket)
    ring.close()


@pytest.mark.parametrize("prefers_direct", [False, True])
def test_unpinned_bytes_come_through_reader_threads(
    make_rig: MakeRig, prefers_direct: bool
) -> None:
    rig = make_rig(seed=3)
    source = rig.open()
    staging = native.StagingRing(
        rig.device,
        rig.host_budget,
        num_buffers=3,
        buffer_bytes=rig.page // 4,
        num_threads=2,
        prefers_direct=prefers_direct,
    )
    ring = ring_of(rig, staging=staging)
    source.load_slab(rig.page, 5000)
    for step in range(4):
        offset = 77 + step * rig.page // 2
        ticket = ring.try_submit(unit_of(source, offset, rig.page))
        seen = consume(rig, ring, ticket, rig.page).take()
        assert seen == rig.contents[offset : offset + rig.page]
    stats = ring.stats()
    assert 0 < stats.staged_bytes < stats.copied_bytes
    assert rig.violations() == []
    ring.close()


def staging_of(rig: DeviceRig) -> native.StagingRing:
    return native.StagingRing(
        rig.device, rig.host_budget, num_buffers=3, buffer_bytes=rig.page // 4, num_threads=2
    )


def fill(
    rig: DeviceRig, batch: native.StagedBatch, after: native.EventFence | None = None
) -> native.EventFence:
    """Submit, wait for the reader threads, and let the consumer's stream wait for the copies."""
    ready = native.EventFence(rig.device)
    transfer = batch.submit(rig.copies.handle, [after] if after else [], ready)
    assert transfer.wait(30)
    ready.block_stream(rig.compute.handle)
    return ready


@pytest.mark.parametrize("seed", range(4))
def test_a_batch_takes_each_part_its_own_way(make_rig: MakeRig, seed: int) -> None:
    """Pinned memory at once; files and pageable memory through the reader threads."""
    rig = make_rig(seed=seed)
    staging = staging_of(rig)
    memory = rig.arena.reserve(3 * rig.page)
    memory.commit()
    own = np.frombuffer(os.urandom(2 * rig.page), dtype=np.uint8)
    begin = -own.ctypes.data % 4096
    pinned = own[begin : begin + rig.page // 4096 * 4096 - 4096]
    pages = native.HostPages(rig.device, pinned.ctypes.data, pinned.size, is_read_only=False)
    pageable = np.frombuffer(os.urandom(rig.page), dtype=np.uint8)
    batch = native.StagedBatch(
        staging,
        [(pinned.ctypes.data, 1000, memory.address)],
        [(native.FileMapping(str(rig.path)), 77, rig.page, memory.address + 1000)],
        [(pageable.ctypes.data, rig.page, memory.address + 1000 + rig.page)],
    )
    assert (batch.nbytes, batch.staged_nbytes) == (1000 + 2 * rig.page, 2 * rig.page)
    expected = bytes(pinned[:1000]) + rig.contents[77 : 77 + rig.page] + bytes(pageable)
    read = native.EventFence(rig.device)
    for _ in range(3):
        fill(rig, batch, after=read)
        assert memory.acquire()
        seen = rig.read(memory.address, batch.nbytes)
        memory.release(rig.compute.handle)
        read.record(rig.compute.handle)
        assert seen.take() == expected
    assert rig.violations() == []
    rig.copies.synchronize()
    del pages


@pytest.mark.parametrize("change", ["cut", "written"])
def test_a_file_that_changes_under_a_batch_is_named_with_the_offset(
    make_rig: MakeRig, tmp_path: Path, change: str
) -> None:
    rig = make_rig()
    staging = staging_of(rig)
    memory = rig.arena.reserve(rig.page)
    memory.commit()
    path = tmp_path / "changing"
    path.write_bytes(rig.contents)
    offset = 2 * rig.page + 4096
    # One buffer holds it: of several, whichever thread fails first is heard.
    batch = native.StagedBatch(
        staging, [], [(native.FileMapping(str(path)), offset, 4096, memory.address)], []
    )
    fill(rig, batch)
    at = offset
    if change == "cut":
        at += 100
        os.truncate(path, at)
    else:
        path.write_bytes(rig.contents[::-1])
        os.utime(path, ns=(1, 1))
    transfer = batch.submit(rig.copies.handle, [], native.EventFence(rig.device))
    with pytest.raises(native.FileChangedError, match=rf"byte {at}.*changing"):
        transfer.wait(30)
    assert transfer.is_complete
    whole = native.StagedBatch(
        staging, [], [(native.FileMapping(str(rig.path)), 0, rig.page, memory.address)], []
    )
    fill(rig, whole)
    assert memory.acquire()
    seen = rig.read(memory.address, rig.page)
    memory.release(rig.compute.handle)
    assert seen.take() == rig.contents[: rig.page]


def test_8_impossible_staged_copies_are_refused(make_rig: MakeRig) -> None:
    rig = make_rig()
    staging = staging_of(rig)
    file = native.FileMapping(str(rig.path))
    for direct, from_files, from_memory, message in [
        ([], [], [], "0 staged copies"),
        ([(4096, 0, 4096)], [(file, 0, 1, 4096)], [], "a copy of 0 bytes"),
        ([], [(file, rig.file_nbytes, 1, 4096)], [], "ends at byte"),
        ([], [(file, 2**64 - 1, 1, 4096)], [], "overflow|too large|wraps"),
        ([], [], [(4096, 2**64 - 1, 4096)], "overflow|too large|wraps"),
    ]:
        with pytest.raises(native.SizeError, match=message):
            native.StagedBatch(staging, direct, from_files, from_memory)


def test_a_resident_is_uploaded_demoted_and_filled_again(make_rig: MakeRig) -> None:
    rig = make_rig()
    source = rig.open()
    source.register_pages(0, rig.file_nbytes, window_bytes=rig.page)
    memory = rig.arena.reserve(3 * rig.page)
    for offset in (0, 99):
        memory.commit()
        done = native.upload(memory, unit_of(source, offset, 3 * rig.page), rig.copies.handle)
        done.block_stream(rig.compute.handle)
        assert memory.acquire()
        seen = rig.read(memory.address, 3 * rig.page)
        memory.release(rig.compute.handle)
        memory.demote()
        assert seen.take() == rig.contents[offset : offset + 3 * rig.page]
        rig.compute.synchronize()
        rig.arena.collect()
        assert memory.state is RangeState.RESERVED
    assert rig.violations() == []


def test_a_file_that_changed_is_refused(make_rig: MakeRig, tmp_path: Path) -> None:
    rig = make_rig()
    source = rig.open()
    mapping = native.FileMapping(str(rig.path))
    status = rig.path.stat()
    assert mapping.identity[1:3] == (status.st_ino, status.st_size)
    replacement = tmp_path / "other"
    replacement.write_bytes(b"x" * rig.file_nbytes)
    os.replace(replacement, rig.path)  # noqa: PTH105 - the name of what is meant
    with pytest.raises(native.FileChangedError):
        mapping.verify()
    with pytest.raises(native.FileChangedError):
        source.register_pages(0, 10)
    with pytest.raises(native.FileChangedError):
        source.load_slab(0, 10)
    with pytest.raises(native.FileAccessError) as failure:
        native.FileMapping(str(tmp_path / "missing"))
    assert failure.value.errno == 2
    (tmp_path / "empty").touch()
    with pytest.raises(native.SizeError):
        native.FileMapping(str(tmp_path / "empty"))


def test_copies_and_stalls_are_measured(make_rig: MakeRig) -> None:
    rig = make_rig()
    source = rig.open()
    source.register_pages(0, rig.file_nbytes)
    ring = ring_of(rig, timing_interval=1)
    for _ in range(5):
        consume(rig, ring, ring.try_submit(unit_of(source, 0, rig.page)), 1).take()
    rig.device.synchronize()
    stats = ring.stats()
    assert stats.num_units == stats.copies.num_measured == stats.stalls.num_measured == 5
    assert stats.copies.nbytes == stats.copied_bytes == 5 * rig.page
    assert stats.copies.milliseconds > 0
    ring.close()
