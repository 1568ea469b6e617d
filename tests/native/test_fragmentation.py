"""Freed memory serves any later request, whatever sizes it was freed in."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from random import Random

import pytest

import native
from tests.support.fake_driver import DeviceRig

MakeRig = Callable[..., DeviceRig]

NUM_PAGES = 128


@pytest.fixture
def rig(make_rig: MakeRig) -> Iterator[DeviceRig]:
    page = make_rig().page
    rig = make_rig(limit_bytes=NUM_PAGES * page)
    yield rig
    vars(rig).clear()  # pytest keeps the fixture's value for longer than the test


def committed(rig: DeviceRig, nbytes: int) -> native.Range:
    memory = rig.arena.reserve(nbytes)
    memory.commit()
    return memory


def test_half_of_what_scattered_blocks_gave_back_can_be_one_block(rig: DeviceRig) -> None:
    sizes = [(1, 2, 4, 8, 16)[n % 5] for n in range(20)]
    blocks = [committed(rig, pages * rig.page) for pages in sizes]
    rest = committed(rig, (NUM_PAGES - sum(sizes)) * rig.page)
    for block in blocks[::2]:
        block.retire()
    freed = sum(sizes[::2])
    with pytest.raises(native.OutOfMemoryError) as failure:
        committed(rig, (freed + 1) * rig.page)
    assert failure.value.requested_bytes == (freed + 1) * rig.page
    assert failure.value.free_bytes == freed * rig.page
    assert failure.value.limit_bytes == NUM_PAGES * rig.page
    half = committed(rig, freed // 2 * rig.page)
    whole = committed(rig, (freed - freed // 2) * rig.page)
    assert rig.arena.stats().used_bytes == NUM_PAGES * rig.page
    del half, whole, rest


def test_a_growing_request_holds_no_more_than_its_largest(rig: DeviceRig) -> None:
    free_before, _ = rig.device.memory_info()
    largest = 0
    for pages in range(40, NUM_PAGES + 1):
        memory = committed(rig, pages * rig.page)
        free_now, _ = rig.device.memory_info()
        largest = max(largest, free_before - free_now)
        memory.retire()
    assert rig.arena.stats().peak_bytes == NUM_PAGES * rig.page
    assert largest <= 1.2 * NUM_PAGES * rig.page


def test_random_sizes_fail_only_when_the_limit_has_not_enough_left(rig: DeviceRig) -> None:
    random, held = Random(4), deque[native.Range]()
    num_refused = 0
    for _ in range(2000):
        nbytes = random.randint(1, 48 * rig.page)
        need = -(-nbytes // rig.page) * rig.page
        try:
            held.append(committed(rig, nbytes))
        except native.OutOfMemoryError as error:
            num_refused += 1
            assert need > error.free_bytes
            held.rotate(random.randrange(len(held)))
            held.popleft()
    assert num_refused > 100
    held.clear()
    assert rig.arena.stats().used_bytes == 0
    assert rig.violations() == []
