"""Calls for whose result a host waits until the device has done all that it was given, by where they are made.

All tensors are on the CPU here, where nothing waits; so every such call counts, whatever it reads. What plain vLLM
calls too is no cost of Paceline's: the tests subtract it, place by place.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import triton
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

READS = ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "cpu")
"""Methods of tensors that bring a value to the host."""
OPERATIONS = ("_local_scalar_dense", "nonzero", "equal", "masked_select", "unique", "is_nonzero")
"""Operations whose result, or its size, the host needs."""
OUTSIDE = tuple(str(Path(str(module.__file__)).parent) for module in (torch, triton))


class _Operations(TorchDispatchMode):
    """Below Python's own calls, so that none hides in another."""

    def __init__(self, found: set[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        masks = name in ("index", "index_put_") and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if masks or any(word in name for word in OPERATIONS):
            _note(self.found, name)
        return func(*args, **(kwargs or {}))


class _Reads(TorchFunctionMode):
    """Copies to the host: those between two CPU tensors reach no operation of a dispatch mode."""

    def __init__(self, found: set[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        copies = name == "copy_" or (name == "to" and _names_the_host(*args[1:], *kwargs.values()))
        if name in READS or (copies and not kwargs.get("non_blocking") and True not in args[2:]):
            _note(self.found, name)
        return func(*args, **kwargs)


def _names_the_host(*values: Any) -> bool:
    return any(
        isinstance(value, str | torch.device) and torch.device(value).type == "cpu" for value in values
    )


def _note(found: set[str], name: str) -> None:
    """Remember a call, with the innermost place outside torch; what Triton's interpreter does is a kernel's."""
    frame = sys._getframe(2)
    while frame.f_back is not None and (
        frame.f_code.co_filename.startswith(OUTSIDE[0]) or frame.f_code.co_filename == __file__
    ):
        frame = frame.f_back
    if not frame.f_code.co_filename.startswith(OUTSIDE[1]):
        found.add(f"{name} in {frame.f_code.co_filename}:{frame.f_lineno}")


@contextmanager
def watching(found: set[str]) -> Iterator[None]:
    """Note the calls made meanwhile."""
    with _Operations(found), _Reads(found):
        yield


def watch(owner: Any, *names: str) -> set[str]:
    """The waits of these methods of an object from now on, a set that grows."""
    found: set[str] = set()
    for name in names:
        setattr(owner, name, _watched(getattr(owner, name), found))
    return found


def _watched(inner: Any, found: set[str]) -> Any:
    def watched(*args: Any, **kwargs: Any) -> Any:
        with watching(found):
            return inner(*args, **kwargs)

    return watched
