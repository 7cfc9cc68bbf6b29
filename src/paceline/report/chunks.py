"""The chunks of a rollout as they are drawn: joined, thinned and packed into rows. Pure; called by history, page and
trace.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from paceline.record import ChunkDone

JOIN_SHARE = 0.002
"""Chunks of a response with less than this share of the rollout between them look like one."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Chunks of one response that followed one another on one worker; mostly a single one."""

    start_s: float
    end_s: float
    worker: str
    group: int
    sample: int
    tokens: int
    """Tokens that the response gained."""
    num_chunks: int = 1
    was_lost: bool = False
    """With its worker."""

    @classmethod
    def of(cls, chunk: ChunkDone, begin_s: float) -> Piece:
        """A chunk, its times counted from `begin_s`."""
        return cls(
            start_s=max(chunk.t_start_s - begin_s, 0.0),
            end_s=max(chunk.t_end_s - begin_s, 0.0),
            worker=chunk.worker,
            group=chunk.group,
            sample=chunk.sample,
            tokens=chunk.tokens,
            was_lost=chunk.finish_reason == "lost",
        )

    @property
    def response(self) -> tuple[int, int]:
        """Group and sample."""
        return self.group, self.sample


def thin_pieces(pieces: Sequence[Piece], most: int) -> list[Piece]:
    """At most `most` pieces, by their start; all of them if they are no more.

    Else neighbours are joined. If that is not enough, a quarter of what stays is what ended last, so that the tail is
    whole, and the others are what lasted longest (ties: what began first).
    """
    if len(pieces) <= most:
        return sorted(pieces, key=_by_start)
    span_s = max(piece.end_s for piece in pieces) - min(piece.start_s for piece in pieces)
    joined = _join(pieces, JOIN_SHARE * span_s)
    last = sorted(joined, key=lambda piece: (-piece.end_s, *_by_start(piece)))
    late, early = last[: most // 4], last[most // 4 :]
    early.sort(key=lambda piece: (piece.start_s - piece.end_s, *_by_start(piece)))
    return sorted(late + early[: most - len(late)], key=_by_start)


def _by_start(piece: Piece) -> tuple[float, int, int]:
    return piece.start_s, piece.group, piece.sample


def _join(pieces: Iterable[Piece], gap_s: float) -> list[Piece]:
    """Pieces of one response on one worker with at most `gap_s` between them become one; a loss ends a piece."""
    done: list[Piece] = []
    last: dict[tuple[int, int], Piece] = {}
    for piece in sorted(pieces, key=_by_start):
        before = last.get(piece.response)
        if (
            before is not None
            and before.worker == piece.worker
            and not before.was_lost
            and piece.start_s - before.end_s <= gap_s
        ):
            last[piece.response] = replace(
                before,
                end_s=max(before.end_s, piece.end_s),
                tokens=before.tokens + piece.tokens,
                num_chunks=before.num_chunks + piece.num_chunks,
                was_lost=piece.was_lost,
            )
            continue
        if before is not None:
            done.append(before)
        last[piece.response] = piece
    return [*done, *last.values()]


def pack_rows(spans: Sequence[tuple[float, float]]) -> list[int]:
    """The row of each span (start, end): by start, each takes the first row that is free then.

    Spans of one row never overlap, though one may begin where another ends; no other way needs fewer rows.
    """
    rows = [0] * len(spans)
    busy: list[tuple[float, int]] = []  # (end, row)
    free: list[int] = []
    num_rows = 0
    for at in sorted(range(len(spans)), key=lambda at: spans[at]):
        start, end = spans[at]
        while busy and busy[0][0] <= start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            row = heapq.heappop(free)
        else:
            row, num_rows = num_rows, num_rows + 1
        rows[at] = row
        heapq.heappush(busy, (end, row))
    return rows
