"""vLLM's runner V2 throws our dice: its Triton functions, run in Triton's interpreter, against NumPy.

The kernel's source is executed as installed, in a subprocess (the environment chooses the interpreter before
Triton is imported), with plain Triton for `vllm.triton_utils`, which vLLM blanks on a machine without a GPU.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline import dice

NUM_ROWS, VOCAB = 48, 2500

PROGRAM = """
import importlib.util, json, sys, types
import numpy as np, torch, triton
import triton.language as tl

doors = types.ModuleType("vllm.triton_utils")
doors.tl, doors.triton = tl, triton
sys.modules["vllm"], sys.modules["vllm.triton_utils"] = types.ModuleType("vllm"), doors
spec = importlib.util.spec_from_file_location("v2_gumbel", sys.argv[1])
v2 = importlib.util.module_from_spec(spec)
sys.modules["v2_gumbel"] = v2
spec.loader.exec_module(v2)
words_of, uniform_of, noised = v2.murmur3_hash32, v2.murmur3_uniform32, v2._log1p_neg_stable

@triton.jit
def describe(seeds, positions, words, uniforms, noises, SIZE: tl.constexpr, VOCAB: tl.constexpr):
    row = tl.program_id(0)
    ids = tl.arange(0, SIZE)
    mask = ids < VOCAB
    seed, position = tl.load(seeds + row), tl.load(positions + row)
    uniform = uniform_of(seed, position, ids)
    tl.store(words + row * VOCAB + ids, words_of(seed, position, ids).to(tl.int64), mask=mask)
    tl.store(uniforms + row * VOCAB + ids, uniform, mask=mask)
    tl.store(noises + row * VOCAB + ids, -tl.log(-noised(uniform)), mask=mask)

batch = np.load(sys.argv[2])
seeds, inputs = torch.from_numpy(batch["keys"].view(np.int64)), torch.from_numpy(batch["positions"] - 1)
logits = torch.from_numpy(batch["logits"])
num_rows, vocab = logits.shape
words = torch.zeros(num_rows, vocab, dtype=torch.int64)
uniforms, noises = torch.zeros(num_rows, vocab), torch.zeros(num_rows, vocab)
size = triton.next_power_of_2(vocab)
describe[(num_rows,)](seeds, inputs, words, uniforms, noises, SIZE=size, VOCAB=vocab)
temperatures, row_of = torch.from_numpy(batch["temperatures"]), torch.arange(num_rows)
tokens = v2.gumbel_sample(logits, row_of, temperatures, seeds, inputs, apply_temperature=True, is_drafting=False)
np.savez(sys.argv[3], words=words, uniforms=uniforms, noises=noises, tokens=tokens)
"""


def kernel_path() -> Path:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        pytest.skip("vllm is not installed")
    return Path(found.submodule_search_locations[0]) / "v1/worker/gpu/sample/gumbel.py"


def make_batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    keys = rng.integers(0, 2**64, NUM_ROWS, dtype=np.uint64)
    keys[:3] = (0, 2**63, 2**64 - 1)
    positions = rng.integers(1, 100_000, NUM_ROWS)
    positions[:2] = (1, 2**31)
    logits = (3 * rng.standard_normal((NUM_ROWS, VOCAB))).astype(np.float32)
    temperatures = np.resize(np.array([1.0, 0.7, 0.0, 1.6], np.float32), NUM_ROWS)
    return {"keys": keys, "positions": positions, "logits": logits, "temperatures": temperatures}


@pytest.fixture(scope="module")
def v2(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the installed kernel computes for `make_batch`."""
    kernel = kernel_path()
    folder = tmp_path_factory.mktemp("v2")
    np.savez(folder / "batch.npz", **make_batch())
    (folder / "program.py").write_text(PROGRAM)  # a file, because the interpreter reads its source back
    command = [sys.executable, folder / "program.py", kernel, folder / "batch.npz", folder / "v2.npz"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, json.dumps(done.stderr[-3000:])
    return dict(np.load(folder / "v2.npz"))


def test_hash_bits_are_equal(v2: dict[str, Any]) -> None:
    batch = make_batch()
    words = dice.hash_words(batch["keys"][:, None], batch["positions"][:, None], np.arange(VOCAB))
    np.testing.assert_array_equal(v2["words"], words)
    np.testing.assert_array_equal(v2["uniforms"].view(np.uint32), dice._uniform(words).view(np.uint32))


def test_noise_agrees_to_the_last_places(v2: dict[str, Any]) -> None:
    """The logarithm differs by device; where the noise is near 0 the bound is absolute."""
    batch = make_batch()
    noise = dice.gumbel(batch["keys"][:, None], batch["positions"][:, None], np.arange(VOCAB))
    np.testing.assert_allclose(v2["noises"], noise, rtol=3e-7, atol=3e-7)


def test_tokens_are_equal(v2: dict[str, Any]) -> None:
    batch = make_batch()
    drawn = dice.sample(batch["logits"], batch["keys"], batch["positions"], batch["temperatures"])
    np.testing.assert_array_equal(v2["tokens"], drawn)
