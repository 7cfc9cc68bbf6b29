"""Trains a small drafter on the policy of a run that goes on meanwhile, whenever it is let (TLT 4.2, spot training).

Everything passes through one folder, so that either side may stop at any moment:

    lesson.safetensors      from the run: the policy's weights, and responses of the step before, for a head with states
    samples/                responses that were heard of (sample_buffer.py)
    training.safetensors    the drafter in training, with its optimizers (training_folder.py)
    samples-I/, training-I.safetensors
                            the same of further trainers; together they train one drafter (team.py)
    used.safetensors        from the run: the drafter that its engines have

One response in twenty is not learned from: on these the drafter is measured, beside the one that the engines have. A
head is measured on the states that they came with, until newer ones take their place.

A draft head learns from the hidden states that the engine has read out of its own steps, one update older than the
weights. For a small language model the states are computed here, by the newest weights, of the responses that are drawn
and of no others: there are more of them than time. Called by spot_process.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from random import Random

import msgspec
import safetensors.torch
import torch
from safetensors.torch import load_file
from torch import Tensor

from paceline.distillation import checkpoints
from paceline.distillation.checkpoints import CheckpointWriter, Note
from paceline.distillation.export import drafter_weights
from paceline.distillation.methods import METHODS, Method, MethodName, Objective, build_network, compute_loss
from paceline.distillation.networks import Network, Shared, SmallModel
from paceline.distillation.packing import Pack, Sample, cut_contexts, pack_samples
from paceline.distillation.sample_buffer import SampleBuffer
from paceline.distillation.target import check_packs, load_model, read_states, share
from paceline.distillation.team import Changed, Team
from paceline.distillation.trainer import NETWORK, Trainer, load_network
from paceline.distillation.training_folder import (
    FILE_NAME,
    NOTE,
    USED_NAME,
    Description,
    describe,
    file_name,
    find_newest,
    read_folder,
)
from paceline.drafting.drafter import read_fused_layers
from paceline.errors import CheckpointError

LESSON, SAMPLES = "lesson.safetensors", "samples"
POLICY = "policy."
"""Before the names of the policy's weights in a lesson."""
STEP = "step"

PACK_TOKENS = 1024
"""Of an optimizer step."""
WARM_UP_TOKENS = 40_000
"""Tokens over which the learning rate rises."""
AVERAGING = 0.02
"""Share of each step in the weights that are saved and used (`Trainer`)."""
SAVE_EVERY_S = 2.0
"""Processor time that is lost with the process at most."""
MEMORY_BYTES, DISK_BYTES = 256 << 20, 1 << 30
"""Bounds of the sample buffer; a token takes 4 bytes, and the state of one as many as it has."""
NUM_STEPS = 4
"""Training steps of which samples are kept, the present one, which has none yet, among them: older ones are another
policy's."""
LEAST_TOKENS = 1 << 16
"""Of samples that older ones are kept for too: a drafter of steps with few responses would learn those by heart."""
HELD_OUT = 20
"""Of so many responses one is measured on, and not learned from."""
MEASURED_TOKENS = 2048
"""Of responses that were held out, at most, the newest first; a response that begins within is taken whole."""


_NOTE_BEGIN = b"\n"
"""Between the tensors and the note of a state, which has no line break itself."""


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
    is_given: bool = False
    """The drafter has learned before the run. As it was at first it is measured beside the present one, which shows
    what training brings."""
    index: int = 0
    """Of this trainer among the run's."""
    num_trainers: int = 1
    """Of the run. Each draws its own part of a lesson's responses first, so that together they see all."""


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


def growing_method(name: MethodName, temperature: float) -> Method:
    """How a drafter that grows beside a run is trained: a small language model by the forward KL, from which one that
    knows nothing learns fastest, a head as its method has it.
    """
    method = METHODS[name].at_temperature(temperature)
    return method.with_loss("forward_kl") if method.network is SmallModel else method


class SpotTrainer:
    """One per process. Raises CheckpointError for models that are not there or do not fit what the folder holds."""

    def __init__(self, settings: SpotSettings, clock: Callable[[], float] = time.process_time) -> None:
        self._folder, self._rate, self._clock = Path(settings.folder), settings.rate, clock
        self._target = load_model(Path(settings.target)).eval().requires_grad_(False)
        self._shared = share(self._target)
        self._is_head = settings.method != "osd"
        if not self._is_head:
            check_packs(self._target)
        method = growing_method(settings.method, settings.temperature)
        self._build = partial(_load_drafter, method, self._shared, Path(settings.drafter))
        network = self._build()
        self._first = self._build() if settings.is_given else None
        self._used = self._first
        self._trainer = Trainer(
            network,
            self._shared,
            method.objective,
            averaging=AVERAGING,
            is_fresh=not settings.is_given,
        )
        fused = read_fused_layers(Path(settings.drafter)) if self._is_head else ()
        self._made = describe(network, settings.method, method.objective.loss, settings.temperature, fused)
        self._index, self._num_trainers = settings.index, settings.num_trainers
        self._team = Team(self._folder, settings.index)
        self._catch_up()
        samples = f"{SAMPLES}-{settings.index}" if settings.index else SAMPLES
        self._buffer = SampleBuffer(
            self._folder / samples,
            memory_bytes=MEMORY_BYTES,
            disk_bytes=DISK_BYTES,
            num_steps=NUM_STEPS,
            least_tokens=LEAST_TOKENS,
        )
        self._random = Random(settings.index)
        self._held: list[Sample] = []  # newest first
        self._exam: Pack | None = None  # of these; for a small model as they are to the present policy
        self._writer = CheckpointWriter(self._folder / file_name(settings.index))
        self._heard_ns = self._used_ns = 0
        self._saved_s = self._counted_s = self._clock()  # loading is not training
        self._disagreement = Objective("disagreement", temperature=method.objective.temperature)

    def learn(self) -> bool:
        """Hear what is new, and learn from one pack and what others learn from; False if there is nothing yet."""
        self._hear()
        if not self._team.join(self._tell_state, self._take_state, self._catch_up):
            return True
        drawn = self._buffer.draw(PACK_TOKENS)
        if not drawn and self._team.size == 1:
            return False
        if self._team.leads and self._clock() - self._saved_s >= SAVE_EVERY_S:
            self._save()
        num_tokens = num_decided = 0
        if drawn:
            pack = pack_samples(
                cut_contexts(drawn, self._random, PACK_TOKENS) if self._is_head else self._think(drawn)
            )
            self._trainer.look_at(pack)
            num_tokens, num_decided = pack.num_tokens, len(pack.deciding)
        now_s = self._clock()
        try:
            num_tokens, spent_s = self._team.average(
                list(self._trainer.network.parameters()), num_decided, num_tokens, now_s - self._counted_s
            )
        except Changed:
            self._trainer.forget()
            return True
        self._counted_s = now_s
        if num_tokens:
            warmth = min(self._made.trained_tokens / WARM_UP_TOKENS, 1.0)
            self._trainer.move(self._rate * max(warmth, 0.05))
        self._made = msgspec.structs.replace(
            self._made,
            trained_tokens=self._made.trained_tokens + num_tokens,
            trained_s=self._made.trained_s + spent_s,
        )
        return num_tokens > 0

    def close(self) -> None:
        """Wait until what was saved last is in its file."""
        self._writer.close()

    def _catch_up(self) -> None:
        """Go on from the newest checkpoint, where another trainer has come further than this one."""
        found = read_folder(self._folder, find_newest(self._folder))
        if found is not None and found[1].trained_tokens > self._made.trained_tokens:
            self._trainer.load(found[0])
            self._made = found[1]

    def _tell_state(self) -> bytes:
        tensors = {name: tensor.contiguous() for name, tensor in self._trainer.tensors().items()}
        state: bytes = safetensors.torch.save(tensors)
        return state + _NOTE_BEGIN + self._made.note()[NOTE].encode()

    def _take_state(self, state: bytes) -> None:
        tensors, _, note = state.rpartition(_NOTE_BEGIN)
        self._trainer.load(safetensors.torch.load(tensors))
        self._made = msgspec.json.decode(note, type=Description)

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
        written_ns = _written_ns(path)
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
        step = int(note[STEP])
        self._buffer.begin_step(max(step, self._buffer.step))
        shapes: list[list[int]] = tensors["shapes"].tolist()
        lengths = [length for length, _ in shapes]
        parts = zip(tensors["ids"].split(lengths), tensors["states"].split(lengths), shapes, strict=True)
        held = []
        for number, (ids, states, (_, num_prompt_tokens)) in enumerate(parts):
            sample = Sample(ids.clone(), num_prompt_tokens, states.clone())
            if is_held_out(step, number, len(shapes), is_first=not self._held):
                held.append(sample)
                self._buffer.discard(number)  # a trainer that was killed may have taken it for another one
            else:
                is_own = number % self._num_trainers == self._index
                self._buffer.add(number, sample, comes_later=not is_own)
        self._held = _first_of([*held, *self._held], MEASURED_TOKENS)
        self._exam = None
        self._buffer.begin_step(self._buffer.step + 1)

    def _look_at_engines(self) -> None:
        """Read the drafter that the engines have, if they have got another one."""
        path = self._folder / USED_NAME
        written_ns = _written_ns(path)
        if written_ns == self._used_ns or (found := checkpoints.read(path)) is None:
            return
        self._used_ns, self._used = written_ns, self._build()
        load_network(self._used, found[0])

    def _save(self) -> None:
        """Save the drafter, and how often it and the one that the engines have agree with the target."""
        self._look_at_engines()
        first_agreement = self._measure(self._first)
        with self._trainer.averaged() as network:
            agreement = self._measure(network)
        self._made = msgspec.structs.replace(
            self._made,
            agreement=agreement,
            first_agreement=first_agreement,
            used_agreement=first_agreement if self._used is self._first else self._measure(self._used),
        )
        self._writer.save(self._trainer.tensors(), self._made.note())
        self._saved_s = self._clock()

    def _measure(self, network: Network | None) -> float | None:
        """How often a drafter agrees with the target on what was held out; None where either is missing.

        The target is the newest one for a small model; a head's states are those that the samples came with.
        """
        if network is None or not self._held:
            return None
        if self._exam is None:
            self._exam = pack_samples(self._held if self._is_head else self._think(self._held))
        with torch.no_grad():
            return 1.0 - float(compute_loss(network, self._shared, self._exam, self._disagreement))


def is_held_out(step: int, number: int, count: int, *, is_first: bool) -> bool:
    """Whether a response of a step's lesson is not learned from: one of each `HELD_OUT` of a run whose lessons all have
    `count`. Of the first lesson that is heard, should it have none of these, the middle one is, unless it is the only
    one.
    """
    first = (HELD_OUT // 2 - step * count) % HELD_OUT
    if is_first and first >= count > 1:
        return number == count // 2
    return number % HELD_OUT == first


def _first_of(samples: Sequence[Sample], num_tokens: int) -> list[Sample]:
    """The first samples, until they have so many tokens."""
    before = accumulate((sample.num_tokens for sample in samples), initial=0)
    return [sample for sample, have in zip(samples, before, strict=False) if have < num_tokens]


def _written_ns(path: Path) -> int:
    """When a file was written; 0: never."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _load_drafter(method: Method, shared: Shared, folder: Path) -> Network:
    """The network that a checkpoint holds. Raises CheckpointError for a head of another target."""
    if method.network is SmallModel:
        return build_network(method, shared, folder)
    network = build_network(method, shared, None)
    weights = load_file(folder / "model.safetensors")
    load_network(network, {f"{NETWORK}{name}": weight for name, weight in weights.items()})
    return network


def read_drafter(folder: Path, name: str = FILE_NAME) -> tuple[dict[str, Tensor], Description] | None:
    """The weights of a drafter of the folder, by the name of its file, and what it is; None before the first."""
    found = read_folder(folder, name)
    return None if found is None else (drafter_weights(found[0], found[1].method), found[1])
