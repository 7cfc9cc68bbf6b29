"""The recipe: everything that a training run depends on, as one YAML file.

Owns the schema, the reading of files and of `--set key.path=value`, and the error messages. Imports nothing heavy:
a bad recipe is refused in a second. Called by the `train` command; arguments.py makes TRL's arguments of a recipe.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator

from paceline.config import EngineSettings, FleetSettings, RecordConfig, Section
from paceline.errors import ConfigError

Algorithm = Literal["grpo", "dapo", "dr_grpo", "gspo", "rloo"]

FREE_ON_RESUME = frozenset({"steps", "evaluation", "compare", "output", "record", "fleet"})
"""Sections that a resumed run may change: none of them has a say in the tokens or the gradients."""


class _Loader(yaml.SafeLoader):
    """Safe YAML in which 1e-6 is a number, as in YAML 1.2; PyYAML takes it for text."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


class TaskSection(Section):
    """Where prompts come from and how responses are rewarded (paceline.tasks)."""

    name: str
    """`countdown` or `gsm8k`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the task, see docs/countdown.md; checked when the task is loaded."""
    problems: int = Field(default=4096, ge=1)
    """Different prompts to train on; they are shuffled and, once used up, used again."""
    seed: int = Field(default=0, ge=0)
    """Seed of the choice of training prompts."""


class AlgorithmSection(Section):
    """The policy-gradient method; the fields left out take the values of its paper."""

    name: Algorithm = "grpo"
    """grpo; dapo (token-level loss, higher upper clip, truncated responses masked); dr_grpo (no length and no
    standard deviation in the normalisation); gspo (importance ratios per sequence); rloo (leave-one-out)."""
    kl: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    """Weight of the KL penalty towards the initial policy; above 0 costs a second model in memory."""
    clip_low: float | None = Field(default=None, gt=0.0)
    """Lower clip of the importance ratio, as a distance from 1."""
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

    task: TaskSection
    model: str
    """Folder of the policy to start from, in Hugging Face format."""
    steps: int = Field(ge=1)
    """Training steps; each is one rollout."""
    seed: int = Field(default=0, ge=0)
    """Seed of the run: keys of all responses, order of the prompts."""
    algorithm: AlgorithmSection = AlgorithmSection()
    batch: BatchSection = BatchSection()
    lengths: LengthsSection = LengthsSection()
    sampling: SamplingSection = SamplingSection()
    optimizer: OptimizerSection = OptimizerSection()
    engine: EngineSettings = EngineSettings()
    capacity: CapacitySection = CapacitySection()
    """Of each engine."""
    fleet: FleetSettings | None = None
    """Roll out on several engines; unset: on one, in the trainer's process."""
    evaluation: EvaluationSection = EvaluationSection()
    compare: CompareSection = CompareSection()
    output: OutputSection = OutputSection()
    record: RecordConfig = RecordConfig()
    trl: dict[str, Any] = Field(default_factory=dict)
    """Further fields of TRL's GRPOConfig (or RLOOConfig) that the recipe does not name itself."""

    @property
    def context_tokens(self) -> int:
        """Longest prompt plus response."""
        return self.lengths.prompt_tokens + self.lengths.response_tokens


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe and apply `key.path=value` overrides; their paths are relative to the current folder.

    Raises ConfigError that names the file, the key, the value and the remedy.
    """
    source = Path(path)
    fields = _read_yaml(source)
    _resolve_paths(fields, source.resolve().parent)
    for override in overrides:
        _apply(fields, override)
    try:
        return Recipe.model_validate(fields)
    except ValidationError as error:
        raise ConfigError(f"recipe {source}: {_explain(error)}") from error


def check_resumable(recipe: Recipe, recorded: Mapping[str, Any]) -> None:
    """Raise ConfigError if `recipe` differs from the `recorded` one in anything that the results rest on."""
    old, new = _flatten(recorded), _flatten(recipe.model_dump(mode="json"))
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


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        fields = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read the recipe {path}: {reason}; recipes/ holds examples") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"recipe {path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"recipe {path} must be a mapping of keys to values, see recipes/countdown.yaml")
    return fields


def _resolve_paths(fields: dict[str, Any], folder: Path) -> None:
    for keys in (("model",), ("engine", "model_drafter"), ("task", "options", "prompts")):
        holder: Any = fields
        for key in keys[:-1]:
            holder = holder.get(key) if isinstance(holder, dict) else None
        if isinstance(holder, dict) and isinstance(value := holder.get(keys[-1]), str):
            holder[keys[-1]] = str((folder / Path(value).expanduser()).resolve())


def _apply(fields: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    keys = name.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"--set {override}: write it as key.path=value, such as batch.prompts=4")
    try:
        value = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError(
            f"--set {override}: the value is not YAML: {' '.join(str(error).split())}"
        ) from error
    holder = fields
    for key in keys[:-1]:
        inner = holder.setdefault(key, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"--set {override}: {key} is the value {inner!r}, not a section")
        holder = inner
    holder[keys[-1]] = value


def _explain(error: ValidationError) -> str:
    return "; ".join(_explain_one(item) for item in error.errors())


def _explain_one(item: Any) -> str:
    where = ".".join(map(str, item["loc"])) or "the recipe"
    if item["type"] == "extra_forbidden":
        return f"unknown key {where} = {item['input']!r}{_nearest(item['loc'])}"
    if item["type"] == "missing":
        return f"{where} is missing: add it"
    return f"{where} = {item['input']!r}: {item['msg'].removeprefix('Value error, ')}"


def _nearest(location: tuple[int | str, ...]) -> str:
    """`; did you mean X?`, from all keys of the recipe that end alike, or the keys that the section has."""
    known = _known_keys(Recipe)
    siblings = [key for key in known if key.split(".")[:-1] == [str(part) for part in location[:-1]]]
    name = str(location[-1])
    near = difflib.get_close_matches(name, [key.split(".")[-1] for key in siblings], n=1)
    if near:
        return f"; did you mean {'.'.join([*map(str, location[:-1]), near[0]])}?"
    elsewhere = [key for key in known if key.split(".")[-1] == name]
    if elsewhere:
        return f"; it belongs to {elsewhere[0]}"
    return f"; there are: {', '.join(key.split('.')[-1] for key in siblings)}"


def _known_keys(section: type[BaseModel], prefix: str = "") -> list[str]:
    keys: list[str] = []
    for name, field in section.model_fields.items():
        keys.append(prefix + name)
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                keys += _known_keys(kind, f"{prefix}{name}.")
    return keys


def _flatten(fields: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in fields.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = list(value) if isinstance(value, tuple) else value
    return flat
