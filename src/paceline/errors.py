"""The error tree. Every message names the value, the limit and the remedy.

PacelineError
├── ConfigError            a setting, recipe or command-line value that cannot work
│   └── UnsupportedError   a sampling option or engine mode that cannot be exact
├── CheckpointError        a model folder that is missing, incomplete or of the wrong tokenizer
├── InstallError           a dependency is missing or of a version whose doors do not fit
├── RequestError           a prompt or request that the engine cannot run
├── RecordError            a run folder that cannot be read or written
├── EngineError            the engine failed while it ran
└── TrainingError          the trainer failed while it ran
"""


class PacelineError(Exception):
    """Root of the tree; the command line prints the message alone and exits with `exit_code`."""

    exit_code = 1


class ConfigError(PacelineError):
    """A setting, recipe or command-line value that cannot work."""

    exit_code = 2


class UnsupportedError(ConfigError):
    """A sampling option or engine mode that cannot be exact."""


class CheckpointError(PacelineError):
    """A model folder that is missing, incomplete or of the wrong tokenizer."""

    exit_code = 3


class InstallError(PacelineError):
    """A dependency is missing or of a version whose doors do not fit."""

    exit_code = 4


class RequestError(PacelineError):
    """A prompt or request that the engine cannot run."""

    exit_code = 5


class RecordError(PacelineError):
    """A run folder that cannot be read or written."""

    exit_code = 6


class EngineError(PacelineError):
    """The engine failed while it ran."""

    exit_code = 7


class TrainingError(PacelineError):
    """The trainer failed while it ran."""

    exit_code = 8
