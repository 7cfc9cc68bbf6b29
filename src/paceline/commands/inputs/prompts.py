"""The prompts file: one JSON object a line, every line checked before an engine starts.

A line is `{"prompt": "text"}`, `{"messages": [{"role": ..., "content": ...}]}` (by the model's chat template) or
`{"prompt_ids": [...]}`, with an optional unique `"id"`; its other fields are carried through to the output.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from paceline.commands.inputs.model_folder import Checkpoint, load_tokenizer
from paceline.errors import RequestError

SOURCES = ("prompt", "messages", "prompt_ids")

REPEAT_SHIFT = 32
"""A prompt that occurs again takes its samples from another 2^32 numbers, so that it throws dice of its own."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One line of the prompts file."""

    line: int
    """Number of the line, from 1."""
    id: str | int
    """The line's own id, or its number."""
    fields: dict[str, Any]
    """Everything of the line but id and prompt_ids."""
    tokens: tuple[int, ...] = ()
    repeat: int = 0
    """Earlier lines with the same tokens."""

    def sample_of(self, sample: int) -> int:
        """The sample number that the dice key of this line's `sample`-th response is derived from."""
        return sample + (self.repeat << REPEAT_SHIFT)


def read_prompts(path: Path, checkpoint: Checkpoint, reserved: Iterable[str] = ()) -> list[Prompt]:
    """Read, tokenise and check a prompts file.

    Args:
        path: the file.
        checkpoint: the model that will run the prompts.
        reserved: field names that the output needs for itself.

    Raises RequestError that names the file and the line, CheckpointError when a tokenizer is needed and missing.
    """
    prompts = list(_parse(path, frozenset(reserved)))
    if not prompts:
        raise RequestError(f'{path} has no prompts: write one JSON object a line, {{"prompt": "..."}}')
    _refuse_equal_ids(path, prompts)
    prompts = _tokenise(path, prompts, checkpoint)
    for prompt in prompts:
        _check_tokens(path, prompt, checkpoint)
    return _count_repeats(prompts)


def _parse(path: Path, reserved: frozenset[str]) -> Iterator[Prompt]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _parse_line(f"{path}, line {number}", number, line, reserved)
    except OSError as error:
        raise RequestError(f"prompts file {path} cannot be read: {error.strerror}") from error


def _parse_line(where: str, number: int, line: bytes, reserved: frozenset[str]) -> Prompt:
    try:
        fields = msgspec.json.decode(line)
    except RecursionError as error:
        raise RequestError(f"{where} is nested too deeply: leave away what no response needs") from error
    except msgspec.DecodeError as error:
        raise RequestError(f"{where} is not JSON ({error}): write one JSON object a line") from error
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{where} is not UTF-8 ({error.reason} at byte {error.start}): save it as UTF-8"
        ) from error
    if not isinstance(fields, dict):
        raise RequestError(f'{where} is not a JSON object: write it as {{"prompt": "..."}}')
    sources = [name for name in SOURCES if name in fields]
    if len(sources) != 1:
        found = " and ".join(sources) or f"none of them (fields: {', '.join(fields) or 'no field'})"
        raise RequestError(f"{where} needs exactly one of {', '.join(SOURCES)}, found {found}")
    if taken := sorted(reserved & fields.keys()):
        raise RequestError(f"{where} has a field {taken[0]!r}, which the output uses itself: rename it")
    name = fields.pop("id", number)
    if isinstance(name, bool) or not isinstance(name, str | int):
        raise RequestError(f"{where} has id={name!r}: use a text or an integer")
    return Prompt(number, name, fields)


def _refuse_equal_ids(path: Path, prompts: list[Prompt]) -> None:
    seen: dict[str | int, int] = {}
    for prompt in prompts:
        if prompt.id in seen:
            raise RequestError(
                f"{path}, lines {seen[prompt.id]} and {prompt.line} have the same id {prompt.id!r}: "
                "give each line its own, or none"
            )
        seen[prompt.id] = prompt.line


def _tokenise(path: Path, prompts: list[Prompt], checkpoint: Checkpoint) -> list[Prompt]:
    wants_tokenizer = any("prompt_ids" not in prompt.fields for prompt in prompts)
    encode = _encoder(load_tokenizer(checkpoint)) if wants_tokenizer else None
    return [_with_tokens(f"{path}, line {prompt.line}", prompt, encode) for prompt in prompts]


def _encoder(tokenizer: Any) -> Callable[[str, dict[str, Any]], list[int]]:
    def encode(where: str, fields: dict[str, Any]) -> list[int]:
        if "prompt" in fields:
            if not isinstance(fields["prompt"], str):
                raise RequestError(
                    f"{where}: prompt={fields['prompt']!r} is not a text; for token ids use prompt_ids"
                )
            return list(tokenizer(fields["prompt"])["input_ids"])
        if not tokenizer.chat_template:
            raise RequestError(
                f"{where} has messages, but the model has no chat template: give a prompt instead"
            )
        try:
            text = tokenizer.apply_chat_template(
                fields["messages"], add_generation_prompt=True, tokenize=False
            )
        except Exception as error:
            raise RequestError(f"{where}: the model's chat template refuses the messages: {error}") from error
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    return encode


def _with_tokens(
    where: str, prompt: Prompt, encode: Callable[[str, dict[str, Any]], list[int]] | None
) -> Prompt:
    fields = dict(prompt.fields)
    if encode is not None and "prompt_ids" not in fields:
        return replace(prompt, tokens=tuple(encode(where, fields)))
    tokens = fields.pop("prompt_ids")
    if not isinstance(tokens, list) or any(isinstance(t, bool) or not isinstance(t, int) for t in tokens):
        raise RequestError(f"{where}: prompt_ids must be a list of integers")
    return replace(prompt, tokens=tuple(tokens), fields=fields)


def _check_tokens(path: Path, prompt: Prompt, checkpoint: Checkpoint) -> None:
    where = f"{path}, line {prompt.line}"
    length, limit, vocab_size = len(prompt.tokens), checkpoint.max_len, checkpoint.vocab_size
    if not length:
        raise RequestError(f"{where}: the prompt is empty; begin it with a BOS token or some text")
    if limit is not None and length >= limit:
        raise RequestError(
            f"{where}: {length} tokens leave no room to generate, the model takes {limit}; shorten the prompt"
        )
    if vocab_size is not None:
        bad = next((token for token in prompt.tokens if not 0 <= token < vocab_size), None)
        if bad is not None:
            raise RequestError(
                f"{where}: token id {bad} is unknown, the model has ids 0 to {vocab_size - 1}; "
                "use the tokenizer of this model"
            )


def _count_repeats(prompts: list[Prompt]) -> list[Prompt]:
    seen: Counter[tuple[int, ...]] = Counter()
    counted = []
    for prompt in prompts:
        counted.append(replace(prompt, repeat=seen[prompt.tokens]))
        seen[prompt.tokens] += 1
    return counted
