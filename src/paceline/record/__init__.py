"""The record of a run: `record.jsonl`, append-only, one event per line, the header first.

Owns the schema (`schema`), the writer and the reader. At most the last line can be torn (by a crash);
`RecordWriter.resume` cuts it off. Written by the trainer, the owner of the rollout engine and the command
line; read by `paceline report`. Beside it, with schemas of their own: the decision log (`decisions`), which `paceline
replay` reads, and profiles (`profile`).
"""

from paceline.record.machine import describe_machine, describe_versions
from paceline.record.reader import RecordReader
from paceline.record.schema import (
    FILE_NAME,
    SCHEMA_VERSION,
    ChunkDone,
    Comparison,
    DrafterSession,
    DrafterStep,
    EngineStepSample,
    Evaluation,
    Event,
    Failure,
    Header,
    HelpDone,
    Line,
    Machine,
    Note,
    Phases,
    ResponseDone,
    Resumed,
    RunEnd,
    TrainStep,
    end_of,
    measure_tail,
)
from paceline.record.writer import RecordWriter

__all__ = [
    "FILE_NAME",
    "SCHEMA_VERSION",
    "ChunkDone",
    "Comparison",
    "DrafterSession",
    "DrafterStep",
    "EngineStepSample",
    "Evaluation",
    "Event",
    "Failure",
    "Header",
    "HelpDone",
    "Line",
    "Machine",
    "Note",
    "Phases",
    "RecordReader",
    "RecordWriter",
    "ResponseDone",
    "Resumed",
    "RunEnd",
    "TrainStep",
    "describe_machine",
    "describe_versions",
    "end_of",
    "measure_tail",
]
