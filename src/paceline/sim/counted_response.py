"""What the controller knows of a simulated rollout: the same requests and ledger entries, without tokens.

A simulated response has a length. Its ledger entry counts, so that 100,000 of them with billions of tokens fit into
memory, and all that the controller decides is as with tokens (`tests/property/test_one_controller.py`). One
thing differs: a racer may have finished a response beyond the chunk that its home was ordered. Live workers never tell
so much.
"""

from __future__ import annotations

from paceline.control.events import Ending, Kept
from paceline.control.live_response import LiveResponse, RunningChunk
from paceline.errors import EngineError
from paceline.sim.workload import Workload
from paceline.types import RolloutRequest


class CountedResponse(LiveResponse):
    """A ledger entry that counts; `tokens` and `logprobs` are not added to."""

    __slots__ = ("_num_tokens",)

    def __init__(self, index: int, request: RolloutRequest, kept: Kept | None = None) -> None:
        super().__init__(index, request, kept)
        self._num_tokens = len(self.tokens)

    @property
    def num_tokens(self) -> int:
        """Response tokens so far."""
        return self._num_tokens

    def absorb_end(self, ending: Ending) -> bool:
        """Count what is new; nothing is lost on the way."""
        end = ending.start + ending.num_tokens
        if end > self._num_tokens:
            self._num_tokens = end
            self.acquit()
        return True

    def check_extent(self, chunk: RunningChunk, start: int, end: int) -> None:
        """Raise EngineError unless tokens `start` to `end` lie between the chunk's begin and the response's limit."""
        if not chunk.start <= start <= end <= self.request.max_tokens:
            raise EngineError(
                f"worker {chunk.worker} told tokens {start} to {end} of response {self.index}, which may have tokens "
                f"{chunk.start} to {self.request.max_tokens}: the simulated worker is wrong"
            )


def make_requests(workload: Workload) -> tuple[RolloutRequest, ...]:
    """The requests of a rollout, numbered as in the workload; prompts of one length are one object."""
    prompts = {length: (0,) * length for length in set(workload.prompt_tokens.tolist())}
    size = workload.group_size
    return tuple(
        RolloutRequest(prompts[length], workload.max_tokens, group * size + sample, group, sample)
        for group, length in enumerate(workload.prompt_tokens.tolist())
        for sample in range(size)
    )
