"""What an engine is started with, checked before it starts. Frozen and small, so that it can be sent to a process."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ValidationError

from paceline.commands.inputs.model_folder import Checkpoint, check_drafter, read_checkpoint
from paceline.commands.inputs.prompts import Prompt
from paceline.config import MTP, EngineSettings, describe
from paceline.drafting.wire import Seal, read_secret
from paceline.engine.compiled import check_compiler
from paceline.engine.installed import is_cpu_build
from paceline.errors import ConfigError, EngineError, PacelineError

if TYPE_CHECKING:
    from paceline.engine.rollout_engine import RolloutEngine

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Launch:
    """Everything that `RolloutEngine` needs. `settings` None: vLLM without Paceline."""

    model: Path
    settings: EngineSettings | None
    dtype: str
    max_model_len: int
    max_num_seqs: int
    kv_cache_bytes: int
    skip_tokenizer: bool
    compiled: bool
    """Of plain vLLM too; `settings` has the same."""

    @property
    def linear_kernel(self) -> str:
        """Whose kernels the linear layers have: others than vLLM's only in bfloat16, on a CPU, with `settings`."""
        if self.settings is None or self.dtype == "float32" or not is_cpu_build():
            return "vllm"
        return self.settings.linear_kernel

    def start(self, **vllm_arguments: Any) -> RolloutEngine:
        """Start the engine in this process. Raises EngineError with vLLM's own words when it does not start."""
        if self.settings is None:
            vllm_arguments["enforce_eager"] = not self.compiled
        try:
            from paceline.engine.rollout_engine import RolloutEngine

            return RolloutEngine(
                self.model,
                self.settings,
                dtype=self.dtype,
                max_model_len=self.max_model_len,
                max_num_seqs=self.max_num_seqs,
                kv_cache_bytes=self.kv_cache_bytes,
                skip_tokenizer_init=self.skip_tokenizer,
                **vllm_arguments,
            )
        except PacelineError:
            raise
        except Exception as error:
            raise EngineError(
                f"the engine did not start: {describe_failure(error)} (for the whole story set PACELINE_TRACEBACK=1)"
            ) from error


@contextmanager
def hush(log: Path | None = None) -> Iterator[None]:
    """Send what the engine's libraries print, from any language, to a file (default: nowhere) while inside."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(1), os.dup(2)]
    target = os.open(log or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.dup2(target, 1)
        os.dup2(target, 2)
        yield
    finally:
        for number, stream in ((1, sys.stdout), (2, sys.stderr)):
            with suppress(
                OSError
            ):  # a full disk takes what the libraries print, not the error that we have to tell
                stream.flush()
            os.dup2(kept[number - 1], number)
        for fd in (target, *kept):
            os.close(fd)


def describe_failure(error: BaseException) -> str:
    """The first telling line of an error that is not ours."""
    text = str(error).strip()
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = next((line for line in lines if line.lower().startswith("value error")), None)
    return f"{type(error).__name__}: {telling or (lines[0] if lines else 'no message')}"


def fit_length(checkpoint: Checkpoint, prompts: Sequence[Prompt], max_tokens: int) -> int:
    """Longest sequence of a job, tokens: the longest prompt and its response, or what the model takes."""
    longest = max(len(prompt.tokens) for prompt in prompts) + max_tokens
    return longest if checkpoint.max_len is None else min(longest, checkpoint.max_len)


def check_batch(
    checkpoint: Checkpoint,
    *,
    dtype: str,
    max_model_len: int,
    max_num_seqs: int,
    kv_cache_gib: float,
    num_engines: int = 1,
    names: tuple[str, str, str] = ("--max-num-seqs", "--kv-cache-gib", "--max-tokens"),
) -> int:
    """Bytes of an engine's key-value cache. names: what sets the batch, the cache and the length, for messages.

    Raises ConfigError when it cannot hold one sequence, or the machine cannot hold `num_engines` engines.
    """
    batch_name, cache_name, length_name = names
    if max_num_seqs < 1:
        raise ConfigError(f"{batch_name} {max_num_seqs}: at least 1 response must run")
    if not math.isfinite(kv_cache_gib) or kv_cache_gib <= 0:
        raise ConfigError(f"{cache_name} {kv_cache_gib}: must be above 0")
    kv_bytes = int(kv_cache_gib * GIB)
    if not is_cpu_build():
        return kv_bytes
    per_token = checkpoint.kv_bytes_per_token(dtype)
    if per_token and per_token * max_model_len > kv_bytes:
        raise ConfigError(
            f"one response of {max_model_len} tokens needs {per_token * max_model_len / GIB:.2f} GiB of key-value "
            f"cache, {cache_name} gives {kv_cache_gib:g} GiB: raise it, or lower {length_name}"
        )
    available = available_bytes()
    needed = num_engines * (checkpoint.weight_bytes(dtype) + kv_bytes)
    if available is not None and needed > available:
        raise ConfigError(
            f"weights and key-value cache of {num_engines} engine(s) need {needed / GIB:.1f} GiB, "
            f"{available / GIB:.1f} GiB of memory are free: lower {cache_name} or use a smaller model"
        )
    return kv_bytes


def available_bytes() -> int | None:
    """Memory that can still be taken, bytes; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = next((line for line in lines if line.startswith("MemAvailable:")), None)
    return int(found.split()[1]) * 1024 if found else None


def check_model_drafter(folder: Path | None, target: Checkpoint) -> None:
    """Raise CheckpointError when a model drafter is given and does not fit the target."""
    if folder is not None and str(folder) != MTP:
        check_drafter(read_checkpoint(folder), target)


def _name_drafter(folder: Path) -> str:
    return MTP if str(folder) == MTP else str(folder.resolve())


def build_settings(
    seed: int,
    drafter: str,
    model_drafter: Path | None,
    draft_servers: Sequence[str] = (),
    draft_secret_file: Path | None = None,
    decisions: Path | None = None,
    *,
    compiled: bool,
    draft_worker: bool | Literal["auto"] = False,
    further_drafters: Sequence[Path] = (),
    linear_kernel: str | None = None,
) -> EngineSettings:
    """Paceline's settings for the engine, which may run in another folder; without any drafter the budget is off too.

    Raises ConfigError for a secret that cannot be read or has the wrong length, or settings that do not fit together,
    InstallError for a missing C++ compiler.
    """
    drafts = drafter != "none" or model_drafter is not None
    Seal(read_secret(draft_secret_file))
    if compiled:
        check_compiler()
    fields: dict[str, Any] = {
        "run_seed": seed,
        "drafter": drafter,
        "model_drafter": None if model_drafter is None else _name_drafter(model_drafter),
        "draft_worker": draft_worker,
        "further_drafters": tuple(map(_name_drafter, further_drafters)),
        "draft_servers": tuple(draft_servers),
        "draft_secret_file": None if draft_secret_file is None else str(draft_secret_file.resolve()),
        "decision_log": None if decisions is None else str(decisions.resolve()),
        "budget": {} if drafts else {"policy": "off"},
        "compiled": compiled,
    }
    if linear_kernel is not None:
        fields["linear_kernel"] = linear_kernel
    try:
        return EngineSettings.model_validate(fields)
    except ValidationError as error:
        raise ConfigError(describe(error)) from error
