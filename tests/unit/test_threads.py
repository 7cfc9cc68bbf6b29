"""What goes wrong within a loop that is shared among threads reaches who called."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

WITHOUT_MEMORY = """
import resource, sys
import numpy as np
from paceline._decoder import Decoder

def weights(*shape):
    return np.zeros(shape, np.float32)

width, positions, requests, count = 16, 200_000, 16, 150_000
layer = weights(48, width), None, weights(width, 16), None, weights(32, width), weights(width, width)
angles = weights(positions, 8)
model = Decoder(
    weights(32, width), weights(32, width), weights(width), [layer], angles, angles, 1e-5, 1.0, 1, requests, "bfloat16"
)
rows, ids, logits = np.arange(requests), np.zeros(requests * count, np.int64), weights(requests, 32)
used = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + (260 << 20),) * 2)
try:
    model.feed(rows, np.zeros(requests, np.int64), np.full(requests, count), ids, int(sys.argv[1]), logits)
except MemoryError:
    print("refused")
"""


@pytest.mark.parametrize("num_threads", [1, 2])
def test_what_has_no_room_is_an_error_and_no_end(num_threads: int) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_MEMORY, str(num_threads)],
        env={**os.environ, "OMP_NUM_THREADS": str(num_threads)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (ran.returncode, ran.stdout) == (0, "refused\n"), ran.stderr[-2000:]
