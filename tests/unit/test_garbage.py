"""Garbage is left alone for a while, and no longer."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from paceline.garbage import uncollected


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    gc.enable()


def test_nothing_is_collected_meanwhile() -> None:
    with uncollected(), uncollected():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_it_is_on_again_after_an_error() -> None:
    @uncollected()
    def load() -> None:
        assert not gc.isenabled()
        raise ImportError

    with pytest.raises(ImportError):
        load()
    assert gc.isenabled()


def test_who_has_switched_it_off_finds_it_off() -> None:
    gc.disable()
    with uncollected():
        pass
    assert not gc.isenabled()
