"""What a draft worker has drafted ahead of one response: a chain behind its decided tokens, and branches off the chain.

A branch leaves the chain where a token may be rejected. It begins with that token's rival, the runner-up of log q +
noise, which is the likeliest correction as the dice are known, and drafts on behind it; where it turns out right it
becomes the chain. Owns tokens and estimates, no model; `draft_worker` decides what grows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from paceline.drafting.worker_wire import Open, pack_draft
from paceline.planning.draft_ahead import window_room
from paceline.types import Float32Array, Int32Array, ModelBatch

NO_RIVAL = -1


@dataclass(slots=True)
class Chain:
    """Tokens of a response, known and drafted ones. Arrays are as long as the response can get."""

    row: int
    """Its number in the model drafter."""
    tokens: Int32Array
    acceptance: Float32Array
    cells: Int32Array
    rivals: Int32Array
    end: int
    """Tokens so far."""
    cut: int = 0
    """A branch: position of its first token. It has the tokens before it in common with the chain."""
    probability: float = 1.0
    """That all its drafted tokens are accepted."""
    is_stuck: bool = False
    """The model has drafted nothing behind these tokens: it gives NaN, or lacks a row."""
    prepared_end: int = 0
    """The chain, where it was a branch: its tokens before this position were drafted then."""

    def put(self, batch: ModelBatch, row: int) -> int:
        """Add what was drafted behind it; returns the number of tokens."""
        length = int(batch.num_tokens[row])
        new = slice(self.end, self.end + length)
        self.tokens[new] = batch.tokens[row, :length]
        self.acceptance[new] = batch.acceptance[row, :length]
        self.cells[new] = batch.cells[row, :length]
        self.rivals[new] = batch.rivals[row, :length]
        self.is_stuck = not length
        self.end += length
        self.probability *= float(np.prod(self.acceptance[new]))
        return length

    def fork(self, row: int, cut: int, acceptance: float, probability: float) -> Chain:
        """A branch that has the rival at position `cut`. acceptance: of the rival behind the tokens before it."""
        branch = Chain(
            row,
            self.tokens.copy(),
            self.acceptance.copy(),
            self.cells.copy(),
            self.rivals.copy(),
            cut + 1,
            cut,
            probability,
        )
        branch.tokens[cut], branch.acceptance[cut] = self.rivals[cut], acceptance
        return branch


@dataclass(slots=True)
class Decided:
    """What a response's growth says about the tokens drafted for it."""

    cells: list[Int32Array] = field(default_factory=list)
    accepted: list[NDArray[np.bool_]] = field(default_factory=list)
    """Of each of these cells' tokens: all up to the first rejection."""
    rejected_cells: list[int] = field(default_factory=list)
    """Of tokens that were rejected and had a rival."""
    is_rival_right: list[bool] = field(default_factory=list)
    """Whether that rival was the correction."""
    num_wasted: int = 0
    """Drafted behind the rejected token."""
    num_prepared: int = 0
    """Of the tokens before the last, which the verifier decides in any case: drafted as part of a branch."""
    is_hit: bool = False
    """Whether the correction had been prepared: its branch is the chain now."""
    void_rows: list[int] = field(default_factory=list)
    """Of branches that are none any more."""
    stands: int | None = None
    """Tokens that stand of the chain, where the rest of it was rejected."""


class Ahead:
    """One running response."""

    def __init__(self, opened: Open, row: int, max_model_len: int) -> None:
        """row: of the model drafter."""
        told = np.frombuffer(opened.tokens, np.int32)
        limit = max(min(opened.limit, max_model_len), len(told))
        self.key, self.temperature = opened.key, opened.temperature
        self.known = len(told)
        """Tokens as told."""
        self.most_ahead = opened.most_ahead
        """Tokens beyond these that may be drafted."""
        self.chain = Chain(
            row,
            np.empty(limit, np.int32),
            np.empty(limit, np.float32),
            np.empty(limit, np.int32),
            np.empty(limit, np.int32),
            len(told),
        )
        self.chain.tokens[: len(told)] = told
        self.branches: dict[int, Chain] = {}
        """By the position of the token that they replace."""
        self.probes: Int32Array | None = None
        """What each sharpness would have drawn at position `known`, if it was asked. [num_sharpness]"""
        self.packed = b""
        """What is drafted ahead, for the engine; empty until it is asked for."""

    @property
    def limit(self) -> int:
        """Most tokens, prompt included."""
        return len(self.chain.tokens)

    def room(self, chain: Chain, floor: float) -> int:
        """Tokens that may be drafted behind the chain or a branch now."""
        if chain.is_stuck or chain.probability < floor:
            return 0
        return min(window_room(self.most_ahead, chain.end - self.known), self.limit - chain.end)

    def cuts(self, rival_acceptance: Float32Array, floor: float) -> Iterator[tuple[int, float, float]]:
        """Branches that could be made: position, acceptance of the rival there, probability of the branch.

        rival_acceptance: that the rival is the correction of a rejected token, by the token's cell. [num_cells]
        """
        ahead = slice(self.known, min(self.chain.end, self.known + self.most_ahead - 1, self.limit - 1))
        acceptance = self.chain.acceptance[ahead]
        rival = (1.0 - acceptance) * rival_acceptance[self.chain.cells[ahead]]
        probability = np.cumprod(np.concatenate([[1.0], acceptance]))[:-1] * rival
        for place in np.flatnonzero((probability >= floor) & (self.chain.rivals[ahead] != NO_RIVAL)).tolist():
            if self.known + place not in self.branches:
                yield self.known + place, float(rival[place]), float(probability[place])

    def decide(self, tokens: Int32Array) -> Decided:
        """The response has grown by these tokens."""
        tokens, decided = tokens[: self.limit - self.known], Decided()
        place = self._follow(tokens, 0, decided)
        if decided.stands is not None and (branch := self._find(self.known + place, int(tokens[place]))):
            decided.is_hit, decided.stands = True, None
            decided.num_prepared += place < len(tokens) - 1
            decided.void_rows.append(self.chain.row)
            del self.branches[branch.cut]
            self.chain, branch.is_stuck, branch.prepared_end = branch, False, branch.end
            self._follow(tokens, place + 1, decided)
        self._advance(tokens, decided)
        return decided

    def _follow(self, tokens: Int32Array, place: int, decided: Decided) -> int:
        """Compare the chain with the tokens from `place` on; returns the first place that it has not, or has wrong."""
        chain, start = self.chain, self.known + place
        room = min(len(tokens) - place, chain.end - start)
        right = chain.tokens[start : start + room] == tokens[place : place + room]
        num_right = room if right.all() else int(right.argmin())
        cut = start + num_right
        if num_right < room:
            decided.stands = cut
            decided.num_wasted += chain.end - cut - 1
            if chain.rivals[cut] != NO_RIVAL:
                decided.rejected_cells.append(int(chain.cells[cut]))
                decided.is_rival_right.append(bool(chain.rivals[cut] == tokens[place + num_right]))
        last = self.known + len(tokens) - 1
        decided.num_prepared += max(min(cut, chain.prepared_end, last) - start, 0)
        told = slice(start, min(cut + 1, start + room))
        decided.cells.append(chain.cells[told].copy())
        decided.accepted.append(right[: told.stop - start])
        return place + num_right

    def _find(self, cut: int, token: int) -> Chain | None:
        """The branch that has this token there."""
        branch = self.branches.get(cut)
        return branch if branch is not None and branch.tokens[cut] == token else None

    def _advance(self, tokens: Int32Array, decided: Decided) -> None:
        """Take the decided tokens over; what does not follow from them goes."""
        chain, now = self.chain, self.known + len(tokens)
        chain.tokens[self.known : now] = tokens
        chain.end = now if decided.stands is not None else max(chain.end, now)
        chain.is_stuck = False
        has_turned = decided.is_hit or decided.stands is not None
        void = [cut for cut in self.branches if has_turned or cut < now]
        decided.void_rows += [self.branches.pop(cut).row for cut in void]
        self.known, self.probes, self.packed = now, None, b""
        for one in (chain, *self.branches.values()):
            one.probability = float(np.prod(one.acceptance[now : one.end]))

    def pack(self, response: int) -> bytes:
        """What is drafted ahead, as one tree; packed anew only where it has changed."""
        if not self.packed and self.chain.end > self.known:
            pieces = [(self.chain, self.known), *((branch, cut) for cut, branch in self.branches.items())]
            parents: list[Int32Array] = []
            for chain, start in pieces:
                first = sum(map(len, parents))
                own = np.arange(first - 1, first - 1 + chain.end - start, dtype=np.int32)
                own[0] = start - self.known - 1  # the chain's tokens are the first of the tree
                parents.append(own)
            self.packed = pack_draft(
                response,
                self.known,
                np.concatenate([chain.tokens[start : chain.end] for chain, start in pieces]),
                np.concatenate(parents),
                np.concatenate([chain.acceptance[start : chain.end] for chain, start in pieces]),
            )
        return self.packed
