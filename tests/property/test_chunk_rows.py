"""Chunks as they are drawn: rows never overlap, nothing is lost but what is counted."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from paceline.report.chunks import Piece, pack_rows, thin_pieces
from paceline.report.workers import build_lanes

moments = st.integers(0, 40).map(float) | st.floats(0, 40)
spans = st.lists(st.tuples(moments, moments).map(lambda pair: (min(pair), max(pair))), max_size=40)


@st.composite
def pieces(draw: st.DrawFn) -> list[Piece]:
    """Responses that run on one worker after another."""
    made = []
    for group in range(draw(st.integers(1, 3))):
        for sample in range(draw(st.integers(1, 4))):
            now_s = draw(st.integers(0, 5)) / 10
            for _ in range(draw(st.integers(1, 8))):
                start_s = now_s + draw(st.sampled_from([0.0, 0.0, 0.001, 1.0]))
                now_s = start_s + draw(st.integers(0, 10)) / 10
                worker = draw(st.sampled_from(["w0", "w1"]))
                was_lost = draw(st.booleans()) and draw(st.booleans())
                made.append(Piece(start_s, now_s, worker, group, sample, 3, was_lost=was_lost))
    return made


@given(spans)
def test_a_row_holds_one_span_at_a_time_and_no_row_is_spare(spans: list[tuple[float, float]]) -> None:
    rows = pack_rows(spans)
    by_row = defaultdict(list)
    for row, span in zip(rows, spans, strict=True):
        by_row[row].append(span)
    for own in by_row.values():
        own.sort()
        assert all(before[1] <= after[0] for before, after in pairwise(own))
    assert sorted(by_row) == list(range(len(by_row)))
    solid = [span for span in spans if span[0] < span[1]]
    most = max((sum(start <= at < end for start, end in solid) for at, _ in solid), default=0)
    if len(solid) == len(spans):
        assert len(by_row) == most


@given(pieces(), st.integers(1, 60))
def test_thinning_keeps_times_tokens_and_the_longest(pieces: list[Piece], most: int) -> None:
    kept = thin_pieces(pieces, most)
    assert len(kept) <= most
    assert kept == sorted(kept, key=lambda piece: (piece.start_s, piece.group, piece.sample))
    if len(pieces) <= most:
        assert sorted(map(hash, kept)) == sorted(map(hash, pieces))
        return
    joined = thin_pieces(pieces, len(pieces) - 1) if len(pieces) > 1 else pieces
    if len(joined) < len(pieces) - 1:  # neighbours were joined, and that was enough
        assert sum(piece.num_chunks for piece in joined) == len(pieces)
        assert sum(piece.tokens for piece in joined) == sum(piece.tokens for piece in pieces)
        assert sum(piece.was_lost for piece in joined) == sum(piece.was_lost for piece in pieces)
    left_out = [piece for piece in joined if piece not in kept]
    assert not left_out or len(kept) == most
    if not left_out:
        return
    late_from_s = sorted((piece.end_s for piece in kept), reverse=True)[most // 4 - 1] if most >= 4 else 1e9
    early = [piece for piece in kept if piece.end_s < late_from_s]
    for piece in left_out:
        assert piece.end_s <= late_from_s
        assert all(piece.end_s - piece.start_s <= other.end_s - other.start_s + 1e-9 for other in early)


@given(pieces())
def test_every_chunk_is_in_its_workers_lane(pieces: list[Piece]) -> None:
    lanes = {lane.name: lane for lane in build_lanes(pieces, {})}
    for worker, lane in lanes.items():
        drawn = sorted((one.start_s, one.end_s) for row in lane.rows for one in row)
        assert drawn == sorted((p.start_s, p.end_s) for p in pieces if p.worker == worker)
        for row in lane.rows:
            own = sorted((one.start_s, one.end_s) for one in row)
            assert all(before[1] <= after[0] for before, after in pairwise(own))
    assert set(lanes) == {piece.worker for piece in pieces}
