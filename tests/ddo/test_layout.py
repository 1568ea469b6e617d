from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ddo.layout import ALIGNMENT, Piece, lay_out_block, lay_out_ring

pieces = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 4), st.integers(0, 600)), max_size=12
).map(
    lambda drawn: [
        Piece(key, 1000 * gap + 700 * i, nbytes) for i, (key, gap, nbytes) in enumerate(drawn)
    ]
)


@given(pieces)
def test_copies_bring_every_byte_of_every_piece_to_its_aligned_place(given_pieces):
    layout = lay_out_block(given_pieces)
    target = {}
    for copy in layout.copies:
        for k in range(copy.nbytes):
            assert target.setdefault(copy.target_offset + k, (copy.key, copy.offset + k)) == (
                copy.key,
                copy.offset + k,
            ), "two copies write one byte"
    for piece, offset in zip(given_pieces, layout.offsets, strict=True):
        assert offset % ALIGNMENT == 0
        assert offset + piece.nbytes <= layout.nbytes
        for k in range(piece.nbytes):
            assert target[offset + k] == (piece.key, piece.offset + k)


def test_neighbours_in_a_file_are_one_copy_when_both_stay_aligned():
    layout = lay_out_block([Piece(0, 768, 100), Piece(0, 0, 512), Piece(0, 512, 256)])
    assert layout.offsets == (768, 0, 512)
    assert [(c.offset, c.nbytes) for c in layout.copies] == [(0, 868)]


def test_a_neighbour_that_would_lose_its_alignment_is_a_copy_of_its_own():
    layout = lay_out_block([Piece(0, 0, 100), Piece(0, 100, 256)])
    assert layout.offsets == (0, 256)
    assert len(layout.copies) == 2


@given(st.lists(st.integers(1, 9), min_size=1, max_size=14), st.integers(1, 40))
def test_laps_fill_the_ring_in_order_and_none_is_longer_than_the_fewest_laps_need(sizes, capacity):
    layout = lay_out_ring(sizes, capacity)
    if max(sizes) > capacity:
        assert layout is None
        return
    assert sum(layout.laps) == len(sizes)
    assert layout.nbytes <= capacity
    position = 0
    ends = []
    for count in layout.laps:
        lap = range(position, position + count)
        assert [layout.offsets[i] for i in lap] == [
            sum(sizes[j] for j in range(position, i)) for i in lap
        ]
        ends.append(sum(sizes[i] for i in lap))
        position += count
    assert layout.nbytes == max(ends)
    shorter = lay_out_ring(sizes, layout.nbytes - 1)
    assert shorter is None or len(shorter.laps) > len(layout.laps)
