"""A helping process that ends: when it is started again, and when it is given up."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from paceline.drafting import child_process
from paceline.drafting.child_process import MAX_FAILED_STARTS, ChildProcess


def ends_again_and_again(has_worked: Callable[[int], bool] | None) -> ChildProcess:
    """A process that ends by itself, which is noticed long afterwards, as often as it is started."""
    child = ChildProcess("helper", "paceline.no_such_module", (), None, 60.0, has_worked)
    for _ in range(3 * MAX_FAILED_STARTS):
        child._process.wait()
        child.check()
    child.close()
    return child


@pytest.fixture
def _slow_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two looks at the clock there are 100 seconds."""
    clock = SimpleNamespace(monotonic=itertools.count(0.0, 100.0).__next__, time_ns=time.time_ns)
    monkeypatch.setattr(child_process, "time", clock)


@pytest.mark.usefixtures("_slow_looks")
def test_what_never_works_is_given_up_however_late_its_end_is_noticed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    began_ns, asked = time.time_ns(), []
    child = ends_again_and_again(lambda since_ns: bool(asked.append(since_ns)))
    assert child.num_starts == MAX_FAILED_STARTS
    assert "the helper ended 5 times before it had done anything: going on without" in caplog.text
    assert asked == sorted(asked)
    assert began_ns <= asked[0] < asked[-1] <= time.time_ns()


@pytest.mark.usefixtures("_slow_looks")
def test_what_has_worked_is_started_again(caplog: pytest.LogCaptureFixture) -> None:
    assert ends_again_and_again(lambda since_ns: True).num_starts == 1 + 3 * MAX_FAILED_STARTS
    assert not caplog.text
