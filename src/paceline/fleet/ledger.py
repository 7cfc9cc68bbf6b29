"""The ledger entry of a response: the only copy of what it has so far. Used by the controller.

Invariant: the tokens only grow, and every token that is told again is compared with the one that is known. Keys make
tokens a pure function of the weights, so a difference means that two engines are not the same, and is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from paceline.errors import EngineError
from paceline.fleet.events import Keep, Kept
from paceline.types import Response, RolloutRequest


class LiveResponse:
    """A response that is not delivered yet."""

    __slots__ = (
        "chunk",
        "index",
        "logprobs",
        "num_draft_tokens",
        "num_steps",
        "request",
        "tokens",
    )

    def __init__(self, index: int, request: RolloutRequest, kept: Kept | None = None) -> None:
        self.index = index
        self.request = request
        self.tokens = list(request.generated)
        self.logprobs: list[float] = []
        self.num_steps = 0
        self.num_draft_tokens = 0
        self.chunk: int | None = None
        """The chunk that runs."""
        if kept is not None:
            self.tokens += kept.tokens
            self.logprobs += kept.logprobs
            self.num_steps, self.num_draft_tokens = kept.num_steps, kept.num_draft_tokens

    def absorb(self, start: int, tokens: Sequence[int], logprobs: Sequence[float]) -> int:
        """Take what is new of the tokens from index `start` on; returns how many those are.

        What begins beyond a gap is left out: the chunk's ending tells it again. Raises EngineError if a known token
        differs.
        """
        known = len(self.tokens)
        if start > known:
            return 0
        for place, (mine, theirs) in enumerate(zip(self.tokens[start:], tokens, strict=False), start):
            if mine != theirs:
                raise EngineError(
                    f"response {self.index} (key {self.request.key}): token {place} was {mine} and is now {theirs}: "
                    "the workers' engines are not the same; give them the same weights, number format and kind of "
                    "machine, and leave batch_invariant on"
                )
        self.tokens += tokens[known - start :]
        self.logprobs += logprobs[known - start :]
        return len(self.tokens) - known

    def next_request(self, chunk_tokens: int) -> RolloutRequest:
        """The request of the next chunk."""
        return replace(self.request, generated=tuple(self.tokens), max_tokens=len(self.tokens) + chunk_tokens)

    def keep(self, num_new: int, finish_reason: str | None) -> Keep:
        """What a journal needs to know of the last `num_new` tokens."""
        end = len(self.logprobs)
        return Keep(
            index=self.index,
            start=end - num_new,
            tokens=tuple(self.tokens[len(self.tokens) - num_new :]),
            logprobs=tuple(self.logprobs[end - num_new :]),
            num_steps=self.num_steps,
            num_draft_tokens=self.num_draft_tokens,
            finish_reason=finish_reason,
        )

    def finish(self, finish_reason: str, policy_version: int) -> Response:
        """The finished response. A step brings one token and the accepted drafts."""
        request = self.request
        assert request.key is not None
        assert request.group is not None
        return Response(
            request=request,
            tokens=tuple(self.tokens),
            logprobs=tuple(self.logprobs),
            finish_reason=finish_reason,
            key=request.key,
            group=request.group,
            policy_version=policy_version,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=max(len(self.logprobs) - self.num_steps, 0),
            num_steps=self.num_steps,
        )
