from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddo.layout import lay_out_ring
from ddo.simulate import Use, predecessors, simulate


def longest_path_step(uses, num_steps=40):
    """The same rhythm from its definition alone: every byte of every earlier use is waited for."""
    moving = [
        i
        for i, a in enumerate(uses)
        if any(a.begin < b.end and b.begin < a.end for j, b in enumerate(uses) if j != i)
    ]
    done_uses, ends = [], []
    copy_end = clock = 0.0
    for _ in range(num_steps):
        for i, use in enumerate(uses):
            if i in moving:
                begin = copy_end
                for j, end in done_uses:
                    if uses[j].begin < use.end and use.begin < uses[j].end:
                        begin = max(begin, end)
                copy_end = begin + use.copy_s
                clock = max(clock, copy_end)
            clock += use.compute_s
            done_uses.append((i, clock))
        ends.append(clock)
    # A max-plus rhythm may have a period of several steps: average over a common multiple.
    return (ends[-1] - ends[-13]) / 12


blocks = st.lists(
    st.tuples(st.integers(1, 9), st.integers(1, 9), st.booleans()), min_size=1, max_size=8
)


@settings(max_examples=60, deadline=None)
@given(blocks, st.integers(1, 30))
def test_the_rhythm_is_the_longest_path_through_all_orderings(drawn, capacity):
    sizes = [size for size, _, streams in drawn if streams]
    ring = lay_out_ring(sizes, max(capacity, max(sizes, default=0)))
    offsets = iter(ring.offsets)
    uses = []
    for size, compute, streams in drawn:
        begin = next(offsets) if streams else 0
        uses.append(
            Use(compute, size * 1.0, begin, begin + size) if streams else Use(float(compute))
        )
    assert simulate(uses).step_s == pytest.approx(longest_path_step(uses), rel=0.02)


def test_two_blocks_that_share_a_place_never_overlap_copy_and_computation():
    uses = [Use(2.0, 3.0, 0, 10), Use(2.0, 3.0, 0, 10)]
    timeline = simulate(uses)
    assert timeline.step_s == pytest.approx(10.0)
    assert timeline.stalls_s == pytest.approx((3.0, 3.0))


def test_with_room_for_two_the_slower_of_link_and_computation_decides():
    copies_decide = [Use(2.0, 3.0, 10 * (i % 2), 10 * (i % 2) + 10) for i in range(4)]
    computation_decides = [Use(3.0, 2.0, 10 * (i % 2), 10 * (i % 2) + 10) for i in range(4)]
    assert simulate(copies_decide).step_s == pytest.approx(4 * 3.0 + 2 * 2.0 - 4.0, abs=2.1)
    assert simulate(computation_decides).step_s == pytest.approx(4 * 3.0)


def test_copies_run_across_the_step_boundary():
    """Three streamed blocks at the start of a step are copied while the step before ends."""
    uses = [Use(1.0, 2.0, 0, 10), Use(1.0, 2.0, 10, 20), Use(1.0, 2.0, 0, 10), *[Use(1.0)] * 5]
    timeline = simulate(uses)
    assert timeline.stalls_s[0] == 0
    assert timeline.stalls_s[1] == 0


@pytest.mark.parametrize(("tail_s", "num_ahead"), [(2.0, 1), (0.6, 1), (0.4, 0)])
def test_a_copy_that_a_steps_end_finds_half_done_counts_as_done_ahead(tail_s, num_ahead):
    uses = [Use(1.0, 1.0, 0, 10), Use(1.0, 1.0, 0, 10), Use(tail_s)]
    assert simulate(uses).num_ahead == num_ahead


def test_without_copies_everything_is_there_ahead():
    assert simulate([Use(1.0, 5.0, 0, 10), Use(1.0, 5.0, 10, 20), Use(1.0)]).num_ahead == 2


def test_a_block_whose_place_nobody_else_takes_is_copied_once():
    timeline = simulate([Use(1.0, 5.0, 0, 10), Use(1.0, 5.0, 10, 20)])
    assert timeline.copied == (False, False)
    assert timeline.step_s == pytest.approx(2.0)


def test_predecessors_are_the_latest_uses_that_cover_a_place():
    waits = predecessors([(0, 4), (4, 8), (0, 8), (0, 0)])
    assert waits[0] == ((2, True),)
    assert waits[2] == ((1, False), (0, False))
    assert waits[3] == ()
