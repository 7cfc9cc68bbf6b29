"""Which tests run in one process when several run them: those that share engines."""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling


def engines_of(nodeid: str) -> str:
    """What a test shares its engines with: its module, or all of the fleet's tests."""
    module = nodeid.partition("::")[0]
    return "tests/fleet" if module.startswith("tests/fleet/") else module


class ByEngines(LoadScopeScheduling):
    """pytest-xdist's order, by what shares engines.

    Its own `--dist loadgroup` does not see the groups of pytest 9.2: it writes them into a name that nobody reads.
    """

    def _split_scope(self, nodeid: str) -> str:
        return engines_of(nodeid)
