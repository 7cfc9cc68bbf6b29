"""RolloutEngine: streaming, aborts, keys, and refusals before any work."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.config import EngineSettings
from paceline.engine.rollout_engine import RolloutEngine
from paceline.errors import CheckpointError, ConfigError, EngineError, RequestError, UnsupportedError
from paceline.types import Response, RolloutRequest


@pytest.fixture(scope="module")
def engine(model_dir: Path) -> Iterator[RolloutEngine]:
    with RolloutEngine(
        model_dir, EngineSettings(run_seed=4), dtype="float32", max_model_len=256, kv_cache_bytes=1 << 27
    ) as made:
        yield made


def params(**options: object) -> Any:
    from vllm import SamplingParams

    return SamplingParams(**{"temperature": 1.0, **options})


def test_stream_yields_every_token_once_in_order(engine: RolloutEngine) -> None:
    wanted = [RolloutRequest((1, 5, 6 + i), max_tokens=30 + i, sample=i) for i in range(5)]
    seen: dict[int, list[int]] = {i: [] for i in range(5)}
    scores: dict[int, list[float]] = {i: [] for i in range(5)}
    finished = {}
    for event in engine.stream(wanted, params()):
        seen[event.index] += event.tokens
        scores[event.index] += event.logprobs
        if event.response is not None:
            assert event.index not in finished
            finished[event.index] = event.response
    for index, response in finished.items():
        assert tuple(seen[index]) == response.tokens
        assert tuple(scores[index]) == response.logprobs
        assert len(response.logprobs) == len(response.tokens)
        assert response.finish_reason == ("length" if response.tokens[-1] != 2 else "stop")
    assert len(finished) == 5


def test_keys_come_from_run_seed_prompt_and_sample(engine: RolloutEngine) -> None:
    same = [RolloutRequest((1, 5, 6), max_tokens=20, sample=s) for s in (0, 0, 1)]
    one, again, other = engine.generate(same, params())
    assert one.key == again.key != other.key
    assert one.tokens == again.tokens != other.tokens
    assert one.group == other.group


def test_the_responses_of_a_group_share_their_prompts_whole_blocks(engine: RolloutEngine) -> None:
    """Already in the step that computes it first: 64 of 70 tokens are prefilled once, the others by each response."""
    prompt = tuple(range(3, 28)) * 2 + tuple(range(3, 23))
    wanted = [RolloutRequest(prompt, max_tokens=2, sample=s) for s in range(4)]
    engine.take_observations()
    together = engine.generate(wanted, params(ignore_eos=True))
    assert sum(step.num_prefill_tokens for step in engine.take_observations()) <= 64 + 4 * 6
    engine.reset_prefix_cache()
    alone = engine.generate(wanted[-1:], params(ignore_eos=True))[0]
    assert together[-1].tokens == alone.tokens


def test_abort_stops_one_and_leaves_the_rest(engine: RolloutEngine) -> None:
    wanted = [RolloutRequest((1, 7, i), max_tokens=60, sample=i) for i in range(3, 6)]
    whole = engine.generate(wanted, params(ignore_eos=True))
    kept = []
    aborted = False
    for event in engine.stream(wanted, params(ignore_eos=True)):
        if not aborted:
            engine.abort([1])
            aborted = True
        if event.response is not None:
            kept.append((event.index, event.response.tokens))
    assert sorted(kept) == [(0, whole[0].tokens), (2, whole[2].tokens)]


def test_leaving_the_stream_aborts_and_a_resubmission_goes_on(engine: RolloutEngine) -> None:
    request = RolloutRequest((1, 9, 9), max_tokens=50)
    whole = engine.generate([request], params(ignore_eos=True))[0]
    stream = engine.stream([request], params(ignore_eos=True))
    tokens: tuple[int, ...] = ()
    while len(tokens) < 7:
        next(stream)
        tokens, scores = engine.partial()[0]
    stream.close()
    assert 7 <= len(tokens) == len(scores) < 50
    assert tokens == whole.tokens[: len(tokens)]
    rest = engine.generate([RolloutRequest((1, 9, 9), 50, generated=tokens)], params(ignore_eos=True))[0]
    assert rest.tokens == whole.tokens


@pytest.mark.parametrize("carried", [20, 44])
def test_a_minimum_of_tokens_is_that_of_the_whole_response(engine: RolloutEngine, carried: int) -> None:
    """Though more than what is left, or reached already."""
    options = params(min_tokens=40, max_tokens=48)
    request = RolloutRequest((1, 9, 9), max_tokens=48)
    [whole] = engine.generate([request], options)
    assert len(whole.tokens) >= 40
    tokens = whole.tokens[: min(carried, len(whole.tokens) - 1)]
    [rest] = engine.generate([RolloutRequest((1, 9, 9), 48, generated=tokens)], options)
    assert rest.tokens == whole.tokens


def test_observations_tell_what_the_engine_did(engine: RolloutEngine) -> None:
    engine.take_observations()
    responses = engine.generate([RolloutRequest((1, 5, 6), 40, sample=s) for s in range(4)], params())
    steps = engine.take_observations()
    assert engine.take_observations() == []
    assert sum(s.num_draft_tokens for s in steps) == sum(r.num_draft_tokens for r in responses)
    assert sum(s.num_prefill_tokens for s in steps) == 12
    assert all(s.step_s > 0 for s in steps)


@pytest.mark.parametrize(
    ("request_", "options", "error", "message"),
    [
        (RolloutRequest((), 5), {}, RequestError, "prompt is empty"),
        (RolloutRequest((1,) * 300, 5), {}, RequestError, "300 tokens leave no room.*max_model_len=256"),
        (RolloutRequest((1, 2), 2, generated=(5, 6)), {}, RequestError, "max_tokens=2 is already reached"),
        (RolloutRequest((1, 64), 5), {}, RequestError, "token id 64.*64 tokens"),
        (RolloutRequest((1, 2), 5), {"n": 2}, UnsupportedError, "n=2"),
        (RolloutRequest((1, 2), 5), {"prompt_logprobs": 1}, UnsupportedError, "prompt_logprobs"),
        (RolloutRequest((1, 2), 5), {"logprobs": -1}, UnsupportedError, "logprobs=-1"),
        (RolloutRequest((1, 2), 5), {"logprobs": 5}, UnsupportedError, "logprobs=5.*of no others"),
        (RolloutRequest((1, 2), 5), {"allowed_token_ids": [999]}, RequestError, "request 0: .*999"),
    ],
)
def test_refusals(
    engine: RolloutEngine, request_: RolloutRequest, options: dict[str, object], error: type, message: str
) -> None:
    with pytest.raises(error, match=message):
        engine.generate([request_], params(**options))
    assert engine.num_running() == 0


def test_what_looks_back_cannot_go_on_in_the_middle(engine: RolloutEngine) -> None:
    from vllm.sampling_params import RepetitionDetectionParams, StructuredOutputsParams

    repetition = RepetitionDetectionParams(max_pattern_size=4, min_count=2)
    for options, problem in (
        ({"structured_outputs": StructuredOutputsParams(regex="a+")}, "grammar would begin anew"),
        ({"stop": ["ab"]}, "2 generated tokens with stop: a stop text that begins in them would be missed"),
        ({"repetition_detection": repetition}, "the new tokens only"),
    ):
        with pytest.raises(UnsupportedError, match=problem):
            engine.generate([RolloutRequest((1, 2), 5, generated=(5, 6))], params(**options))


def test_missing_checkpoints_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        RolloutEngine(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        RolloutEngine(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="weights"):
        RolloutEngine(tmp_path)


def test_impossible_settings_are_named() -> None:
    from paceline.engine.arguments import engine_arguments

    with pytest.raises(ConfigError, match="num_paths=99: must be at most"):
        engine_arguments(num_paths=99)
    with pytest.raises(ConfigError, match="drafterr"):
        engine_arguments(drafterr="suffix")


def test_a_response_that_the_engine_gives_up_leaves_the_rest(engine: RolloutEngine) -> None:
    wanted = [RolloutRequest((1, 7, i), max_tokens=12) for i in range(3, 6)]
    whole = engine.generate(wanted, params(ignore_eos=True))
    engine.set_drafting(False)  # else a response may end with the first step
    for index, request in enumerate(wanted):
        engine.submit(index, request, params(ignore_eos=True))
    events = engine.step()
    [lost] = [pending for pending in engine._pending.values() if pending.index == 1]
    engine.scheduler.encoder_cache_mismatch_reqs.add(lost.internal_id)  # what vLLM ends a request for
    while engine.num_running():
        events += engine.step()
    [failed] = [event for event in events if event.failure is not None]
    assert failed.index == 1
    assert failed.failure == "ended with 'error': the engine reported an internal error"
    ended = {event.index: event.response for event in events if event.response is not None}
    assert {i: r.finish_reason for i, r in ended.items()} == {0: "length", 1: "error", 2: "length"}
    assert (ended[0].tokens, ended[2].tokens) == (whole[0].tokens, whole[2].tokens)
    assert ended[1].tokens == whole[1].tokens[: len(ended[1].tokens)] != ()
    assert lost.internal_id not in engine.scheduler.finished
    stream = engine.stream(wanted, params(ignore_eos=True))
    next(stream)
    engine.scheduler.encoder_cache_mismatch_reqs.add(next(iter(engine._pending.values())).internal_id)
    with pytest.raises(EngineError, match="response 0 ended with 'error': the engine reported an internal"):
        list(stream)
    assert engine.num_running() == 0
    engine.set_drafting(True)


def read_by_vllm(engine: RolloutEngine, response: Response, options: Any) -> tuple[list[int], list[float]]:
    """Tokens and log-probabilities of a response as vLLM's own output processor gives them."""
    vllm, request = engine.vllm_engine, response.request
    options.max_tokens = request.max_tokens
    options.extra_args = {"paceline_key": response.key, "paceline_group": response.group}
    vllm.add_request("theirs", {"prompt_token_ids": list(request.prompt)}, options)
    [last] = [output for _ in iter(vllm.has_unfinished_requests, False) for output in vllm.step()][-1:]
    [completion] = last.outputs
    scores = [
        entry[token].logprob for token, entry in zip(completion.token_ids, completion.logprobs, strict=True)
    ]
    return list(completion.token_ids), scores


@pytest.mark.parametrize("logprobs", [0, 1])
def test_tokens_are_read_as_vllms_own_processor_reads_them(
    engine: RolloutEngine, logprobs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = [RolloutRequest((1, 5, 6 + i), max_tokens=40, sample=i) for i in range(4)]
    with monkeypatch.context() as patch:
        patch.setattr(engine.vllm_engine.output_processor, "process_outputs", None)  # is not needed
        responses = engine.generate(wanted, params(logprobs=logprobs))
    for response in responses:
        tokens, scores = read_by_vllm(engine, response, params(logprobs=logprobs))
        assert (list(response.tokens), list(response.logprobs)) == (tokens, scores)


def test_stop_texts_are_found_beside_requests_without_them(engine: RolloutEngine) -> None:
    wanted = [RolloutRequest((1, 7, i), max_tokens=80, sample=i) for i in range(3, 6)]
    whole = engine.generate(wanted, params(ignore_eos=True))
    first = whole[0].tokens
    end = next(at for at in range(20, 80) if 2 < first[at] not in first[:at])
    stop = chr(33 + first[end] - 3)
    for index, options in enumerate([{"stop": [stop]}, {}, {"stop": ["no such text"]}]):
        engine.submit(index, wanted[index], params(ignore_eos=True, **options))
    events = [event for _ in iter(engine.num_running, 0) for event in engine.step()]
    ended = {event.index: event.response for event in events if event.response is not None}
    assert {i: r.finish_reason for i, r in ended.items()} == {0: "stop", 1: "length", 2: "length"}
    assert [ended[i].tokens for i in range(3)] == [first[: end + 1], whole[1].tokens, whole[2].tokens]
    assert [ended[i].logprobs for i in range(3)] == [
        whole[0].logprobs[: end + 1],
        whole[1].logprobs,
        whole[2].logprobs,
    ]


def test_nothing_is_left_of_requests_that_ended_or_were_aborted(engine: RolloutEngine) -> None:
    wanted = [RolloutRequest((1, 7, i), max_tokens=20 + 20 * i, sample=i) for i in range(4)]
    for options in ({}, {"stop": ["no such text"]}):
        stream = engine.stream(wanted, params(ignore_eos=True, **options))
        for event in stream:
            if event.response is not None:
                engine.abort([3])
                break
        stream.close()
        processor = engine.vllm_engine.output_processor
        assert not processor.request_states
        assert not processor.external_req_ids
        assert not engine._outputs._texts
        assert not engine.vllm_engine.has_unfinished_requests()
        engine.step()  # the core drops what was aborted
        assert not engine.scheduler.requests
        assert not engine.scheduler.live


def test_statistics_of_vllm_are_refused(model_dir: Path) -> None:
    with pytest.raises(UnsupportedError, match="disable_log_stats=False"):
        RolloutEngine(model_dir, disable_log_stats=False)
