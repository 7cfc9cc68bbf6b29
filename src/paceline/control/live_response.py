"""The ledger entries of a response and of its running chunk: the only copy of what it has. Used by the controller.

Invariant: the tokens only grow, and every token that is told again is compared with the one that is known. Keys make
tokens a pure function of the weights, so a difference means that two engines are not the same, and is an error.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from typing import NamedTuple

from paceline.control.events import Ending, Keep, Kept
from paceline.control.packed import Digest, Packed
from paceline.errors import EngineError, RequestError
from paceline.planning.dispatch import Assignment
from paceline.types import Response, RolloutRequest


class LiveResponse:
    """A response that is not delivered yet."""

    __slots__ = (
        "failed",
        "has_fatal_prompt",
        "index",
        "is_raced",
        "is_suspect",
        "logprobs",
        "may_race",
        "num_draft_tokens",
        "num_failures",
        "num_kept",
        "num_losses",
        "num_steps",
        "request",
        "runs",
        "tokens",
    )

    def __init__(self, index: int, request: RolloutRequest, kept: Kept | None = None) -> None:
        self.index = index
        self.request = request
        self.tokens = array("i", request.generated)  # [num_tokens] int32
        self.logprobs = array("f")  # [num_tokens - len(request.generated)] float32
        self.num_steps = 0
        self.num_draft_tokens = 0
        self.num_losses = 0
        """Workers in a row that had worked, and were lost when it alone had begun there and got no token."""
        self.is_suspect = False
        """A worker was lost before it got a token there, and it has got none since."""
        self.has_fatal_prompt = False
        """A response with the same prompt has ended its workers before it got a token, and this one has none yet."""
        self.failed: FailedChunk | None = None
        """Where its chunk failed; None: nowhere, or it has gone on elsewhere since."""
        self.num_failures = 0
        """Chunks of it that failed."""
        self.runs: dict[int, str] = {}
        """Workers of the chunk that runs and of its copy, by number; the owner's, whom dispatch knows, comes first."""
        self.is_raced = False
        """Its chunk has had a copy, so that log-probabilities of two engines are among its own."""
        self.may_race = True
        """No copy of it has failed or got other tokens."""
        if kept is not None:
            self.tokens.frombytes(kept.packed.tokens)
            self.logprobs.frombytes(kept.packed.logprobs)
            self.num_steps, self.num_draft_tokens = kept.num_steps, kept.num_draft_tokens
        self.num_kept = len(self.logprobs)
        """New tokens that a journal has."""

    @property
    def num_tokens(self) -> int:
        """Response tokens so far."""
        return len(self.tokens)

    def absorb(self, start: int, piece: Packed) -> int:
        """Take what is new of the tokens from index `start` on; returns how many those are.

        What begins beyond a gap is left out. Raises EngineError if a known token differs.
        """
        known = len(self.tokens)
        if start > known:
            return 0
        if start < known:
            self._compare(start, piece)
            piece = piece.cut(known - start, len(piece))
        self.tokens.frombytes(piece.tokens)
        self.logprobs.frombytes(piece.logprobs)
        num_new = len(self.tokens) - known
        if num_new:
            self.acquit()
        return num_new

    def acquit(self) -> None:
        """It has got a token: it is not what ends workers."""
        self.num_losses, self.is_suspect, self.has_fatal_prompt = 0, False, False

    def _compare(self, start: int, piece: Packed) -> None:
        """Raise EngineError if a token from index `start` on is not the one that is known."""
        for place, (mine, theirs) in enumerate(
            zip(self.tokens[start:], array("i", piece.tokens), strict=False), start
        ):
            if mine != theirs:
                raise EngineError(
                    f"response {self.index} (key {self.request.key}): token {place} was {mine} and is now {theirs}: "
                    "the workers' engines are not the same; give them the same weights, number format and kind of "
                    "machine, and leave batch_invariant on"
                )

    def absorb_end(self, ending: Ending) -> bool:
        """Take the last tokens of a chunk; False, a report was lost: the response goes on from what is known.

        Raises EngineError if what is known of the chunk is not what its worker generated.
        """
        end, known = ending.start + ending.num_tokens, self.num_tokens
        self.absorb(end - len(ending.rest), ending.rest)
        if self.num_tokens < end:
            return False
        found = self._digest(ending.start)
        if found.tokens != ending.digest.tokens or (not self.is_raced and found != ending.digest):
            del self.tokens[known:], self.logprobs[known - len(self.request.generated) :]
            raise EngineError(
                f"response {self.index} (key {self.request.key}): tokens {ending.start} to {end} are not those that "
                "their worker generated, by their checksum: they were damaged on the way; start the rollout again "
                "(--resume goes on), and look at memory and network if it comes again"
            )
        return True

    def _digest(self, start: int) -> Digest:
        """The checksums of all tokens from index `start` on."""
        first = start - len(self.request.generated)
        with memoryview(self.tokens) as tokens, memoryview(self.logprobs) as logprobs:
            return Digest().add(tokens[start:], logprobs[first:])

    def check_extent(self, chunk: RunningChunk, start: int, end: int) -> None:
        """Raise EngineError unless tokens `start` to `end` lie in the chunk."""
        if not chunk.start <= start <= end <= chunk.end:
            raise EngineError(
                f"worker {chunk.worker} told tokens {start} to {end} of response {self.index}, whose chunk has tokens "
                f"{chunk.start} to {chunk.end}: the worker is of another version than the fleet"
            )

    def check_end(self, chunk: RunningChunk, ending: Ending) -> None:
        """Raise EngineError unless the ending's length is that of a chunk that ended so."""
        end = ending.start + ending.num_tokens
        whole = ending.start == chunk.start and len(ending.rest) <= ending.num_tokens
        if not whole or end < self.num_tokens or (ending.finish_reason == "length" and end != chunk.end):
            raise EngineError(
                f"worker {chunk.worker} ended a chunk of response {self.index} ({ending.finish_reason}) with "
                f"{end} tokens, not {chunk.end}: give the workers the same max_model_len as the fleet"
            )

    def check_room(self) -> None:
        """Raise RequestError if there is nothing left to generate."""
        request = self.request
        if self.num_tokens >= request.max_tokens:
            raise RequestError(
                f"request {self.index}: max_tokens={request.max_tokens} is already reached by {self.num_tokens} "
                "generated tokens"
            )

    @property
    def owner(self) -> int:
        """The number of the chunk that runs."""
        return next(iter(self.runs))

    def next_request(self, end: int) -> RolloutRequest:
        """The request of a chunk up to `end` tokens; a KV pool keeps nothing of the last one."""
        return replace(
            self.request,
            generated=tuple(self.tokens),
            max_tokens=end,
            keep_kv=end < self.request.max_tokens,
        )

    def keep(self, finish_reason: str | None) -> Keep:
        """What a journal has not been told yet."""
        start, self.num_kept = self.num_kept, len(self.logprobs)
        return Keep(
            index=self.index,
            start=start,
            packed=Packed(
                self.tokens[len(self.request.generated) + start :].tobytes(), self.logprobs[start:].tobytes()
            ),
            num_steps=self.num_steps,
            num_draft_tokens=self.num_draft_tokens,
            finish_reason=finish_reason,
        )

    def finish(self, finish_reason: str, policy_version: int, failure: str | None = None) -> Response:
        """The finished response. A step brings one token and the accepted drafts. failure: why it has failed, if it
        has.

        Its tuples of Python numbers take about 70 bytes a token, where `tokens` and `logprobs` take 8: whoever keeps
        many keeps those.
        """
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
            failure=failure,
        )


class FailedChunk(NamedTuple):
    """Where an engine gave a response up. Another engine that goes on behind it proves that this one is broken."""

    worker: str
    life: int
    end: int
    """Tokens of the response by then."""


@dataclass(frozen=True, slots=True)
class RunningChunk:
    """A chunk that runs on a worker."""

    assignment: Assignment
    response: LiveResponse
    worker: str
    start: int
    """Tokens of the response when it began."""
    end: int
    """Tokens of the response at the chunk's limit."""
    num_steps: int
    """Of the response when it began."""
