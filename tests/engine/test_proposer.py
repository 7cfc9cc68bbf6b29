"""A model drafter that gives NaN for one response: the others keep their drafts."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tiny_model import VOCAB, make_model

from paceline.engine.v1.proposer import Proposer
from paceline.types import DraftOrder

POISON = VOCAB - 2
ORDER = DraftOrder(4, 1.0, np.full(256, 0.5, np.float32), 0.01, np.zeros(3, np.float32))


@pytest.fixture
def proposer(tmp_path: Path) -> Proposer:
    """Two requests; to the drafter one token is NaN."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = make_model(tmp_path, tie=False)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][POISON] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = SimpleNamespace(
        additional_config={"paceline": {"model_drafter": str(folder)}},
        device_config=SimpleNamespace(device="cpu"),
        model_config=SimpleNamespace(max_model_len=64, get_vocab_size=lambda: VOCAB),
        scheduler_config=SimpleNamespace(max_num_seqs=4),
    )
    states = {
        name: SimpleNamespace(
            sampling_params=SimpleNamespace(
                extra_args={"paceline_response": number, "paceline_key": 5 + number},
                temperature=1.0,
                max_tokens=20,
            ),
            output_token_ids=[1],
        )
        for number, name in enumerate("ab")
    }
    contexts = np.zeros((2, 64), np.int32)
    contexts[0, :4], contexts[1, :4] = [1, 5, 6, 7], [1, POISON, 6, 7]
    batch = SimpleNamespace(req_ids=["a", "b"], num_tokens_no_spec=np.array([4, 4]), token_ids_cpu=contexts)
    made = Proposer(config)
    made.attach(SimpleNamespace(input_batch=batch, requests=states))
    made.load_model(None)
    made.order = ORDER
    return made


def test_the_others_keep_their_drafts(proposer: Proposer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    for _ in range(2):
        assert proposer.propose([[8], [9]]) == [[], []]
        fresh = proposer.take()
        assert fresh is not None
        assert fresh.drafts is not None
        assert (fresh.drafts.batch.num_tokens > 0).tolist() == [True, False]
    assert sum("gives NaN" in record.getMessage() for record in caplog.records) == 1
