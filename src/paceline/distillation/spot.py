"""Trains a small drafter on the policy of a run that goes on meanwhile, whenever it is let (TLT 4.2, spot training).

Everything passes through one folder, so that either side may stop at any moment:

    lesson.safetensors      from the run: the policy's weights, and responses of the step before, for a head with states
    samples/                responses that were heard of (sample_buffer.py)
    training.safetensors    the drafter in training, with its optimizers (training_folder.py)

A draft head learns from the hidden states that the engine has read out of its own steps, one update older than the
weights. For a small language model the states are computed here, by the newest weights, of the responses that are drawn
and of no others: there are more of them than time. Called by spot_process.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file
from torch import Tensor

from paceline.distillation import checkpoints
from paceline.distillation.checkpoints import CheckpointWriter, Note
from paceline.distillation.export import drafter_weights
from paceline.distillation.methods import METHODS, Method, MethodName, Objective, build_network, compute_loss
from paceline.distillation.networks import Network, Shared, SmallModel
from paceline.distillation.packing import Pack, Sample, pack_samples
from paceline.distillation.sample_buffer import SampleBuffer
from paceline.distillation.target import load_model, read_states, share
from paceline.distillation.trainer import NETWORK, Trainer, load_network
from paceline.distillation.training_folder import FILE_NAME, Description, describe, read_folder
from paceline.drafting.drafter import read_fused_layers
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
"""Bounds of the sample buffer; a token takes 4 bytes, and the state of one as many as it has."""


class SpotSettings(msgspec.Struct, frozen=True):
    """What a spot trainer is started with."""

    parent: int
    """Process without which it has nothing to do."""
    folder: str
    target: str
    """Folder of the policy as it was at first."""
    method: MethodName
    """eagle, hass, eagle3: a head; osd: a small language model."""
    drafter: str
    """Folder of the drafter as it was at first."""
    temperature: float
    """At which responses are sampled."""
    rate: float
    """Learning rate."""
    compares: bool = False
    """Measure the drafter as it was at first beside the present one, which shows what training brings."""


def make_lesson(
    step: int, policy: Mapping[str, Tensor], samples: Sequence[Sample]
) -> tuple[dict[str, Tensor], Note]:
    """What a trainer is told.

    step: the training step that the samples are of, one at least. policy: newest weights, by the checkpoint's names.
    samples: for a head with the target's states, for a small language model with states of no width.
    """
    tensors = {f"{POLICY}{name}": tensor.detach() for name, tensor in policy.items()}
    tensors["ids"] = torch.cat([sample.ids.int() for sample in samples])
    tensors["states"] = torch.cat([sample.states for sample in samples])
    tensors["shapes"] = torch.tensor([(sample.num_tokens, sample.num_prompt_tokens) for sample in samples])
    return tensors, {STEP: str(step)}


class SpotTrainer:
    """One per process. Raises CheckpointError for models that are not there or do not fit what the folder holds."""

    def __init__(self, settings: SpotSettings, clock: Callable[[], float] = time.process_time) -> None:
        self._folder, self._rate, self._clock = Path(settings.folder), settings.rate, clock
        self._target = load_model(Path(settings.target)).eval().requires_grad_(False)
        self._shared = share(self._target)
        self._is_head = settings.method != "osd"
        method = METHODS[settings.method].at_temperature(settings.temperature)
        if not self._is_head:
            method = method.with_loss("forward_kl")
        network = _load_drafter(method, self._shared, Path(settings.drafter))
        self._first = (
            _load_drafter(method, self._shared, Path(settings.drafter)) if settings.compares else None
        )
        self._trainer = Trainer(network, self._shared, method.objective)
        fused = read_fused_layers(Path(settings.drafter)) if self._is_head else ()
        self._made = describe(network, settings.method, method.objective.loss, settings.temperature, fused)
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
        pack = pack_samples(drawn if self._is_head else self._think(drawn))
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

    def _think(self, samples: Sequence[Sample]) -> list[Sample]:
        """The samples with the states of the newest target."""
        states = read_states(self._target, [sample.ids.long() for sample in samples], ())
        return [
            Sample(sample.ids, sample.num_prompt_tokens, state)
            for sample, state in zip(samples, states, strict=True)
        ]

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
        lengths = [length for length, _ in shapes]
        parts = zip(tensors["ids"].split(lengths), tensors["states"].split(lengths), shapes, strict=True)
        for number, (ids, states, (_, num_prompt_tokens)) in enumerate(parts):
            self._buffer.add(number, Sample(ids.clone(), num_prompt_tokens, states.clone()))
        self._buffer.begin_step(self._buffer.step + 1)

    def _save(self, coming: Pack) -> None:
        """Save the drafter, and how often it agrees with the target on the pack that it learns from next."""
        self._made = msgspec.structs.replace(
            self._made,
            agreement=self._measure(self._trainer.network, coming),
            first_agreement=None if self._first is None else self._measure(self._first, coming),
            trained_s=self._begun_s + self._clock(),
        )
        self._writer.save(self._trainer.tensors(), self._made.note())
        self._saved_s = self._clock()

    def _measure(self, network: Network, pack: Pack) -> float:
        """How often a drafter agrees with the target."""
        with torch.no_grad():
            return 1.0 - float(compute_loss(network, self._shared, pack, self._disagreement))


def _load_drafter(method: Method, shared: Shared, folder: Path) -> Network:
    """The network that a checkpoint holds. Raises CheckpointError for a head of another target."""
    if method.network is SmallModel:
        return build_network(method, shared, folder)
    network = build_network(method, shared, None)
    weights = load_file(folder / "model.safetensors")
    load_network(network, {f"{NETWORK}{name}": weight for name, weight in weights.items()})
    return network


def read_drafter(folder: Path) -> tuple[dict[str, Tensor], Description] | None:
    """The weights of the drafter in training, and what it is; None before the first."""
    found = read_folder(folder)
    return None if found is None else (drafter_weights(found[0], found[1].method), found[1])
