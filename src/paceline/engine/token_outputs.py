"""Engine steps read as token ids and log-probabilities, without vLLM's output processor.

vLLM turns each token of each request into text and objects for a server's answers: on a CPU that costs more than all
the rest outside a step, and a rollout needs none of it. So what the engine core gives is read as it is; only requests
that stop at texts go through vLLM's processor, which looks for them. The tokens and log-probabilities are the same.
Called by rollout_engine.py alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from vllm import SamplingParams


class Grown(NamedTuple):
    """What a step brought to one request."""

    request: str
    """vLLM's internal id of it."""
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str | None
    """None: it goes on."""


class TokenOutputs:
    """Adds requests to one vLLM engine, steps it and reads what they grow by."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._texts: set[str] = set()
        """Requests, by internal id, that vLLM's processor looks at."""

    def add(self, name: str, prompt: dict[str, Any], params: SamplingParams) -> str:
        """Add a request; returns vLLM's internal id of it."""
        request: str = self._engine.add_request(name, prompt, params)
        if params.detokenize:
            self._texts.add(request)
        return request

    def step(self) -> Iterator[Grown]:
        """Run one step; each request is read when it is asked for."""
        outputs = self._engine.engine_core.get_output()
        for output in outputs.outputs:
            reason = output.finish_reason
            if output.request_id in self._texts:
                reason = self._find_stop(output)
            elif reason is not None:
                self._engine.output_processor.abort_requests([output.request_id], internal=True)
            if reason is not None:
                self._texts.discard(output.request_id)
            yield _read(output, None if reason is None else str(reason))

    def _find_stop(self, output: Any) -> str | None:
        """Let vLLM look for stop texts, which may cut the output's tokens; the request's finish reason."""
        processed = self._engine.output_processor.process_outputs([output])
        self._engine.engine_core.abort_requests(processed.reqs_to_abort)
        reasons = [one.outputs[0].finish_reason for one in processed.request_outputs]
        return reasons[0] if reasons else None

    def abort(self, requests: list[str]) -> None:
        """Stop requests, by internal id."""
        self._texts.difference_update(requests)
        self._engine.abort_request(requests, internal=True)


def _read(output: Any, finish_reason: str | None) -> Grown:
    logprobs = () if output.new_logprobs is None else output.new_logprobs.logprobs[:, 0].tolist()
    return Grown(output.request_id, tuple(output.new_token_ids), tuple(logprobs), finish_reason)
