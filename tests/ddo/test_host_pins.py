from __future__ import annotations

import pytest
import torch

from ddo.host_pins import PAGE, HostPins


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
    return torch.arange(40 * PAGE, dtype=torch.int64).to(torch.uint8)


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


def test_what_is_pinned_already_is_not_registered_twice(memory):
    registrar = FakeRegistrar()
    pins = HostPins(registrar, 1 << 30)
    pins.pin([memory[8 * PAGE : 9 * PAGE], memory[20 * PAGE : 21 * PAGE]])
    pins.pin([memory[PAGE : 30 * PAGE]])
    assert pins.counters.num_refused == 0
    sources = pins.sources(memory[PAGE : 30 * PAGE])
    assert all(registrar.covers(source) for source in sources)
    assert torch.equal(torch.cat(sources), memory[PAGE : 30 * PAGE])


def test_the_budget_is_kept_and_the_rest_stays_pageable(memory):
    registrar = FakeRegistrar()
    pins = HostPins(registrar, 10 * PAGE)
    pins.pin([memory[: 32 * PAGE]])
    assert pins.counters.registered_bytes <= 10 * PAGE
    assert pins.counters.pageable_bytes >= 22 * PAGE
    sources = pins.sources(memory[: 32 * PAGE])
    assert torch.equal(torch.cat(sources), memory[: 32 * PAGE])
    assert [registrar.covers(source) for source in sources].count(True) == 1


@pytest.mark.parametrize("refuse", [(0, 1), (0, 1, 3)])
def test_refused_pages_go_to_slabs_of_their_size_and_the_error_is_consumed(memory, refuse):
    registrar = FakeRegistrar(refuse=refuse)
    pins = HostPins(registrar, 1 << 30)
    parts = [memory[: 3 * PAGE + 5], memory[20 * PAGE : 21 * PAGE]]
    pins.pin(parts)
    for part in parts:
        assert torch.equal(torch.cat(pins.sources(part)), part)
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
    assert torch.equal(pins.sources(part[100:200])[0], memory[100:200])
    assert pins.sources(part[100:200])[0].data_ptr() != memory[100:].data_ptr()


def test_empty_memory_needs_nothing():
    registrar = FakeRegistrar()
    HostPins(registrar, 1).pin([torch.empty(0, dtype=torch.uint8)])
    assert registrar.num_calls == 0
