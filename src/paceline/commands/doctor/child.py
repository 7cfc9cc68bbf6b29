"""A check in a process of its own: in each, vLLM starts anew, with the environment of that moment."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from paceline.commands.inputs.launch import describe_failure, hush
from paceline.errors import EngineError, PacelineError

T = TypeVar("T")


def in_child(function: Callable[..., T], *args: object) -> T:
    """What a function returns in a fresh process, whose output is dropped. Raises EngineError if it fails or dies."""
    pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
    try:
        return pool.submit(_call, function, *args).result()
    except BrokenProcessPool as error:
        raise EngineError("the engine's process died") from error
    finally:
        pool.shutdown(cancel_futures=True)


def _call(function: Callable[..., T], *args: object) -> T:
    # Before torch is loaded. Threads that sleep while they wait: on a busy machine spinning takes three times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with hush():
        try:
            return function(*args)
        except PacelineError:
            raise
        except Exception as error:
            raise EngineError(f"the engine failed: {describe_failure(error)}") from None
