"""Journals of training rollouts: a run that is killed goes on within the rollout, and need not repeat earlier ones.

One journal a step (fleet/journal.py), `RUN/rollouts/step-12`, kept until a checkpoint holds the step. What it knows is
used for the same step with the same weights alone, so that a resumed run that trains differently generates anew. Called
by step_runner.py.
"""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from paceline.fleet.journal import Journal
from paceline.training.run_folder import ROLLOUTS

SAMPLED_WEIGHTS = 1 << 12
"""Of each parameter so many values, spread over it, enter the weights' digest: an update changes nearly all."""


class RolloutJournals:
    """Of one training run."""

    def __init__(self, folder: Path) -> None:
        """folder: of the run."""
        self._folder = folder / ROLLOUTS
        self._weights = 0

    def watch(self, weights: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """The same weights, which the engine gets; the next journals are of these."""
        digest = 0
        for name, tensor in weights:
            digest = _digest(name, tensor, digest)
            yield name, tensor
        self._weights = digest

    def open(self, step: int, params: Any) -> Journal:
        """The journal of a step's rollout with these sampling options. Raises RecordError as `Journal.open` does."""
        job = {"step": step, "weights": self._weights, "params": repr(params)}
        return Journal.open(self._path(step), msgspec.json.encode(job).decode(), resume=True)

    def forget(self, step: int) -> None:
        """The state after this step is saved: remove the journals up to it."""
        for path in self._folder.glob("step-*"):
            number = path.name.removeprefix("step-")
            if not number.isdigit() or int(number) <= step:
                path.unlink(missing_ok=True)

    def clear(self) -> None:
        """The run is complete: remove all journals."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step}"


def _digest(name: str, tensor: Any, before: int) -> int:
    import torch

    flat = tensor.detach().reshape(-1)
    some = flat[:: max(len(flat) // SAMPLED_WEIGHTS, 1)].contiguous()
    data = some.view(torch.uint8).cpu().numpy().tobytes()
    return zlib.crc32(data, zlib.crc32(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode(), before))
