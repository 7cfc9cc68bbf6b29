"""Trains a small drafter on the policy of a run that goes on meanwhile, whenever it is let (TLT 4.2, spot training).

Everything passes through one folder, so that either side may stop at any moment:

    lesson.safetensors      from the run: the policy's weights, and the responses of the step before
    samples/                responses that were heard of (sample_buffer.py)
    training.safetensors    the drafter in training, with its optimizers (training_folder.py)

What the target thinks is computed here, by the newest weights, of the responses that are drawn and of no others: there
are more of them than time. Called by spot_process.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from paceline.distillation import checkpoints
from paceline.distillation.checkpoints import CheckpointWriter, Note
from paceline.distillation.methods import METHODS, Objective, build_network, compute_loss
from paceline.distillation.packing import Pack, Sample, pack_samples
from paceline.distillation.sample_buffer import SampleBuffer
from paceline.distillation.target import load_model, read_states, share
from paceline.distillation.trainer import NETWORK, Trainer
from paceline.distillation.training_folder import FILE_NAME, Description, describe, read_folder
from paceline.errors import CheckpointError

LESSON, SAMPLES = "lesson.safetensors", "samples"
POLICY = "policy."
"""Before the names of the policy's weights in a lesson."""
STEP = "step"

PACK_TOKENS = 2048
"""Of an optimizer step."""
WARM_UP_TOKENS = 40_000
"""Tokens over which the learning rate of a new drafter rises."""
SAVE_EVERY_S = 2.0
"""Processor time that is lost with the process at most."""
MEMORY_BYTES, DISK_BYTES = 256 << 20, 1 << 30
"""Bounds of the sample buffer; a token takes 4 bytes."""


class SpotSettings(msgspec.Struct, frozen=True):
    """What a spot trainer is started with."""

    parent: int
    """Process without which it has nothing to do."""
    folder: str
    target: str
    """Folder of the policy as it was at first."""
    small_model: str
    """Folder of the drafter as it was at first."""
    temperature: float
    """At which responses are sampled."""
    rate: float
    """Learning rate."""


def make_lesson(
    step: int, policy: Mapping[str, Tensor], responses: Sequence[tuple[Sequence[int], int]]
) -> tuple[dict[str, Tensor], Note]:
    """What a trainer is told.

    step: the training step that the responses are of. policy: newest weights, by the checkpoint's names.
    responses: (prompt and response, number of prompt tokens).
    """
    tensors = {f"{POLICY}{name}": tensor.detach() for name, tensor in policy.items()}
    tensors["ids"] = torch.tensor([token for ids, _ in responses for token in ids], dtype=torch.int32)
    tensors["shapes"] = torch.tensor([(len(ids), prompt) for ids, prompt in responses]).reshape(-1, 2)
    return tensors, {STEP: str(step)}


class SpotTrainer:
    """One per process. Raises CheckpointError for models that are not there or do not fit what the folder holds."""

    def __init__(self, settings: SpotSettings, clock: Callable[[], float] = time.process_time) -> None:
        self._folder, self._rate, self._clock = Path(settings.folder), settings.rate, clock
        self._target = load_model(Path(settings.target)).eval().requires_grad_(False)
        self._shared = share(self._target)
        method = METHODS["osd"].with_loss("forward_kl").at_temperature(settings.temperature)
        network = build_network(method, self._shared, Path(settings.small_model))
        self._trainer = Trainer(network, self._shared, method.objective)
        self._made = describe(network, "osd", method.objective.loss, settings.temperature, ())
        if (found := read_folder(self._folder)) is not None:
            self._trainer.load(found[0])
            self._made = found[1]
        self._buffer = SampleBuffer(self._folder / SAMPLES, memory_bytes=MEMORY_BYTES, disk_bytes=DISK_BYTES)
        self._writer = CheckpointWriter(self._folder / FILE_NAME)
        self._heard_ns = 0
        self._begun_s = self._made.trained_s
        self._saved_s = self._clock()
        self._disagreement = Objective("disagreement", temperature=method.objective.temperature)

    def learn(self) -> bool:
        """Hear what is new, and learn from one pack; False if there is nothing to learn from yet."""
        self._hear()
        drawn = self._buffer.draw(PACK_TOKENS)
        if not drawn:
            return False
        states = read_states(self._target, [sample.ids.long() for sample in drawn], ())
        pack = pack_samples(
            [
                Sample(sample.ids, sample.num_prompt_tokens, state)
                for sample, state in zip(drawn, states, strict=True)
            ]
        )
        if self._clock() - self._saved_s >= SAVE_EVERY_S:
            self._save(pack)
        warmth = min(self._made.trained_tokens / WARM_UP_TOKENS, 1.0)
        self._trainer.step(pack, self._rate * max(warmth, 0.05))
        self._made = msgspec.structs.replace(
            self._made, trained_tokens=self._made.trained_tokens + pack.num_tokens
        )
        return True

    def close(self) -> None:
        """Wait until what was saved last is in its file."""
        self._writer.close()

    def _hear(self) -> None:
        """Take in the lesson, if there is a new one."""
        path = self._folder / LESSON
        try:
            written_ns = path.stat().st_mtime_ns
        except FileNotFoundError:
            return
        if written_ns == self._heard_ns or (lesson := checkpoints.read(path)) is None:
            return
        self._heard_ns = written_ns
        tensors, note = lesson
        policy = {n.removeprefix(POLICY): t for n, t in tensors.items() if n.startswith(POLICY)}
        unknown = self._target.load_state_dict(policy, strict=False).unexpected_keys
        if unknown:
            raise CheckpointError(
                f"{self._folder}: the policy has no weight {unknown[0]!r}: begin the run anew"
            )
        # A run that went back to its checkpoint repeats steps.
        self._buffer.begin_step(max(int(note[STEP]), self._buffer.step))
        shapes: list[list[int]] = tensors["shapes"].tolist()
        parts = tensors["ids"].split([length for length, _ in shapes])
        for number, (ids, (_, num_prompt_tokens)) in enumerate(zip(parts, shapes, strict=True)):
            self._buffer.add(number, Sample(ids.clone(), num_prompt_tokens, torch.empty(len(ids), 0)))
        self._buffer.begin_step(self._buffer.step + 1)

    def _save(self, coming: Pack) -> None:
        """Save the drafter, and how often it agrees with the target on the pack that it learns from next."""
        with torch.no_grad():
            network = self._trainer.network
            disagreement = float(compute_loss(network, self._shared, coming, self._disagreement))
        self._made = msgspec.structs.replace(
            self._made, trained_s=self._begun_s + self._clock(), agreement=1.0 - disagreement
        )
        self._writer.save(self._trainer.tensors(), self._made.note())
        self._saved_s = self._clock()


def small_model_weights(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A small language model's weights out of a training file, by the names of its checkpoint."""
    before = f"{NETWORK}model."
    return {name.removeprefix(before): t for name, t in tensors.items() if name.startswith(before)}


def read_drafter(folder: Path) -> tuple[dict[str, Tensor], Description] | None:
    """The weights of the drafter in training, and what it is; None before the first."""
    found = read_folder(folder)
    return None if found is None else (small_model_weights(found[0]), found[1])
