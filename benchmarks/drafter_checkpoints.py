"""How long saving holds a drafter's training up: selective and asynchronous against a full synchronous save (TLT 6.4).

    python benchmarks/drafter_checkpoints.py --json benchmarks/results/drafter_checkpoints.json

An EAGLE head of the prose policy (8192 ids) is trained, and saved after every few packs. `full` writes it with the
target's embedding and head that it uses, once where they are one tensor; `selective` writes what training changes;
`asynchronous` copies that and writes it in the background. All three have the optimizer's state in them and ask the
disk to keep the file (fsync). blocked_ms: time in the call, median of all saves; run_s: time of the whole run.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from harness import median, parser, publish
from pairs import PAIRS
from torch import Tensor

from paceline.distillation.checkpoints import CheckpointWriter, write
from paceline.distillation.methods import METHODS, build_network
from paceline.distillation.networks import Shared
from paceline.distillation.packing import Pack, Sample, pack_samples
from paceline.distillation.spot import AVERAGING
from paceline.distillation.target import load_model, share
from paceline.distillation.trainer import Trainer

SYSTEMS = ("none", "full", "selective", "asynchronous")
COLUMNS = ("system", "blocked_ms", "blocked_range_ms", "ratio", "run_s", "file_mb")
DOCUMENT_TOKENS = 128


def make_pack(shared: Shared, num_tokens: int) -> Pack:
    """Random tokens and states: what is learned does not matter here."""
    vocab, hidden = shared.head.shape
    return pack_samples(
        [
            Sample(torch.randint(vocab, (DOCUMENT_TOKENS,)), 1, torch.randn(DOCUMENT_TOKENS, hidden))
            for _ in range(num_tokens // DOCUMENT_TOKENS)
        ]
    )


def frozen_tensors(shared: Shared) -> dict[str, Tensor]:
    """What a full checkpoint of the head has besides."""
    tied = shared.embedding.data_ptr() == shared.head.data_ptr()
    return {"embedding": shared.embedding} | ({} if tied else {"head": shared.head})


def train_and_save(
    trainer: Trainer, pack: Pack, save: Callable[[], None], saves: int, steps: int
) -> list[float]:
    """`saves` saves, each behind so many steps. Seconds that each took of training's time."""
    blocked_s = []
    for _ in range(saves):
        for _ in range(steps):
            trainer.step(pack, 1e-4)
        began_s = time.perf_counter()
        save()
        blocked_s.append(time.perf_counter() - began_s)
    return blocked_s


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(1)
    shared = share(load_model(PAIRS["prose"].policy))
    method = METHODS["eagle"]
    trainer = Trainer(build_network(method, shared, None), shared, method.objective, averaging=AVERAGING)
    pack = make_pack(shared, options.pack_tokens)
    trainer.step(pack, 1e-4)
    blocked: dict[str, list[float]] = {system: [] for system in SYSTEMS}
    runs: dict[str, list[float]] = {system: [] for system in SYSTEMS}
    sizes = dict.fromkeys(SYSTEMS, 0.0)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = Path(folder) / "state.safetensors"
        for repetition in range(options.repetitions):
            for system in SYSTEMS if repetition % 2 == 0 else reversed(SYSTEMS):
                with CheckpointWriter(path) as writer:
                    save = {
                        "none": lambda: None,
                        "full": lambda: write(path, trainer.tensors() | frozen_tensors(shared), {}),
                        "selective": lambda: write(path, trainer.tensors(), {}),
                        "asynchronous": lambda: writer.save(trainer.tensors(), {}),
                    }[system]
                    began_s = time.perf_counter()
                    blocked[system] += train_and_save(trainer, pack, save, options.saves, options.steps)
                    runs[system].append(time.perf_counter() - began_s)
                if path.is_file():
                    sizes[system] = path.stat().st_size / 1e6
                    path.unlink()
    full_s = median(blocked["full"])
    rows = [
        {
            "system": system,
            "blocked_ms": 1000 * median(blocked[system]),
            "blocked_range_ms": [1000 * edge for edge in statistics.quantiles(blocked[system], n=20)[::18]],
            "ratio": full_s / median(blocked[system]) if system != "none" else None,
            "run_s": median(runs[system]),
            "file_mb": sizes[system],
        }
        for system in SYSTEMS
    ]
    publish("drafter checkpoints", rows, COLUMNS, options)


def parse_arguments() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--pack-tokens", type=int, default=512)
    made.add_argument("--saves", type=int, default=10, help="in a run")
    made.add_argument("--steps", type=int, default=2, help="packs between two saves")
    made.add_argument("--repetitions", type=int, default=4)
    made.add_argument("--folder", type=Path, help="where checkpoints go; default: the temporary folder")
    return made.parse_args()


if __name__ == "__main__":
    main()
