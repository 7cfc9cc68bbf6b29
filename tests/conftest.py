"""What holds for all tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

FOLDERS = Path(__file__).parent
SLOWEST_FIRST = ("fleet", "engine", "integrations", "contracts", "property", "unit", "golden")

settings.register_profile("paceline", deadline=None)  # wall time says nothing on a shared machine
settings.load_profile("paceline")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the folders, and keep together what shares engines when several processes run the tests.

    One process runs all tests of a module, and one all of the fleet.
    """
    items.sort(key=lambda item: SLOWEST_FIRST.index(item.path.relative_to(FOLDERS).parts[0]))
    for item in items:
        module = item.path.relative_to(FOLDERS)
        group = "fleet" if module.parts[0] == "fleet" else str(module)
        item.add_marker(pytest.mark.xdist_group(group))
