"""vLLM's model runner V2, on a GPU or in Triton's interpreter: the tokens are those of plain vLLM with `seed=key`.

One process runs all engines (interpreted_engines.py), because Triton has to be prepared before anything imports it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from interpreted_run import MARKS, run_interpreted

from paceline.engine.installed import is_cpu_build

HERE = Path(__file__).parent
INSIDE = ("suffix", "garbage", "scripted", "mixed", "model")
OVERLAPPED = (
    "overlapped", "overlapped suffix", "overlapped branches", "overlapped garbage", "overlapped scripted",
    "overlapped model", "overlapped mixed",
)  # fmt: skip
MODES = ("none", *INSIDE, "sample", "watched", "worker", "worker and suffix", *OVERLAPPED)
pytestmark = MARKS


@pytest.fixture(scope="module")
def made(model_dir: Path, drafter_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the engines made, by mode."""
    folder = tmp_path_factory.mktemp("v2")
    return run_interpreted(
        HERE / "interpreted_engines.py", model_dir, drafter_dir, folder=folder, timeout_s=1500
    )


def tokens(run: dict[str, Any]) -> dict[str, list[int]]:
    return {name: response["tokens"] for name, response in run["responses"].items()}


@pytest.mark.timeout(1600)
def test_the_engines_ran_on_v2(made: dict[str, Any]) -> None:
    assert "vllm.v1.worker.gpu.model_runner" in made["runner"]
    assert "paceline.engine.v2.runner" in made["runner"]


@pytest.mark.parametrize("mode", MODES)
def test_tokens_are_plain_vllms(made: dict[str, Any], mode: str) -> None:
    plain = tokens(made["plain"])
    assert tokens(made[mode]) == {name: plain[name] for name in made[mode]["responses"]}


def test_enough_was_compared(made: dict[str, Any]) -> None:
    runs = (*MODES, "resumed", "overlapped resumed", "moved", "pushed")
    assert sum(len(given) for run in runs for given in tokens(made[run]).values()) > 2000
    plain = tokens(made["plain"])
    assert len(set(map(tuple, plain.values()))) == len(plain)


def test_drafts_were_verified_and_some_accepted(made: dict[str, Any]) -> None:
    drafted = {mode: made[mode]["num_draft_tokens"] for mode in MODES}
    accepted = {mode: made[mode]["num_accepted_tokens"] for mode in MODES}
    assert drafted["none"] == 0
    assert all(drafted[mode] > 50 for mode in INSIDE), drafted
    assert accepted["garbage"] < 0.1 * drafted["garbage"]
    assert accepted["scripted"] > 0.4 * drafted["scripted"]
    assert accepted["model"] > 0.4 * drafted["model"], "the draft model does not throw the target's dice"
    assert made["mixed"]["num_model_tokens"] > 0


def test_steps_overlap_where_it_is_asked_for(made: dict[str, Any]) -> None:
    """Drafts that were made through a step under way are verified, and accepted where they go on behind it."""
    assert "paceline.engine.async_scheduler" in made["overlap"]
    drafted = {mode: made[mode]["num_draft_tokens"] for mode in OVERLAPPED}
    accepted = {mode: made[mode]["num_accepted_tokens"] for mode in OVERLAPPED}
    assert drafted["overlapped"] == 0
    assert all(drafted[mode] > 50 for mode in OVERLAPPED[1:]), drafted
    assert accepted["overlapped garbage"] < 0.1 * drafted["overlapped garbage"]
    assert accepted["overlapped scripted"] > 0.3 * drafted["overlapped scripted"]


def test_a_draft_model_drafts_behind_steps_that_overlap(made: dict[str, Any]) -> None:
    """Its tokens stay on the device; the trees' go before them where they go on."""
    alone, mixed = made["overlapped model"], made["overlapped mixed"]
    assert alone["num_accepted_tokens"] > 0.4 * alone["num_draft_tokens"]
    assert alone["num_model_tokens"] == alone["num_accepted_tokens"]
    assert 0 < mixed["num_model_tokens"] < mixed["num_accepted_tokens"]


def test_drafts_are_begun_while_vllm_hands_out_tokens(made: dict[str, Any]) -> None:
    """With the tokens as vLLM cuts them: at the end of a response too, or the trees would hold others."""
    overlapped = made["overlapped suffix"]
    assert overlapped["early"] > 10
    assert overlapped["told"] == made["suffix"]["told"] > 300


@pytest.mark.skipif(is_cpu_build(), reason="compiled code and CUDA graphs want a GPU")
@pytest.mark.parametrize("mode", ["none", "scripted", "mixed"])
def test_replayed_graphs_make_the_same_tokens(made: dict[str, Any], mode: str) -> None:
    """Steps with drafts replay full graphs too, where the attention backend lets them."""
    assert tokens(made["compiled"][mode]) == tokens(made["compiled"]["plain"])
    assert made["compiled"][mode]["graphs"]["FULL"] > 10
    assert "NONE" not in made["compiled"][mode]["graphs"]


@pytest.mark.parametrize("mode", MODES[1:])
def test_log_probabilities_are_those_without_drafts(made: dict[str, Any], mode: str) -> None:
    """Bitwise, as on V1: the batch-invariance measures of the CPU hold on V2 too."""
    for name, response in made[mode]["responses"].items():
        assert made["none"]["responses"][name]["logprobs"] == response["logprobs"], name


def test_log_probabilities_are_plain_vllms(made: dict[str, Any]) -> None:
    for name, response in made["plain"]["responses"].items():
        np.testing.assert_allclose(
            np.concatenate(made["none"]["responses"][name]["logprobs"]),
            np.concatenate(response["logprobs"]),
            atol=1e-4,
            err_msg=name,
        )


def test_requests_come_and_go_while_a_step_is_under_way(made: dict[str, Any]) -> None:
    """Aborted, and preempted because there are few KV blocks; a draft may be longer than a step may verify."""
    plain = tokens(made["plain"])
    aborted, scarce = tokens(made["overlapped aborted"]), tokens(made["overlapped scarce"])
    assert len(aborted) == 2
    assert aborted == {name: plain[name] for name in aborted}
    assert scarce == plain
    assert made["overlapped scarce"]["preemptions"] > 0
    assert made["overlapped scarce"]["num_accepted_tokens"] > 50


@pytest.mark.parametrize("mode", ["resumed", "overlapped resumed"])
def test_a_resumed_response_goes_on_as_if_it_had_not_stopped(made: dict[str, Any], mode: str) -> None:
    """With penalties, bad words and min tokens counting what was generated before the cut."""
    cut = made[mode]["cut"]
    whole = {name: cut[name] + rest for name, rest in tokens(made[mode]).items()}
    unfinished = {name: given for name, given in tokens(made["plain"]).items() if len(given) > len(cut[name])}
    assert len(unfinished) > 10
    assert {name: whole[name] for name in unfinished} == unfinished


def test_a_response_that_moves_brings_its_keys_and_values(made: dict[str, Any]) -> None:
    plain = tokens(made["plain"])
    assert tokens(made["moved"]) == {name: plain[name] for name in made["moved"]["responses"]}
    assert made["moved"]["hits"] == 2


def test_a_draft_worker_drafts_for_v2(made: dict[str, Any]) -> None:
    """Alone, and with suffix trees: its drafts meet theirs in the draft tree."""
    assert made["worker"]["num_model_tokens"] > 20
    assert made["worker"]["num_accepted_tokens"] > 0.4 * made["worker"]["num_draft_tokens"]
    assert made["worker and suffix"]["num_draft_tokens"] > made["worker and suffix"]["num_model_tokens"] > 0


def test_what_v1_alone_can_do_is_refused_by_name(made: dict[str, Any]) -> None:
    assert "use_drafter is for V1" in made["refused"]


def test_a_draft_model_drafts_with_the_weights_that_it_was_given(made: dict[str, Any]) -> None:
    """Turned upside down they know nothing of the target, which decides as before."""
    swapped, plain = made["swapped"], tokens(made["plain"])
    assert tokens(swapped) == {name: plain[name] for name in swapped["responses"]}
    assert swapped["num_draft_tokens"] > 50
    assert swapped["num_accepted_tokens"] < 0.5 * swapped["num_draft_tokens"]
    assert made["sample"]["num_accepted_tokens"] > 0.8 * made["sample"]["num_draft_tokens"]


def test_pushed_weights_take_over(made: dict[str, Any]) -> None:
    assert tokens(made["pushed"]) == tokens(made["other weights"])


def test_what_the_doctor_asks_a_gpu_has_answers(made: dict[str, Any]) -> None:
    """The parts of `paceline doctor --gpu` that need no speed: the interpreter must pass what a GPU has to."""
    found = made["doctor"]
    assert found["dice"]["num_rows"] >= 12
    assert not found["dice"]["num_different"] or found["dice"]["widest_lead"] < 1e-4
    plain = found["tokens"].pop("plain")
    assert found["tokens"] == dict.fromkeys(found["tokens"], plain)
    assert found["drafted"]["without drafts"] == 0
    assert found["drafted"]["suffix trees and a draft model"] > 0
    assert found["drafted"]["wrong drafts too"] > 0
    assert made["verifying"]["exact_ms"] > 0
    assert made["verifying"]["vllm_ms"] > 0
    assert [tokens for tokens, _ in made["steps"]] == [1, 3]
    assert all(seconds > 0 for _, seconds in made["steps"])


def test_a_step_waits_for_no_more_than_plain_vllms_with_its_draft_model(made: dict[str, Any]) -> None:
    """The whole step, drafts of both kinds in it; and a wait would be seen."""
    assert made["watched"]["num_model_tokens"] > 0
    plain = set(made["plain vLLM waits"])
    assert set(made["waits"]) - plain == set()
    [*seen] = set(made["waits on purpose"]) - plain
    assert {place.split(" in ")[0] for place in seen} >= {"item", "index"}
    assert all("interpreted_engines.py" in place for place in seen)


def test_a_sample_is_drafted_for_alone(made: dict[str, Any]) -> None:
    """A trial of the model drafter, behind its first level, which keeps every request's cache complete."""
    sample = made["sample"]
    assert max(sample["rows"]) == 2
    assert sample["num_draft_tokens"] > 20
    assert sample["num_accepted_tokens"] > 0.4 * sample["num_draft_tokens"]


@pytest.mark.parametrize("kernel", ["accept", "continue"])
def test_kernels_do_what_a_loop_does(made: dict[str, Any], kernel: str) -> None:
    for got, expected in made[kernel]:
        assert got == expected


def test_what_is_no_token_is_none_that_a_model_cannot_read(made: dict[str, Any]) -> None:
    """A step that overlaps, and the draft model, read it before the host knows."""
    assert made["nothing drawn"] == [[0, 0, 3], [True, True, False]]


@pytest.mark.parametrize("engine", ["fail", "overlapped fail"])
@pytest.mark.parametrize("mode", ["without drafts", "with drafts"])
def test_responses_without_a_next_token_end_alone(made: dict[str, Any], mode: str, engine: str) -> None:
    """Two that have none, of NaN and of options; drafts of which the model gives NaN change and end nothing."""
    ended, alone = made[engine][mode], made[engine]["alone"]
    for index in ("8", "9"):
        assert ended[index]["tokens"] == []
        assert "the model gave NaN for its next token, or its sampling options" in ended[index]["failure"]
    assert {index: ended[index] for index in alone} == alone
    assert made[engine]["accepted"] > 10
    assert made[engine]["preemptions"] > 5, "no step was withdrawn"


def test_the_environment_alone_stays_on_v2_and_says_what_it_changes(made: dict[str, Any]) -> None:
    plain = tokens(made["plain"])
    assert made["environment"] == {name: plain[name] for name in made["environment"]}
    assert "PACELINE=1 sets async_scheduling=False instead of None" in made["log"]
    assert "using the V1 model runner" not in made["log"]
