"""What workers tell, as tests say it: token by token."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.control.events import Ending, Growth, Growths
from paceline.control.packed import Digest, Packed


def pack(tokens: Sequence[int], logprob: float = -1.0) -> Packed:
    """Tokens of one log-probability each."""
    return Packed.of(tokens, [logprob] * len(tokens))


def digest(packed: Packed) -> Digest:
    """Of all tokens at once."""
    return Digest().add(packed.tokens, packed.logprobs)


def make_growths(chunk: int, start: int, tokens: Sequence[int], num_steps: int = 1) -> Growths:
    """One growth."""
    return Growths.pack([Growth(chunk, start, pack(tokens), num_steps)])


def make_ending(
    chunk: int,
    start: int,
    tokens: Sequence[int],
    reason: str,
    *,
    num_told: int = 0,
    num_steps: int = 2,
    num_draft_tokens: int = 5,
    logprob: float = -1.0,
) -> Ending:
    """The ending of a chunk of these tokens, of which growths have told the first."""
    packed = pack(tokens, logprob)
    rest = packed.cut(num_told, len(packed))
    return Ending(chunk, start, len(packed), rest, digest(packed), num_steps, num_draft_tokens, reason)
