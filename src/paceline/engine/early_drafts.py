"""Drafts that were made before the step that they are for: which of them still fit it.

A part of the fast loop. Knows nothing of vLLM.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.drafting.drafter import Drafter
from paceline.types import DraftBatch, DraftPaths, DraftQuery, Int32Array, Int64Array, ModelBatch


class EarlyDrafts(NamedTuple):
    """Drafts that a thread of the drafter's makes."""

    drafter: Drafter | None
    query: DraftQuery
    wait: Callable[[], tuple[DraftBatch, DraftPaths | None]]

    def lined_up(self, query: DraftQuery) -> tuple[DraftBatch, DraftPaths | None] | None:
        """What was drafted for these requests; None if it was for none at its present position. Waits for it."""
        batch, paths = self.wait()
        places = find_places(self.query.responses, self.query.positions, query.responses, query.positions)
        if places is not None and not places[1].any():
            return None
        return line_up(batch, paths, places, query.max_tokens)


def find_places(
    responses: Int64Array, positions: Int64Array, wanted: Int64Array, wanted_positions: Int64Array
) -> tuple[Int64Array, NDArray[np.bool_]] | None:
    """Where those of the wanted responses are among drafts for these responses at these positions: (row of each that is
    wanted, whether its drafts are for the wanted position). None: just the wanted ones, in order.
    """
    if np.array_equal(responses, wanted) and np.array_equal(positions, wanted_positions):
        return None
    order = np.argsort(responses, kind="stable")
    found = np.searchsorted(responses[order], wanted)
    row = order[np.minimum(found, len(order) - 1)]
    return row, (responses[row] == wanted) & (positions[row] == wanted_positions)


def line_up(
    batch: DraftBatch,
    paths: DraftPaths | None,
    places: tuple[Int64Array, NDArray[np.bool_]] | None,
    max_tokens: Int32Array,
) -> tuple[DraftBatch, DraftPaths | None]:
    """The drafts of `find_places`, none where they do not fit, of at most `max_tokens` each. [num_wanted]"""
    if places is None:  # most often nobody has come or gone
        if paths is not None:
            paths = replace(paths, num_tokens=np.minimum(paths.num_tokens, max_tokens[:, None]))
        return replace(batch, num_tokens=np.minimum(batch.num_tokens, max_tokens)), paths
    row, fits = places
    most = np.where(fits, max_tokens, 0).astype(np.int32)
    lengths = np.minimum(batch.num_tokens[row], most)
    probes = np.where(fits[:, None], batch.probes[row], -1)
    columns = batch.tokens[row], lengths, batch.acceptance[row], batch.cells[row], probes
    made = ModelBatch(*columns, batch.rivals[row]) if isinstance(batch, ModelBatch) else DraftBatch(*columns)
    if paths is None:
        return made, None
    lengths = np.minimum(paths.num_tokens[row], most[:, None])
    return made, DraftPaths(paths.tokens[row], lengths, paths.acceptance[row], paths.cells[row])
