"""Which tests run in one process when several run them: those that share engines."""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling

TRAINED_HEAD = ("tests/engine/test_draft_head.py", "tests/engine/test_exported_heads.py")
"""Modules whose heads learn from what one target writes (trained_head.py)."""


def engines_of(nodeid: str) -> str:
    """What a test shares its engines with: its module, all of the fleet's tests, or those with a trained head."""
    module = nodeid.partition("::")[0]
    if module in TRAINED_HEAD:
        return TRAINED_HEAD[0]
    return "tests/fleet" if module.startswith("tests/fleet/") else module


class ByEngines(LoadScopeScheduling):
    """pytest-xdist's order, by what shares engines.

    Its own `--dist loadgroup` does not see the groups of pytest 9.2: it writes them into a name that nobody reads.
    """

    def _split_scope(self, nodeid: str) -> str:
        return engines_of(nodeid)
