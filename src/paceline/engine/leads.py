"""What racers are ahead by: tokens that another engine has generated for a response that both generate.

Engines that throw the same dice generate the same tokens, so a lead is a draft that is all but certain
(docs/decisions/0034-leads.md). It enters the response's draft tree as a source of its own and is verified as every
draft is: each racer goes on from where the furthest one is, and one that would generate other tokens is found out.
Called by the fast loop, one thread.
"""

from __future__ import annotations

import numpy as np

from paceline.drafting.tree import DraftTrees, Source
from paceline.types import DraftChains, DraftQuery, Int32Array


class Leads:
    """One per engine whose responses may race. A lead begins at or before its response's next position."""

    def __init__(self, trees: DraftTrees) -> None:
        self._trees = trees
        self._leads: dict[
            int, tuple[int, Int32Array]
        ] = {}  # by response: position of the first token, tokens

    def __bool__(self) -> bool:
        """Whether any racer is ahead, as far as is known."""
        return bool(self._leads)

    def tell(self, response: int, start: int, tokens: Int32Array) -> None:
        """A racer has generated these tokens of a response from position `start` on."""
        before = self._leads.get(response)
        if before is not None and before[0] + len(before[1]) == start:
            start, tokens = before[0], np.concatenate([before[1], tokens])
        self._leads[response] = start, tokens

    def propose(self, query: DraftQuery) -> None:
        """Put the leads of responses that draft into their trees, as far as a draft may be long; drop spent ones."""
        places = dict(zip(query.responses.tolist(), range(len(query.responses)), strict=True))
        for response in [name for name in self._leads if name in places]:
            row, (start, tokens) = places[response], self._leads[response]
            position = int(query.positions[row])
            tokens = tokens[max(position - start, 0) :]
            if not len(tokens):
                del self._leads[response]
            elif start <= position:
                self._leads[response] = position, tokens
                self._add(response, position, tokens[: query.max_tokens[row]])

    def _add(self, response: int, position: int, tokens: Int32Array) -> None:
        chain = DraftChains(
            tokens[None], np.array([len(tokens)], np.int32), np.ones((1, len(tokens)), np.float32)
        )
        where = np.array([[response], [position]], np.int64)
        self._trees.add(Source.LEAD, where[0], where[1], chain, anew=True)

    def close(self, response: int) -> None:
        """A response has ended."""
        self._leads.pop(response, None)

    def clear(self) -> None:
        """All responses have ended."""
        self._leads.clear()
