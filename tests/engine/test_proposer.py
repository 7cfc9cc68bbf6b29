"""A model drafter whose logits are NaN costs drafts, and nothing else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from paceline.engine.v1.proposer import Proposer
from paceline.engine.v1.sampler import throw_all
from paceline.errors import EngineError
from paceline.types import DraftOrder

ORDER = DraftOrder(4, 1.0, np.full(256, 0.5, np.float32), 0.1, np.zeros(3, np.float32))


class NanModel:
    """A model drafter at the point where it draws from its logits."""

    def draft(self, contexts: Any, query: Any, depth: int, **options: Any) -> Any:
        logits = torch.full((len(contexts), 7), float("nan"))
        throw_all(logits, query.keys, query.positions, query.temperatures)
        raise AssertionError("NaN has been drawn from")


def a_proposer() -> Proposer:
    extra = {"paceline_response": 3, "paceline_key": 5}
    params = SimpleNamespace(extra_args=extra, temperature=1.0, max_tokens=20)
    batch = SimpleNamespace(
        req_ids=["a"], num_tokens_no_spec=np.array([4]), token_ids_cpu=np.arange(10, dtype=np.int32)[None]
    )
    proposer = Proposer(SimpleNamespace(additional_config={"paceline": {}}))
    state = SimpleNamespace(sampling_params=params, output_token_ids=[1])
    proposer.attach(SimpleNamespace(input_batch=batch, requests={"a": state}))
    proposer.order, proposer._model = ORDER, NanModel()
    return proposer


def test_a_step_in_which_the_drafter_gives_nan_has_no_drafts(caplog: pytest.LogCaptureFixture) -> None:
    proposer = a_proposer()
    for _ in range(2):
        assert proposer.propose([[8]]) == [[]]
        assert proposer.take() is None
    assert [record.getMessage() for record in caplog.records if "NaN" in record.getMessage()] != []
    assert sum("model drafter gives NaN" in record.getMessage() for record in caplog.records) == 1


def test_the_drafters_sampler_never_returns_an_id_that_is_none() -> None:
    """`throw` marks such rows for the target; a drafter would look its mark up among the logits."""
    row = np.ones(1)
    with pytest.raises(EngineError, match="NaN"):
        throw_all(
            torch.full((1, 7), float("nan")),
            row.astype(np.uint64),
            row.astype(np.int64),
            row.astype(np.float32),
        )
