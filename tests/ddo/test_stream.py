"""Residents from one plan to the next: what stays moves on the device, not from the host."""

from __future__ import annotations

import pytest
import torch

from ddo.blocks import take_inventory
from ddo.metrics import Metrics
from ddo.planning import BlockPlan, OffloadPlan
from ddo.stream import Streamer
from tests.ddo.fake_backend import FakeBackend

NUM_BLOCKS = 8
NBYTES = 32 * 32 * 4


@pytest.fixture
def layers():
    torch.manual_seed(0)
    layers = torch.nn.ModuleList(
        torch.nn.Linear(32, 32, bias=False).requires_grad_(False) for _ in range(NUM_BLOCKS)
    )
    return layers.eval()


def plan_of(blocks, resident):
    """The others stream through a ring of one place."""
    return OffloadPlan(
        mode="stream",
        blocks=tuple(
            BlockPlan(
                name=block.name,
                nbytes=block.nbytes,
                placement="device" if i in resident else "ring",
                ring_offset=None if i in resident else 0,
            )
            for i, block in enumerate(blocks)
        ),
        ring_bytes=NBYTES,
    )


def streamer_of(layers, backend):
    metrics = Metrics(backend=backend)
    blocks = take_inventory(layers, backend.device).blocks
    assert [block.nbytes for block in blocks] == [NBYTES] * NUM_BLOCKS
    return blocks, Streamer(backend, blocks, metrics), metrics


@pytest.mark.parametrize(
    ("then", "num_uploaded"),
    [({0, 2, 4, 6}, 1), ({0, 1, 2, 3, 4, 5}, 0), ({1}, 0), ({6, 7}, 2), (set(), 0)],
)
def test_only_new_residents_come_from_the_host(layers, then, num_uploaded):
    weights = [layer.weight.clone() for layer in layers]
    backend = FakeBackend(1)
    blocks, streamer, metrics = streamer_of(layers, backend)
    order = list(range(NUM_BLOCKS))
    streamer.apply(plan_of(blocks, range(6)), order)
    assert metrics.uploaded_bytes == 6 * NBYTES
    streamer.apply(plan_of(blocks, then), order)
    assert metrics.uploaded_bytes == (6 + num_uploaded) * NBYTES
    with backend.reading():
        for number in then:
            assert torch.equal(layers[number].weight, weights[number])
    assert backend.allocated_bytes() == (len(then) + 1) * NBYTES
    streamer.clear()
    assert backend.allocated_bytes() == 0
    assert all(torch.equal(a.weight, b) for a, b in zip(layers, weights, strict=True))


def test_residents_come_from_the_host_again_where_the_device_has_no_room_to_move_them(layers):
    weights = [layer.weight.clone() for layer in layers]
    backend = FakeBackend(1, limit_bytes=7 * NBYTES)
    blocks, streamer, metrics = streamer_of(layers, backend)
    order = list(range(NUM_BLOCKS))
    streamer.apply(plan_of(blocks, range(6)), order)
    streamer.apply(plan_of(blocks, {0, 1, 2, 3, 4, 6}), order)
    assert metrics.uploaded_bytes == 12 * NBYTES
    with backend.reading():
        assert all(torch.equal(layers[n].weight, weights[n]) for n in (0, 1, 2, 3, 4, 6))
    streamer.clear()
