"""Weights on their way to the workers: as arrays of bytes, which Ray shares between the processes of a node.

Torch's own tensors would be copied by every worker that reads them, and NumPy has no bfloat16. Packed by the driver,
unpacked by the workers; imports torch when called.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch


class PackedTensor(NamedTuple):
    """A tensor's bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]


def pack_weights(weights: Iterable[tuple[str, torch.Tensor]]) -> list[PackedTensor]:
    """Weights on any device, as bytes in host memory."""
    import torch

    packed = []
    for name, tensor in weights:
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        data = flat.view(torch.uint8).numpy()
        packed.append(PackedTensor(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data))
    return packed


def unpack_weights(packed: Iterable[PackedTensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights again. They share memory with `packed`: only to be read."""
    import torch

    for name, dtype, shape, data in packed:
        with warnings.catch_warnings():
            # The memory is read-only, and so is what is done with it.
            warnings.simplefilter("ignore", UserWarning)
            flat = torch.from_numpy(data)
        yield name, flat.view(getattr(torch, dtype)).reshape(shape)
