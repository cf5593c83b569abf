"""SamplingParams refuse what they do not mean, and completions are the JSON of the contract."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from deepinfer.core.request import (
    Completion,
    FinishReason,
    Problem,
    SamplingParams,
    Structured,
    Timing,
    TokenLogprob,
    Usage,
)
from deepinfer.errors import CapacityError, UsageError

NAN, INF = math.nan, math.inf


def test_defaults_are_the_contract():
    assert dataclasses.asdict(SamplingParams()) == dict(
        max_tokens=256, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, n=1, seed=None,
        seq_seed=None, stop=(), stop_token_ids=(), ignore_eos=False, min_tokens=0,
        presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0, logit_bias=None,
        logprobs=None, prompt_logprobs=None, structured=None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        *[("max_tokens", bad) for bad in (-1, 1.5, "8", None, True)],
        *[("temperature", bad) for bad in (-0.1, NAN, INF, "warm", None, True)],
        *[("top_k", bad) for bad in (-1, 2.5, None)],
        *[("top_p", bad) for bad in (0, -1, 1.1, NAN)],
        *[("min_p", bad) for bad in (-0.1, 1.1, NAN)],
        *[("n", bad) for bad in (0, -1, 1.0)],
        *[("seed", bad) for bad in (-1, 2**64, 1.5, "7")],
        *[("seq_seed", bad) for bad in (-1, 2**64, [1, 2], [])],
        *[("stop", bad) for bad in ("", ["a", ""], [1], 5)],
        *[("stop_token_ids", bad) for bad in ([-1], ["a"], 5, "12")],
        *[("ignore_eos", bad) for bad in (1, None, "yes")],
        *[("min_tokens", bad) for bad in (-1, 257, 0.5)],
        *[("presence_penalty", bad) for bad in (-2.1, 2.1, NAN)],
        *[("frequency_penalty", bad) for bad in (-2.1, 2.1, NAN)],
        *[("repetition_penalty", bad) for bad in (0, -1, NAN, INF)],
        *[("logit_bias", bad) for bad in ({-1: 1.0}, {"5": 1.0}, {5: NAN}, {5: INF}, [5])],
        *[("logprobs", bad) for bad in (-1, 1.5, True)],
        *[("prompt_logprobs", bad) for bad in (-1, 1.5, True)],
        *[
            ("structured", bad)
            for bad in (
                {"type": "object"},
                {},
                {"regex": "a", "lark": "start: /a/"},
                "regex",
                ("regex", "a"),
                {"after": [3]},
                {"json_schema": {1j: 2}},
                {"json_schema": {"const": {1, 2}}},
            )
        ],
    ],
)
def test_bad_values_are_named(field, bad):
    with pytest.raises(UsageError) as caught:
        SamplingParams(**{field: bad})
    error = caught.value
    assert error.exit_status == 2 and error.code == "bad-sampling-parameter"
    assert error.message.startswith(f"{field}=")
    got = error.message.removeprefix(f"{field}=").removesuffix(" is not accepted")
    assert got in repr(bad), "the value, or the member of it, that is wrong"
    assert error.facts[0].startswith("accepted: ") and error.hint


@pytest.mark.parametrize("huge", [10**400, 10**5000, -(10**400)], ids=["400", "5000", "-400"])
def test_a_number_that_no_float_holds_is_refused(huge):
    for field, bad in (("temperature", huge), ("top_p", huge), ("seed", huge),
                       ("repetition_penalty", huge), ("logit_bias", {3: huge})):  # fmt: skip
        with pytest.raises(UsageError) as caught:
            SamplingParams(**{field: bad})
        assert caught.value.code == "bad-sampling-parameter"
        assert len(caught.value.message) < 120


def test_a_temperature_too_small_to_divide_by_is_greedy():
    assert SamplingParams(temperature=5e-324).temperature == 0
    assert SamplingParams(temperature=1e-301).temperature == 0
    assert SamplingParams(temperature=1e-300).temperature == 1e-300


def test_good_values_are_normalised():
    params = SamplingParams(
        stop="##", stop_token_ids=[3, 4], temperature=0, n=2, seq_seed=[5, 6],
        logit_bias={7: -math.inf, 8: 1}, max_tokens=0, seed=None,
    )  # fmt: skip
    assert params.stop == ("##",) and params.stop_token_ids == (3, 4)
    assert params.seq_seed == (5, 6) and params.logit_bias == {7: -math.inf, 8: 1.0}
    assert isinstance(params.temperature, float)
    assert SamplingParams(seed=2**64 - 1).seed == 2**64 - 1


def test_what_an_answer_must_look_like():
    schema = {"type": "object", "title": "größe"}
    given = SamplingParams(structured={"json_schema": schema, "after": [7]}).structured
    assert given == Structured("json_schema", '{"type": "object", "title": "größe"}', (7,))
    assert SamplingParams(structured=given).structured is given and hash(given)
    assert SamplingParams(structured={"json_schema": '{"a":1}'}).structured.source == '{"a":1}'
    assert SamplingParams(structured={"regex": "a+"}).structured == Structured("regex", "a+")
    for wrong in (
        dict(kind="xml", source="a"), dict(kind="regex", source=5),
        dict(kind="regex", source="a", after=[-1]), dict(kind="lark", source="", after=3),
    ):  # fmt: skip
        with pytest.raises(UsageError, match="structured"):
            Structured(**wrong)


def test_seeds_that_contradict_each_other():
    for wrong in (dict(seed=1, seq_seed=1), dict(n=2, seq_seed=1), dict(n=2, seq_seed=[1])):
        with pytest.raises(UsageError, match="seq_seed"):
            SamplingParams(**wrong)


def completion(**changes) -> Completion:
    values = dict(
        index=0, sample=0, text="é", token_ids=(5, 6), finish_reason=FinishReason.STOP,
        usage=Usage(3, computed_tokens=3, completion_tokens=2), timing_ms=Timing(0.5, 1.5, 2.5),
        seed=7, batch_invariant=False, settings={"DEEPINFER_DTYPE": {"value": None}},
    )  # fmt: skip
    return Completion(**{**values, **changes})


def test_json_has_the_promised_names():
    document = json.loads(json.dumps(completion().as_json(), allow_nan=False))
    assert set(document) >= set(
        "index sample text token_ids thinking tool_calls finish_reason usage timing_ms speculation"
        " seed batch_invariant replay settings error".split()
    )
    assert "logprobs" not in document and document["finish_reason"] == "stop"
    assert document["usage"] == dict(
        prompt_tokens=3, cached_tokens=0, replayed_tokens=0, computed_tokens=3,
        completion_tokens=2, reasoning_tokens=0, recomputed_tokens=0,
    )  # fmt: skip
    assert document["timing_ms"] == {"queue": 0.5, "ttft": 1.5, "total": 2.5}
    assert document["speculation"] is None and document["error"] is None


def test_json_of_logprobs_and_errors():
    entry = TokenLogprob(5, -0.5, ((5, -0.5), (9, -1.0)))
    problem = Problem.of(CapacityError("prompt-too-long", "too long", ["facts"], "shorten it"))
    document = completion(
        logprobs=(entry,), prompt_logprobs=(None, entry), error=problem, timing_ms=Timing()
    ).as_json()
    shown = {"token_id": 5, "logprob": -0.5, "top": [[5, -0.5], [9, -1.0]]}
    assert document["logprobs"] == [shown] and document["prompt_logprobs"] == [None, shown]
    assert document["error"] == {"code": "prompt-too-long", "message": "too long"}
    assert problem.exit_status == 5 and problem.hint == "shorten it"
    assert document["timing_ms"] == {}, "what is missing is absent"


def test_records_can_be_read_by_key():
    one = completion()
    assert one["usage"]["completion_tokens"] == one.usage.completion_tokens == 2
    with pytest.raises(KeyError):
        one["nonsense"]
