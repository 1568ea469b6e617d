from __future__ import annotations

import ctypes
import mmap

import pytest
import torch

from ddo.host_pins import PAGE, HostPins
from ddo.host_sources import map_shared
from ddo.registrars import NOT_SUPPORTED, DriverRegistrar
from ddo.weight_files import FileIdentity


def sources_of(pins, memory):
    """Where a tensor's bytes are copied from, in order."""
    return [piece.memory for piece in pins.pieces(memory)]


class FakeRegistrar:
    """A driver that refuses what real ones refuse: unaligned pages and pages known already."""

    def __init__(self, *, read_only=True, refuse=()):
        self.read_only = read_only
        self.refuse = set(refuse)
        self.pages = {}
        self.num_calls = 0

    def register(self, address, nbytes, *, is_read_only):
        self.num_calls += 1
        assert address % PAGE == 0
        assert nbytes % PAGE == 0
        if is_read_only and not self.read_only:
            return 801
        if self.num_calls - 1 in self.refuse:
            return 2
        if any(a < address + nbytes and address < a + n for a, n in self.pages.items()):
            return 712
        self.pages[address] = nbytes
        return 0

    def unregister(self, address):
        del self.pages[address]
        return 0

    def covers(self, memory):
        begin, end = memory.data_ptr(), memory.data_ptr() + memory.numel()
        return any(a <= begin and end <= a + n for a, n in self.pages.items())


@pytest.fixture
def memory():
    """Whole pages of its own."""
    memory = torch.frombuffer(mmap.mmap(-1, 40 * PAGE), dtype=torch.uint8)
    return memory.copy_(torch.arange(40 * PAGE, dtype=torch.int64))


def test_neighbours_are_registered_at_once_and_given_back(memory):
    registrar = FakeRegistrar()
    pins = HostPins(registrar, 1 << 30)
    parts = [memory[5:700], memory[700 : 3 * PAGE], memory[4 * PAGE : 5 * PAGE]]
    pins.pin(parts)
    assert len(registrar.pages) == 1
    assert all(registrar.covers(part) for part in parts)
    assert pins.counters.pageable_bytes == 0
    pins.close()
    assert registrar.pages == {}


def test_pages_on_which_others_have_bytes_are_not_registered(memory):
    """A copy of what lies half in a registration fails, and on the heap it may be anybody's."""
    registrar = FakeRegistrar()
    pins = HostPins(registrar, 1 << 30)
    begin = memory.data_ptr()
    buffer = (ctypes.c_uint8 * (3 * PAGE)).from_address(begin + PAGE // 2)
    own = torch.frombuffer(buffer, dtype=torch.uint8)  # a tensor with neighbours on its pages
    pins.pin([own])
    slabs = {s.data_ptr() for s in sources_of(pins, own) if not _is_inside(s, memory)}
    assert {a - begin for a in registrar.pages if a not in slabs} == {PAGE}
    assert registrar.pages[begin + PAGE] == 2 * PAGE
    sources = sources_of(pins, own)
    assert all(registrar.covers(source) for source in sources)
    assert torch.equal(torch.cat(sources), own)
    assert pins.counters.pageable_bytes == 0
    own.fill_(7)
    pins.pin([own])
    assert torch.equal(torch.cat(sources_of(pins, own)), own)
    pins.close()
    assert registrar.pages == {}


def _is_inside(part, memory):
    return memory.data_ptr() <= part.data_ptr() < memory.data_ptr() + memory.numel()


def test_what_is_pinned_already_is_not_registered_twice(memory):
    registrar = FakeRegistrar()
    pins = HostPins(registrar, 1 << 30)
    pins.pin([memory[8 * PAGE : 9 * PAGE], memory[20 * PAGE : 21 * PAGE]])
    pins.pin([memory[PAGE : 30 * PAGE]])
    assert pins.counters.num_refused == 0
    sources = sources_of(pins, memory[PAGE : 30 * PAGE])
    assert all(registrar.covers(source) for source in sources)
    assert torch.equal(torch.cat(sources), memory[PAGE : 30 * PAGE])


def test_the_budget_is_kept_and_the_rest_stays_pageable(memory):
    registrar = FakeRegistrar()
    pins = HostPins(registrar, 10 * PAGE)
    pins.pin([memory[: 32 * PAGE]])
    assert pins.counters.registered_bytes <= 10 * PAGE
    assert pins.counters.pageable_bytes >= 22 * PAGE
    sources = sources_of(pins, memory[: 32 * PAGE])
    assert torch.equal(torch.cat(sources), memory[: 32 * PAGE])
    assert [registrar.covers(source) for source in sources].count(True) == 1


@pytest.mark.parametrize("refuse", [(0, 1), (0, 1, 3)])
def test_refused_pages_go_to_slabs_of_their_size_and_the_error_is_consumed(memory, refuse):
    registrar = FakeRegistrar(refuse=refuse)
    pins = HostPins(registrar, 1 << 30)
    parts = [memory[: 3 * PAGE + 5], memory[20 * PAGE : 21 * PAGE]]
    pins.pin(parts)
    for part in parts:
        assert torch.equal(torch.cat(sources_of(pins, part)), part)
    assert pins.counters.num_refused == len(refuse)
    assert pins.counters.slab_bytes in (5 * PAGE, 4 * PAGE, PAGE)
    pins.pin(parts)
    pins.close()
    assert registrar.pages == {}


def test_without_read_only_registration_plain_registration_is_tried(memory):
    pins = HostPins(FakeRegistrar(read_only=False), 1 << 30)
    pins.pin([memory[:PAGE]])
    assert pins.counters.registered_bytes >= PAGE
    assert pins.counters.num_refused == 1


def test_a_part_of_a_slab_is_found(memory):
    pins = HostPins(FakeRegistrar(refuse=(0, 1)), 1 << 30)
    part = memory[: 3 * PAGE]
    pins.pin([part])
    assert torch.equal(sources_of(pins, part[100:200])[0], memory[100:200])
    assert sources_of(pins, part[100:200])[0].data_ptr() != memory[100:].data_ptr()


def test_empty_memory_needs_nothing():
    registrar = FakeRegistrar()
    HostPins(registrar, 1).pin([torch.empty(0, dtype=torch.uint8)])
    assert registrar.num_calls == 0


class FakeLibrary:
    """The driver's entry points; every registration succeeds."""

    def __init__(self):
        self.registered = []

    def cuMemHostRegister_v2(self, address, nbytes, flags):  # noqa: N802 - the driver's name
        self.registered.append((address.value, nbytes.value, flags.value))
        return 0

    def cuMemHostUnregister(self, address):  # noqa: N802 - the driver's name
        return 0


def private_file(path, num_pages=4):
    path.write_bytes(bytes(range(256)) * (num_pages * PAGE // 256))
    with path.open("rb") as file:
        return torch.frombuffer(
            mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE), dtype=torch.uint8
        )


@pytest.mark.parametrize("is_read_only", [True, False])
def test_a_private_mapping_of_a_file_is_refused_without_asking_the_driver(tmp_path, is_read_only):
    """A small one, registered read-only, was seen never to come back from the driver."""
    library = FakeLibrary()
    memory = private_file(tmp_path / "private")
    status = DriverRegistrar(library).register(
        memory.data_ptr() + PAGE, 2 * PAGE, is_read_only=is_read_only
    )
    assert status == NOT_SUPPORTED
    assert library.registered == []


def test_shared_mappings_and_anonymous_memory_are_registered(tmp_path):
    library = FakeLibrary()
    registrar = DriverRegistrar(library)
    (tmp_path / "shared").write_bytes(bytes(4 * PAGE))
    shared = map_shared(tmp_path / "shared", FileIdentity.of(tmp_path / "shared"))
    assert registrar.register(shared.data_ptr(), 4 * PAGE, is_read_only=True) == 0
    anonymous = torch.frombuffer(mmap.mmap(-1, 2 * PAGE), dtype=torch.uint8)
    assert registrar.register(anonymous.data_ptr(), 2 * PAGE, is_read_only=False) == 0
    assert library.registered == [
        (shared.data_ptr(), 4 * PAGE, 0x08),
        (anonymous.data_ptr(), 2 * PAGE, 0),
    ]


def test_a_range_with_one_page_of_a_private_file_is_refused(tmp_path):
    """The page lies in the middle of anonymous memory."""
    library = FakeLibrary()
    around = torch.frombuffer(mmap.mmap(-1, 4 * PAGE), dtype=torch.uint8)
    (tmp_path / "private").write_bytes(bytes(PAGE))
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    with (tmp_path / "private").open("rb") as file:
        fixed = 0x10
        placed = libc.mmap(
            ctypes.c_void_p(around.data_ptr() + 2 * PAGE),
            ctypes.c_size_t(PAGE),
            mmap.PROT_READ,
            mmap.MAP_PRIVATE | fixed,
            file.fileno(),
            ctypes.c_long(0),
        )
    assert placed == around.data_ptr() + 2 * PAGE
    registrar = DriverRegistrar(library)
    address = around.data_ptr()
    assert registrar.register(address, 4 * PAGE, is_read_only=False) == NOT_SUPPORTED
    assert registrar.register(address, 2 * PAGE, is_read_only=False) == 0


def test_the_next_tier_serves_a_private_mapping(tmp_path):
    memory = private_file(tmp_path / "private")
    pins = HostPins(DriverRegistrar(FakeLibrary()), 1 << 30)
    pins.pin([memory])
    assert pins.counters.slab_bytes == memory.numel()
    assert pins.counters.last_status == NOT_SUPPORTED
    assert torch.equal(torch.cat(sources_of(pins, memory)), memory)
    pins.close()
