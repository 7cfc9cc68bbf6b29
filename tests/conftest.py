"""What holds for all tests."""

from __future__ import annotations

import gc
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from paceline.garbage import uncollected

FOLDERS = Path(__file__).parent
SLOWEST_FIRST = ("fleet", "engine", "integrations", "contracts", "property", "unit", "golden")

settings.register_profile("paceline", deadline=None)  # wall time says nothing on a shared machine
settings.load_profile("paceline")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the folders."""
    items.sort(key=lambda item: SLOWEST_FIRST.index(item.path.relative_to(FOLDERS).parts[0]))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Import all test modules, and what they import, without looking for garbage."""
    with uncollected():
        return (yield)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep together what shares engines when several processes run the tests."""
    from processes import ByEngines

    return ByEngines(config, log)


@pytest.fixture(scope="session")
def little_to_collect() -> Iterator[None]:
    """Garbage is looked for among what tests make, not in the modules that they import: vLLM collects all of it several
    times for every engine, seconds each with the objects of so many modules, and thaws what was frozen when one ends.
    """
    with uncollected():
        import vllm.v1.engine.llm_engine
        import vllm.v1.worker.cpu_worker  # noqa: F401

    gc.collect()
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("freeze", "unfreeze"):
            patch.setattr(gc, name, lambda: None)
        yield
    gc.unfreeze()
