"""How the tests are divided among processes."""

from __future__ import annotations

import pytest
from processes import TRAINED_HEAD, ByEngines, engines_of


def test_what_shares_engines_runs_in_one_process(pytestconfig: pytest.Config) -> None:
    """Two fleets at a time on two cores make each other's waiting times meaningless."""
    fleet = {engines_of(f"tests/fleet/test_{name}.py::test_it[{name}]") for name in "ab"}
    assert fleet == {"tests/fleet"}
    modules = [engines_of(f"tests/engine/test_{name}.py::test_it") for name in "aab"]
    assert modules == ["tests/engine/test_a.py"] * 2 + ["tests/engine/test_b.py"]
    assert {engines_of(f"{module}::test_it") for module in TRAINED_HEAD} == {TRAINED_HEAD[0]}
    assert all((pytestconfig.rootpath / module).is_file() for module in TRAINED_HEAD)
    if pytestconfig.pluginmanager.has_plugin("xdist"):
        assert pytestconfig.hook.pytest_xdist_make_scheduler.get_hookimpls()
    assert issubclass(ByEngines, object)
