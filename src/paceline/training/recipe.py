"""The recipe: everything that a training run depends on, as one YAML file.

Owns the schema; `config_file.py` reads it. Imports nothing heavy: a bad recipe is refused in a second. Called by the
`train` command; arguments.py makes TRL's arguments of a recipe.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field, model_validator

from paceline.config import MTP, EngineSettings, FleetSettings, RecordConfig, Section
from paceline.config_file import apply_override, read_yaml, validate
from paceline.engine.installed import is_cpu_build
from paceline.errors import ConfigError

Algorithm = Literal["grpo", "dapo", "dr_grpo", "gspo", "rloo"]

FREE_ON_RESUME = frozenset(
    {"steps", "evaluation", "compare", "output", "record", "fleet", "adaptive_drafter"}
)
"""Sections that a resumed run may change: none of them has a say in the tokens or the gradients."""


OWNED_BY_RECIPES = {
    "model": "the recipe's model is what is trained",
    "dtype": "set capacity.dtype",
    "max_num_seqs": "set capacity.max_num_seqs",
    "max_model_len": "it is lengths.prompt_tokens + lengths.response_tokens",
    "logprobs_mode": "training needs the log-probabilities of what was sampled from",
}
"""Arguments of the engine that `capacity.vllm` may not hold, and why."""

PATHS = (
    ("model",),
    ("engine", "model_drafter"),
    ("engine", "further_drafters"),
    ("engine", "draft_secret_file"),
    ("engine", "decision_log"),
    ("engine", "kv_pool", "directory"),
    ("engine", "kv_pool", "disk_directory"),
    ("task", "options", "prompts"),
)
"""Fields that are paths; relative ones are relative to the recipe's file."""


class TaskSection(Section):
    """Where prompts come from and how responses are rewarded (paceline.tasks)."""

    name: str
    """`countdown` or `gsm8k`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the task, see docs/countdown.md; checked when the task is loaded."""
    problems: int = Field(default=4096, ge=1)
    """Different prompts to train on, one step's at least; they are shuffled and, once used up, used again. A remainder
    too small for a step is left out of that pass."""
    seed: int = Field(default=0, ge=0)
    """Seed of the choice of training prompts."""


class AlgorithmSection(Section):
    """The policy-gradient method; the fields left out take the values of its paper. clip_low alone is both clips."""

    name: Algorithm = "grpo"
    """grpo; dapo (token-level loss, higher upper clip, truncated responses masked); dr_grpo (no length and no
    standard deviation in the normalisation); gspo (importance ratios per sequence); rloo (leave-one-out)."""
    kl: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    """Weight of the KL penalty towards the initial policy; above 0 costs a second model in memory."""
    clip_low: float | None = Field(default=None, gt=0.0)
    """Lower clip of the importance ratio, as a distance from 1; also the upper one where that is left out."""
    clip_high: float | None = Field(default=None, gt=0.0)
    """Upper clip of the importance ratio, as a distance from 1."""
    mask_truncated: bool | None = None
    """Leave responses that hit the length limit out of the loss."""


class BatchSection(Section):
    """How much one training step rolls out and how it is cut up for the gradient."""

    prompts: int = Field(default=8, ge=1)
    """Prompts per step."""
    group_size: int = Field(default=8, ge=2)
    """Responses per prompt; at least two, since advantages compare them."""
    micro_batch: int = Field(default=8, ge=1)
    """Responses per forward and backward pass; bounds the memory, changes nothing else."""
    updates: int = Field(default=1, ge=1)
    """Optimizer updates per rollout; above 1 the later ones are slightly off-policy."""

    @property
    def responses(self) -> int:
        """Responses per training step."""
        return self.prompts * self.group_size

    @property
    def accumulation(self) -> int:
        """Micro-batches per optimizer update."""
        return self.responses // (self.micro_batch * self.updates)

    @model_validator(mode="after")
    def _divides(self) -> BatchSection:
        share = self.micro_batch * self.updates
        if self.responses % share:
            raise ValueError(
                f"prompts x group_size = {self.responses} responses cannot be cut into "
                f"updates x micro_batch = {self.updates} x {self.micro_batch}; choose a micro_batch that divides "
                f"{self.responses / self.updates:g}"
            )
        return self


class LengthsSection(Section):
    """Limits in tokens; their sum is the engine's context length."""

    prompt_tokens: int = Field(default=256, ge=1)
    """Longest prompt; a longer one among the task's prompts stops the run before it begins."""
    response_tokens: int = Field(default=512, ge=1)
    """Longest response; longer ones are cut and finish with reason `length`."""


class SamplingSection(Section):
    """How responses are sampled. The loss knows the temperature only: for RL leave the other three off."""

    temperature: float = Field(default=1.0, gt=0.0, le=10.0)
    """Divides the logits, in the rollout and in the loss."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """1: off."""
    top_k: int = Field(default=0, ge=0)
    """0: off."""
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    """0: off."""


class OptimizerSection(Section):
    """AdamW and its schedule."""

    learning_rate: float = Field(default=1e-6, gt=0.0, le=1.0)
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after the warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Updates over which the learning rate rises from 0."""
    weight_decay: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    """AdamW's decoupled weight decay."""
    max_grad_norm: float = Field(default=1.0, gt=0.0, allow_inf_nan=False)
    """Gradients are scaled down to this norm."""
    beta2: float = Field(default=0.999, gt=0.0, lt=1.0)
    """AdamW's second-moment decay; 0.99 forgets faster, good for short runs."""
    precision: Literal["auto", "float32", "bfloat16"] = "float32"
    """Number format of the passes (bfloat16: autocast); master weights stay float32. auto: bfloat16 where the machine
    computes in it, float32 elsewhere."""


class AdaptiveDrafterSection(Section):
    """A drafter that learns while the run goes on (docs/drafter-training.md). It begins with `engine.model_drafter`, or
    anew where that is unset.
    """

    method: Literal["osd", "eagle", "hass", "eagle3"] = "osd"
    """osd: a small language model; eagle, hass, eagle3: a draft head, as in `paceline drafter train`."""
    hidden_size: int | None = Field(default=None, ge=64, multiple_of=64)
    """Width of a new small language model; unset: half the policy's."""
    layers: int = Field(default=2, ge=1)
    """Layers of a new small language model."""
    states_share: float = Field(default=0.25, gt=0.0, le=1.0)
    """A draft head learns from the hidden states of so many of the responses, of 32 of a step at least."""
    learning_rate: float | None = Field(default=None, gt=0.0, le=1.0)
    """Of the drafter, constant, as the policy that it follows does not stand still. None: 2e-3 for a fresh one, 2e-4
    for one that is given, which has learned already."""
    max_running: int = Field(default=8, ge=0)
    """On one engine it is trained in the tail of each rollout, while at most so many responses run. On a fleet it is
    trained while a worker has none."""
    trainers: int = Field(default=1, ge=1, le=16)
    """On a fleet: processes that train it together, each on the cores of a worker that has no responses."""


class EngineSection(EngineSettings):
    """Settings of each engine."""

    compiled: bool = True
    """Run the target through torch.compile. A run keeps to its mode: `--resume` with the other one is refused."""


class CapacitySection(Section):
    """Memory and number format of the rollout engine."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format of the engine's weights; float32: rollout and trainer log-probabilities agree to 1e-4."""
    max_num_seqs: int = Field(default=128, ge=1)
    """Most responses that decode at once; the rest wait."""
    kv_cache_mib: int = Field(default=1024, ge=16)
    """Key-value cache on the CPU backend, MiB; a GPU takes a share of its memory instead (vllm)."""
    vllm: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vLLM's EngineArgs, such as gpu_memory_utilization."""

    @model_validator(mode="after")
    def _vllm_is_further(self) -> CapacitySection:
        for name, value in self.vllm.items():
            if name in OWNED_BY_RECIPES:
                raise ValueError(f"vllm.{name} = {value!r}: leave it away, {OWNED_BY_RECIPES[name]}")
        return self


class EvaluationSection(Section):
    """Held-out solve rate, sampled at the training temperature with the same keys every time."""

    problems: int = Field(default=128, ge=0)
    """Held-out problems; 0 switches evaluation off."""
    every: int = Field(default=10, ge=1)
    """Steps between evaluations; also before the first step and after the last."""
    seed: int = Field(default=0, ge=0)
    """Seed of the problems and of the keys."""


class CompareSection(Section):
    """Side-by-side measurement: the same rollout without drafts, for the speed-up and for exactness."""

    every: int = Field(default=0, ge=0)
    """Steps between comparisons, 0 switches them off; each costs one plain rollout."""


class OutputSection(Section):
    """Checkpoints in the run folder."""

    save_every: int = Field(default=10, ge=1)
    """Steps between checkpoints; one is also written at the end and at an interruption."""
    keep: int = Field(default=2, ge=1)
    """Newest checkpoints that are kept."""


class Recipe(Section):
    """A training run. Relative paths in a file are relative to that file."""

    model_config = ConfigDict(ser_json_inf_nan="constants")  # for `recorded`, within `trl` and its like

    task: TaskSection
    model: str
    """Folder of the policy to start from, in Hugging Face format."""
    steps: int = Field(ge=1)
    """Training steps; each is one rollout."""
    seed: int = Field(default=0, ge=0, le=2**32 - 1)
    """Seed of the run: keys of all responses, order of the prompts."""
    algorithm: AlgorithmSection = AlgorithmSection()
    batch: BatchSection = BatchSection()
    lengths: LengthsSection = LengthsSection()
    sampling: SamplingSection = SamplingSection()
    optimizer: OptimizerSection = OptimizerSection()
    engine: EngineSection = EngineSection()
    capacity: CapacitySection = CapacitySection()
    """Of each engine."""
    fleet: FleetSettings | None = None
    """Roll out on several engines; unset: on one, in the trainer's process."""
    adaptive_drafter: AdaptiveDrafterSection | None = None
    """Grow a drafter, or keep one up with the policy; unset: drafters stay as they are."""
    evaluation: EvaluationSection = EvaluationSection()
    compare: CompareSection = CompareSection()
    output: OutputSection = OutputSection()
    record: RecordConfig = RecordConfig()
    trl: dict[str, Any] = Field(default_factory=dict)
    """Further fields of TRL's GRPOConfig (or RLOOConfig) that the recipe does not name itself."""

    @model_validator(mode="after")
    def _fills_a_step(self) -> Recipe:
        if self.task.problems < self.batch.prompts:
            raise ValueError(
                f"task.problems={self.task.problems} are fewer than the batch.prompts={self.batch.prompts} of a step: "
                "raise task.problems, or lower batch.prompts"
            )
        return self

    @model_validator(mode="after")
    def _lengths_unknown(self) -> Recipe:
        if self.fleet is not None and self.fleet.variant == "oracle":
            raise ValueError(
                "fleet.variant='oracle' needs the lengths of responses that are not generated yet: choose even, "
                "context, no-context, sticky or group"
            )
        return self

    @model_validator(mode="after")
    def _drafter_can_grow(self) -> Recipe:
        if self.adaptive_drafter is None:
            return self
        fleet = self.fleet
        if fleet is not None and (fleet.num_drafters or fleet.help == "draft"):
            raise ValueError(
                "adaptive_drafter swaps the drafter inside each engine, so no worker drafts for another one: remove "
                "fleet.roles, and set fleet.help to none, auto, copy or take"
            )
        if fleet is not None and fleet.address is not None:
            raise ValueError(
                "adaptive_drafter trains on the cores of this machine that its workers leave idle: remove fleet.address"
            )
        num_workers = 1 if fleet is None else fleet.workers
        if self.adaptive_drafter.trainers > num_workers:
            raise ValueError(
                f"adaptive_drafter.trainers={self.adaptive_drafter.trainers} with {num_workers} worker(s): each trains "
                "on the cores of one, so set at most as many, and fleet.workers for more than one"
            )
        if self.engine.draft_worker or self.engine.draft_help:
            raise ValueError(
                "adaptive_drafter swaps the drafter inside the engine: remove engine.draft_worker and draft_help"
            )
        return self

    @model_validator(mode="after")
    def _drafter_can_be_chosen(self) -> Recipe:
        if self.engine.chooses_drafter and self.adaptive_drafter is not None:
            raise ValueError(
                "engine.further_drafters are chosen from as they are, adaptive_drafter changes the one that there is: "
                "remove one of them"
            )
        return self

    @property
    def context_tokens(self) -> int:
        """Longest prompt plus response."""
        return self.lengths.prompt_tokens + self.lengths.response_tokens

    def recorded(self) -> dict[str, Any]:
        """As it is recorded. Infinite numbers are text, which JSON keeps and the schema takes back; as numbers they
        would become null, which is another value.
        """
        fields: dict[str, Any] = _spell_infinite(self.model_dump(mode="json"))
        return fields


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe and apply `key.path=value` overrides; their paths are relative to the current folder.

    Raises ConfigError that names the file, the key, the value and the remedy.
    """
    source = Path(path)
    fields = read_yaml(source, "recipe", "recipes/countdown.yaml")
    _resolve_paths(fields, source.resolve().parent)
    for override in overrides:
        apply_override(fields, override)
    return validate(Recipe, fields, f"recipe {source}")


BEFORE_A_CHOICE = {"engine.compiled": False, "engine.linear_kernel": "vllm"}
"""What recorded recipes do not say that are older than the choice."""


def check_resumable(recipe: Recipe, recorded: Mapping[str, Any]) -> None:
    """Raise ConfigError if `recipe` differs from the `recorded` one in anything that the results rest on."""
    old, new = _flatten(recorded), _flatten(recipe.recorded())
    for key, value in BEFORE_A_CHOICE.items():
        old.setdefault(key, value)
    if not is_cpu_build():
        old["engine.linear_kernel"] = new["engine.linear_kernel"]  # has no say on a GPU
    free = FREE_ON_RESUME
    if recipe.optimizer.schedule != "constant":
        free = free - {"steps"}
    changed = sorted(
        key
        for key in old.keys() | new.keys()
        if old.get(key) != new.get(key) and key.split(".")[0] not in free
    )
    if changed:
        pairs = ", ".join(f"{key} was {old.get(key)!r} and is {new.get(key)!r}" for key in changed)
        raise ConfigError(
            f"--resume continues the same run, but the recipe has changed: {pairs}; set them back, or start "
            "anew with another --out"
        )


def _spell_infinite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _spell_infinite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_spell_infinite(one) for one in value]
    return value if not isinstance(value, float) or isfinite(value) else str(value)


def _resolve_paths(fields: dict[str, Any], folder: Path) -> None:
    for keys in PATHS:
        holder: Any = fields
        for key in keys[:-1]:
            holder = holder.get(key) if isinstance(holder, dict) else None
        value = holder.get(keys[-1]) if isinstance(holder, dict) else None
        if isinstance(value, str):
            has_folder = keys[-1] != "model_drafter" or value != MTP
            holder[keys[-1]] = _resolve(value, folder) if has_folder else value
        elif isinstance(value, list):
            holder[keys[-1]] = [_resolve(one, folder) if isinstance(one, str) else one for one in value]


def _resolve(path: str, folder: Path) -> str:
    return str((folder / Path(path).expanduser()).resolve())


def _flatten(fields: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in fields.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = list(value) if isinstance(value, tuple) else value
    return flat
