"""What ran on which worker of a fleet, for every rollout that the report shows. Called by page.py."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from html import escape

from paceline.record import DrafterSession, HelpDone, measure_tail
from paceline.report.chunks import Piece, pack_rows, thin_pieces
from paceline.report.figures import duration, number
from paceline.report.history import MAX_PIECES, Rollout, RunHistory
from paceline.report.timeline import Lane, Stretch, draw_timeline

MAX_BARS = 16_000
"""In all rollouts but the newest, which may have `MAX_PIECES`."""
NUM_COLOURS = 5
DRAFTING_COLOUR = 6
MAX_DRAFTING = 1000
"""Bars of workers that draft for others, in one rollout: those that lasted longest."""


def draw_workers(history: RunHistory) -> list[str]:
    """HTML of each rollout's timeline, in the order of `history.drawn_rollouts`; empty if no chunk was recorded."""
    rollouts = list(history.drawn_rollouts.values())
    if not any(rollout.pieces for rollout in rollouts):
        return []
    share = min(MAX_BARS // len(rollouts), MAX_PIECES)
    drawn = [_draw(rollout, thin_pieces(rollout.pieces, share)) for rollout in rollouts[:-1]]
    return [*drawn, _draw(rollouts[-1], thin_pieces(rollouts[-1].pieces, MAX_PIECES))]


def _draw(rollout: Rollout, pieces: Sequence[Piece]) -> str:
    if not pieces:
        return '<p class="none">No chunk of this rollout was recorded.</p>'
    end_s = max(max(piece.end_s for piece in pieces), max(rollout.ends_s, default=0.0))
    drafting = list_drafting(rollout, end_s)
    lanes = build_lanes(pieces, rollout.losses, drafting, is_whole=not _count_left_out(rollout, pieces))
    label = f"What {_count(len(lanes), 'worker')} did over {duration(end_s)}"
    timeline = draw_timeline(lanes, end_s, label, end_s - measure_tail(rollout.ends_s))
    free = [describe_helps(rollout.helps), describe_sessions(rollout.sessions)]
    texts = [_summary(rollout, pieces), "Grey: drafting for another worker." if drafting else "", *free]
    return timeline + "".join(f'<p class="summary">{escape(text)}</p>' for text in texts if text)


def list_drafting(rollout: Rollout, end_s: float) -> dict[str, list[Stretch]]:
    """When workers drafted for others, by worker."""
    drafts = [one for one in rollout.helps if one.kind == "draft"]
    drafts.sort(key=lambda one: one.t_start_s - one.t_end_s)
    found: defaultdict[str, list[Stretch]] = defaultdict(list)
    for one in drafts[:MAX_DRAFTING]:
        start_s, stop_s = (
            min(max(t_s - rollout.begin_s, 0.0), end_s) for t_s in (one.t_start_s, one.t_end_s)
        )
        title = f"{one.worker} drafts for {one.helped}{one.drafter and f' with {one.drafter}'}"
        found[one.worker].append(Stretch(start_s, stop_s, DRAFTING_COLOUR, title))
    return found


def build_lanes(
    pieces: Sequence[Piece],
    losses: Mapping[tuple[str, float], int],
    drafting: Mapping[str, Sequence[Stretch]] | None = None,
    *,
    is_whole: bool = True,
) -> list[Lane]:
    """A lane for every worker, with as many rows as it had chunks, or drafted for others, at once.

    losses: chunks lost, by worker and time. is_whole: whether these are all chunks of their responses.
    """
    drafting = drafting or {}
    by_worker: defaultdict[str, list[Piece]] = defaultdict(list)
    for piece in pieces:
        by_worker[piece.worker].append(piece)
    titles = _titles(pieces, is_whole)
    lanes = []
    workers = {*by_worker, *drafting, *(worker for worker, _ in losses)}
    for worker in sorted(workers, key=lambda name: (len(name), name)):
        own = [
            Stretch(piece.start_s, piece.end_s, 1 + piece.group % NUM_COLOURS, titles[piece.response])
            for piece in by_worker[worker]
        ]
        own += drafting.get(worker, ())
        numbers = pack_rows([(stretch.start_s, stretch.end_s) for stretch in own])
        rows: list[list[Stretch]] = [[] for _ in range(max(numbers, default=-1) + 1)]
        for row, stretch in zip(numbers, own, strict=True):
            rows[row].append(stretch)
        lost = [
            (at_s, _loss(worker, at_s, count)) for (name, at_s), count in losses.items() if name == worker
        ]
        lanes.append(Lane(rows, worker, lost))
    return lanes


def describe_helps(helps: Sequence[HelpDone]) -> str:
    """Which worker helped which, and how; empty if none did."""
    by_pair: defaultdict[tuple[str, str, str, str], list[HelpDone]] = defaultdict(list)
    for one in helps:
        by_pair[one.worker, one.helped, one.kind, one.drafter].append(one)
    return "; ".join(_describe_help(*pair, own) for pair, own in sorted(by_pair.items()))


def describe_sessions(sessions: Sequence[DrafterSession]) -> str:
    """Which workers lent their time to the drafter's trainer; empty if none did."""
    lasted_s: defaultdict[str, float] = defaultdict(float)
    core_s: defaultdict[str, float] = defaultdict(float)
    for one in sessions:
        lasted_s[one.worker] += one.t_end_s - one.t_start_s
        if one.core_s is not None:
            core_s[one.worker] += one.core_s
    return "; ".join(
        f"{worker} trained the drafter ({duration(s)}{_cores(core_s.get(worker))})"
        for worker, s in sorted(lasted_s.items())
    )


def _cores(core_s: float | None) -> str:
    return "" if core_s is None else f", {core_s:.1f} core-seconds"


def _describe_help(worker: str, helped: str, kind: str, drafter: str, helps: Sequence[HelpDone]) -> str:
    if kind == "draft":
        lasted = duration(sum(one.t_end_s - one.t_start_s for one in helps))
        return f"{worker} drafted for {helped}{drafter and f' with {drafter}'} ({lasted})"
    if kind == "take":
        return f"{worker} took over {_count(len(helps), 'response')} of {helped}"
    won = sum(one.outcome == "won" for one in helps)
    races = f"{number(won)} of {_count(len(helps), 'race')}"
    leads = sum(one.num_leads for one in helps)
    changes = f" (the lead was taken {_count(leads, 'time')})" if leads else ""
    return f"{worker} won {races} with copies of responses of {helped}{changes}"


def _titles(pieces: Sequence[Piece], is_whole: bool) -> dict[tuple[int, int], str]:
    """What to say of each response."""
    by_response: defaultdict[tuple[int, int], list[Piece]] = defaultdict(list)
    for piece in pieces:
        by_response[piece.response].append(piece)
    titles = {}
    for (group, sample), own in by_response.items():
        title = f"group {group}, sample {sample}"
        if is_whole:
            chunks = sum(piece.num_chunks for piece in own)
            title += f": {_count(sum(piece.tokens for piece in own), 'token')} in {_count(chunks, 'chunk')}"
        titles[group, sample] = f"{title} on {', '.join(dict.fromkeys(piece.worker for piece in own))}"
    return titles


def _count_left_out(rollout: Rollout, pieces: Sequence[Piece]) -> int:
    """Chunks that are not drawn."""
    return rollout.num_chunks - sum(piece.num_chunks for piece in pieces)


def _count(count: int, noun: str) -> str:
    return f"{number(count)} {noun}{'' if count == 1 else 's'}"


def _loss(worker: str, at_s: float, count: int) -> str:
    return f"{worker} lost after {duration(at_s)} with {_count(count, 'chunk')}"


def _summary(rollout: Rollout, pieces: Sequence[Piece]) -> str:
    num_workers = len({*(piece.worker for piece in pieces), *(worker for worker, _ in rollout.losses)})
    parts = [f"{_count(rollout.num_chunks, 'chunk')} on {_count(num_workers, 'worker')}, coloured by group"]
    left_out = _count_left_out(rollout, pieces)
    if left_out:
        parts.append(f"{number(left_out)} short ones are left out")
    else:
        workers: defaultdict[tuple[int, int], set[str]] = defaultdict(set)
        for piece in pieces:
            workers[piece.response].add(piece.worker)
        moved = sum(len(own) > 1 for own in workers.values())
        parts.append(f"{number(moved)} of {number(len(workers))} responses ran on more than one")
    if len(pieces) < rollout.num_chunks - left_out:
        parts.append("chunks of a response that follow one another on a worker are drawn as one")
    text = "; ".join(parts) + ". Point at a bar to see its response. Shaded: the tail."
    losses = [_loss(worker, at_s, count) for (worker, at_s), count in rollout.losses.items()]
    if losses:
        more = f" and {number(len(losses) - 3)} more" if len(losses) > 3 else ""
        lines = "lines" if len(losses) > 1 else "line"
        text += f" Upright {lines}: {'; '.join(losses[:3])}{more}, which went on elsewhere."
    return text
