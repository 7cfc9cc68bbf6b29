"""The draft tree: where the drafts of all sources for a running response meet.

Owns the front door to the native trees (`csrc/tree_module.cpp`), one per running response: its text, and the tokens
that sources propose behind it. A source gives chains whenever it has some, made for the present position or for an
earlier one; the tree walks down along newly decided tokens, keeps what goes on from them and drops the rest. So a late
draft is no special case: what of it still fits is used. A tree is bounded; a step costs the tokens that it brings and
the nodes that are there, never the response's length. Used by the engine's fast loop, one thread.

A source's estimates are its own (calibrated by it). Where sources propose the same token, the last one in `Source` is
believed, and where that one proposes another, the others' tokens get at most what it leaves. The higher of two
estimates is too high on average (the winner's curse), and the budget would verify what is then rejected
(docs/decisions/0002-draft-budget.md).
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from paceline import _tree
from paceline.types import DraftChains, Int32Array, Int64Array, MetDrafts

MAX_NODES = 512
"""Tokens that the tree of one response holds; of a chain that does not fit the end is dropped."""


class Source(IntEnum):
    """Who drafts, the better informed later: its estimate stands where several propose a token."""

    FREE = 0
    """The model-free drafter."""
    MODEL = 4
    """The model drafter, in the engine or in a draft worker. The numbers before it are for further draft workers, of
    which the first is `MODEL` - 1."""
    LEAD = 5
    """Another engine that generates the response too, and has these tokens already."""


class DraftTrees:
    """The trees of one engine's running responses."""

    def __init__(self, max_nodes: int = MAX_NODES, most_ahead: int = 0) -> None:
        """most_ahead: undecided tokens of a response that may be drafted ahead, until `allow` says otherwise."""
        self._native = _tree.DraftTrees(Source.LEAD + 1, max_nodes, most_ahead)

    def open(self, response: int, text: Int32Array) -> None:
        """A response runs; `text` are its tokens so far, prompt included. An open one begins anew."""
        self._native.open(response, text)

    def text(self, response: int) -> bytes:
        """Tokens of a response that was opened, int32; nothing of unknown ones."""
        return self._native.text(response)

    def close(self, response: int) -> None:
        """A response has ended; unknown ones are ignored, here and below."""
        self._native.close(response)

    def clear(self) -> None:
        """Forget all responses."""
        self._native.clear()

    def advance(self, responses: Int64Array, offsets: Int32Array, tokens: Int32Array) -> None:
        """Responses have grown: response i by tokens[offsets[i]:offsets[i + 1]]."""
        self._native.advance(responses, offsets, tokens)

    def add(
        self,
        source: int,
        responses: Int64Array,
        starts: Int64Array,
        chains: DraftChains,
        *,
        anew: bool = False,
    ) -> None:
        """A source (`Source`, or a further drafter's number) proposes a chain for each of these responses.

        starts: position of each chain's first token, at most the response's next one: behind a decided token.
        [num_chains]
        anew: the chains begin with the next token, and what the source proposed before is void; a response that is
        unknown, or elsewhere, begins there.
        """
        self._native.add(source, responses, starts, chains.tokens, chains.num_tokens, chains.acceptance, anew)

    def add_packed(self, source: int, drafts: bytes) -> None:
        """A source proposes trees of tokens, behind decided ones too (`worker_wire.pack_draft`).

        Raises ValueError for what was not packed so; what stands before the damage has been added.
        """
        self._native.add_packed(source, drafts)

    def best(self, responses: Int64Array, positions: Int64Array, limits: Int32Array) -> MetDrafts:
        """The chain with the most expected accepted tokens of each response, at most `limits` long.

        positions: of the next token; a response that is not there has no draft. Ties go to what was added first.
        """
        width = max(1, int(limits.max())) if len(limits) else 1
        table = np.empty((3, len(responses), width), np.int32)
        num_tokens = np.empty(len(responses), np.int32)
        open_ones = self._native.best(responses, positions, limits, table, num_tokens)
        return MetDrafts(table[0], num_tokens, table[1].view(np.float32), table[2], *open_ones)

    def judge(self, source: int, responses: Int64Array, decided: Int32Array) -> tuple[Int32Array, Int32Array]:
        """How right was a source, whosever drafts were offered? Asked before `advance` hears of the decided tokens.

        Of the tokens that it proposes behind the same ones the likeliest counts, of equal ones the first.

        decided: of each response, -1 behind them. [num_responses, most]
        Returns how many of its tokens are judged, up to the first wrong one, and how many are right. [num_responses]
        """
        told, right = np.empty((2, len(responses)), np.int32)
        self._native.judge(source, responses, decided, told, right)
        return told, right

    def holds(self, source: int, responses: Int64Array) -> bool:
        """Whether this source, or one that is better informed, proposes a next token of any of these responses."""
        return self._native.holds(source, responses)

    def allow(self, responses: Int64Array, most_ahead: Int32Array) -> None:
        """So many undecided tokens of each response may be drafted ahead. [num_responses]"""
        self._native.allow(responses, most_ahead)

    @property
    def num_nodes(self) -> int:
        """Tokens in all trees."""
        return self._native.num_nodes

    @property
    def num_responses(self) -> int:
        """Responses that are open."""
        return self._native.num_responses
