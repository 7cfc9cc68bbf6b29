"""What a model-free drafter is: the contract that the suffix forest, the n-gram lookup and test drafters share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol, runtime_checkable

import msgspec
from safetensors import SafetensorError, safe_open

from paceline.errors import CheckpointError
from paceline.record.damage import UNREADABLE
from paceline.types import DraftBatch, DraftPaths, DraftQuery, Float32Array, Int32Array, Int64Array

PADDING_SHARE = 0.01
"""Vocabulary sizes of one tokenizer may differ by padding rows, by at most this share of the larger one."""


def fits_vocabulary(own: int, target: int) -> bool:
    """Whether vocabularies of these sizes can be one tokenizer's."""
    return abs(own - target) <= PADDING_SHARE * max(own, target)


def is_draft_head(folder: Path) -> bool:
    """Whether a folder holds a draft head (EAGLE, EAGLE-3) and no language model.

    Its weights tell: published EAGLE checkpoints have the configuration of a Llama model.
    """
    try:
        with safe_open(folder / "model.safetensors", framework="np") as tensors:
            return "fc.weight" in set(tensors.keys())
    except (OSError, SafetensorError):
        return False


class _EagleConfig(msgspec.Struct):
    eagle_aux_hidden_state_layer_ids: tuple[int, ...] = ()


class _HeadConfig(_EagleConfig):
    eagle_config: _EagleConfig = msgspec.field(default_factory=_EagleConfig)


def read_fused_layers(head: Path) -> tuple[int, ...]:
    """The target's layers whose inputs a draft head fuses (EAGLE-3), as its configuration names them; () for EAGLE.

    Layer i's input is what i layers have made: `hidden_states[i]` of transformers. Raises CheckpointError for layers
    that are not ascending from 1 on.
    """
    try:
        config = msgspec.json.decode((head / "config.json").read_bytes(), type=_HeadConfig)
    except (OSError, *UNREADABLE) as error:
        raise CheckpointError(
            f"{head}: the configuration of the draft head cannot be read ({error}): export it again"
        ) from error
    layers = config.eagle_aux_hidden_state_layer_ids or config.eagle_config.eagle_aux_hidden_state_layer_ids
    if list(layers) != sorted({*layers}) or min(layers, default=1) < 1:
        raise CheckpointError(
            f"{head}: the draft head fuses the inputs of layers {list(layers)}: these must ascend, from 1 on"
        )
    return layers


class _Architectures(msgspec.Struct):
    architectures: tuple[str, ...] = ()


def read_architectures(folder: Path) -> tuple[str, ...]:
    """The model classes that a checkpoint's configuration names; () where there is none to read."""
    try:
        return msgspec.json.decode((folder / "config.json").read_bytes(), type=_Architectures).architectures
    except (OSError, *UNREADABLE):
        return ()


class Drafter(Protocol):
    """Drafts from tokens that it was given, without a model. Used by one thread; keeps no wall-clock time."""

    def open_group(self, group: int, prompt: Int32Array) -> None:
        """A group begins; idempotent. prompt: [num_prompt_tokens] int32"""

    def append(self, group: int, response: int, tokens: Int32Array) -> None:
        """A response opens (without tokens) or grows. tokens: [num_tokens] int32"""

    def append_batch(
        self, groups: Int64Array, responses: Int64Array, offsets: Int32Array, tokens: Int32Array
    ) -> None:
        """Many responses grow: response i by tokens[offsets[i]:offsets[i + 1]]."""

    def resync(self, group: int, response: int, tokens: Int32Array) -> None:
        """A response begins or goes on with exactly these tokens; none is counted twice. tokens: [num_tokens] int32"""

    def draft(
        self,
        query: DraftQuery,
        *,
        sharpness: float,
        sharpness_grid: Float32Array,
        calibration: Float32Array,
        floor: float,
    ) -> DraftBatch:
        """Draft for each row of `query`, by the shared dice.

        Args:
            sharpness: exponent on the draft distribution; inf drafts its likeliest token.
            sharpness_grid: the values that `DraftBatch.probes` answers for. [num_sharpness]
            calibration: acceptance estimate of each cell. [num_cells]
            floor: a draft ends where its path probability falls below this.
        """

    def close_response(self, group: int, response: int) -> None:
        """A response has ended; what it added stays with its group."""

    def clear(self) -> None:
        """Drop all groups."""


@runtime_checkable
class PathDrafter(Drafter, Protocol):
    """A drafter that can propose several diverging paths per request."""

    def draft_paths(
        self, query: DraftQuery, *, num_paths: int, sharpness: float, calibration: Float32Array, floor: float
    ) -> DraftPaths:
        """Up to `num_paths` paths for each row of `query`, the one of `draft` first, the others best first."""


@runtime_checkable
class ThreadedDrafter(Drafter, Protocol):
    """A drafter that can work while its caller does something else."""

    def draft_later(
        self,
        groups: Int64Array,
        responses: Int64Array,
        offsets: Int32Array,
        tokens: Int32Array,
        query: DraftQuery,
        *,
        sharpness: float,
        sharpness_grid: Float32Array,
        calibration: Float32Array,
        floor: float,
        num_paths: int = 1,
    ) -> Callable[[], tuple[DraftBatch, DraftPaths | None]]:
        """`append_batch`, then `draft` and, for more than one, `draft_paths`; what is returned waits for the drafts.
        No array may change before, and every other call waits first.
        """


class Forgetful:
    """The half of a drafter that learns, for one that keeps nothing."""

    def open_group(self, group: int, prompt: Int32Array) -> None:
        """Nothing to keep."""

    def append(self, group: int, response: int, tokens: Int32Array) -> None:
        """Nothing to keep."""

    def append_batch(
        self, groups: Int64Array, responses: Int64Array, offsets: Int32Array, tokens: Int32Array
    ) -> None:
        """Nothing to keep."""

    def resync(self, group: int, response: int, tokens: Int32Array) -> None:
        """Nothing to keep."""

    def close_response(self, group: int, response: int) -> None:
        """Nothing to keep."""

    def clear(self) -> None:
        """Nothing to keep."""
