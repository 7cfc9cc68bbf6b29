"""The responses in a file of `paceline rollout`, as training and measuring of drafters read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from paceline.errors import RecordError
from paceline.record.append import read_lines
from paceline.record.damage import UNREADABLE


class Response(msgspec.Struct, frozen=True):
    """What is read of a line."""

    prompt_ids: list[int]
    tokens: list[int]
    key: int | None = None
    """Dice key; null without Paceline."""
    options: dict[str, Any] = {}
    """What decided the tokens, temperature among it."""

    @property
    def ids(self) -> Tensor:
        """Prompt and response. [num_tokens] int32"""
        return torch.tensor(self.prompt_ids + self.tokens, dtype=torch.int32)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_ids)


def read_responses(file: Path) -> list[Response]:
    """All that have a token, in the file's order; a torn last line is passed over.

    Raises RecordError for a file that is not there, that another program has written, or in which there is none.
    """
    decoder = msgspec.json.Decoder(Response)
    try:
        found = [decoder.decode(line) for line in read_lines(file)]
    except OSError as error:
        raise RecordError(
            f"cannot read {file}: {error.strerror}; give a file of 'paceline rollout'"
        ) from error
    except UNREADABLE as error:
        raise RecordError(f"{file} is no file of 'paceline rollout' ({error}): give its --out") from error
    found = [response for response in found if response.prompt_ids and response.tokens]
    if not found:
        raise RecordError(f"{file} holds no response: make some with 'paceline rollout'")
    return found
