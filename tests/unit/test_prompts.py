"""The prompts file: what is refused by its line, what is carried through."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from command_line import write

from paceline.commands.inputs.model_folder import read_checkpoint
from paceline.commands.inputs.prompts import read_prompts
from paceline.commands.rollout.responses import (
    RESERVED,
)
from paceline.errors import RequestError


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"),
        ("[1]", "line 2 is not a JSON object"),
        ({"text": "x"}, "line 2 needs exactly one of prompt, messages, prompt_ids"),
        ({"prompt": "x", "prompt_ids": [1]}, "found prompt and prompt_ids"),
        ({"prompt_ids": []}, "line 2: the prompt is empty"),
        ({"prompt_ids": "123"}, "must be a list of integers"),
        ({"prompt_ids": [1, True]}, "must be a list of integers"),
        ({"prompt_ids": [1, 64]}, "line 2: token id 64 is unknown, the model has ids 0 to 63"),
        ({"prompt_ids": [-1]}, "token id -1 is unknown"),
        ({"prompt_ids": [1] * 32}, "line 2: 32 tokens leave no room to generate, the model takes 32"),
        ({"prompt_ids": [1], "id": 1.5}, "id=1.5"),
        ({"prompt_ids": [1], "id": 1}, "lines 1 and 2 have the same id 1"),
        ({"prompt_ids": [1], "logprobs": 0}, "field 'logprobs', which the output uses itself"),
    ],
)
def test_a_bad_prompt_is_named_by_its_line(
    tmp_path: Path, model: Path, line: dict[str, Any] | str, message: str
) -> None:
    path = write(tmp_path / "p.jsonl", {"prompt_ids": [1]}, line)
    with pytest.raises(RequestError, match=re.escape(message)):
        read_prompts(path, read_checkpoint(model), RESERVED)


def test_a_prompt_that_is_not_utf_8_is_named_by_its_line(tmp_path: Path, model: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt_ids": [1]}\n{"prompt": "3\xff"}\n')
    with pytest.raises(RequestError, match="line 2 is not UTF-8"):
        read_prompts(path, read_checkpoint(model), RESERVED)


@pytest.mark.parametrize(("name", "message"), [("absent", "cannot be read"), ("empty", "has no prompts")])
def test_a_file_without_prompts_is_refused(tmp_path: Path, model: Path, name: str, message: str) -> None:
    write(tmp_path / "empty")
    with pytest.raises(RequestError, match=message):
        read_prompts(tmp_path / name, read_checkpoint(model))


def test_prompts_keep_their_fields_and_equal_ones_get_dice_of_their_own(tmp_path: Path, model: Path) -> None:
    path = write(
        tmp_path / "p.jsonl",
        {"prompt_ids": [1, 2], "answer": [3, 4]},
        "",
        {"id": "b", "prompt_ids": [5]},
        {"id": "c", "prompt_ids": [1, 2]},
    )
    one, two, three = read_prompts(path, read_checkpoint(model))
    assert [(p.id, p.line) for p in (one, two, three)] == [(1, 1), ("b", 3), ("c", 4)]
    assert one.tokens == three.tokens == (1, 2)
    assert one.fields == {"answer": [3, 4]}
    assert {one.sample_of(s) for s in range(1000)}.isdisjoint(three.sample_of(s) for s in range(1000))
    assert two.sample_of(7) == one.sample_of(7) == 7
