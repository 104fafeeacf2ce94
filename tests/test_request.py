"""What may be asked of a request, and what it means."""

from __future__ import annotations

import numpy as np
import pytest

from funcllm.launch.plan import MAX_STOP_IDS
from funcllm.launch.request import (
    Request,
    ResolvedSampling,
    SamplingParams,
    ignored_defaults,
    prefix_tag,
    prompt_array,
    resolve,
)

NAN = float("nan")


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", [-0.1, NAN, float("inf"), 3.5e38, "0.5", True, [1]]),
        ("top_k", [-2, 1.5, "3", True, NAN]),
        ("top_p", [0, 0.0, 1.1, -0.5, NAN, "1", False]),
        ("min_p", [-0.1, 1.5, NAN, "0", True]),
        ("seed", [1.5, "1", True, 2**63, -(2**63) - 1]),
        ("max_tokens", [0, -1, 1.0, "16", True]),
        ("min_tokens", [-1, 1.5, None, "1", True, 17]),
        ("stop", ["", ["a", ""], 5, [1], b"a"]),
        ("stop_token_ids", [5, [-1], [2**31], ["1"], [1.5], [True], "12"]),
        ("ignore_eos", [1, "yes", None]),
        ("skip_special_tokens", [0]),
        ("detokenize", ["no"]),
        ("include_stop_str_in_output", [None]),
        ("extra_args", [[1], {1: 2}]),
        ("cache_salt", [5, b"a"]),
    ],
)
def test_wrong_values_are_refused_by_name(name: str, values: list[object]) -> None:
    for value in values:
        with pytest.raises(ValueError, match=name):
            SamplingParams(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("n", [2, 0, True, None]),
        ("logprobs", [0, 5, True]),
        ("prompt_logprobs", [0, 1]),
        ("presence_penalty", [0.5, True, "0"]),
        ("frequency_penalty", [-0.5, NAN]),
        ("repetition_penalty", [1.1, 0, True]),
        ("logit_bias", [{1: 2.0}]),
        ("bad_words", [["a"]]),
        ("allowed_token_ids", [[1], []]),
        ("structured_outputs", [{}, "json"]),
    ],
)
def test_what_is_not_supported_is_refused_not_ignored(name: str, values: list[object]) -> None:
    for value in values:
        with pytest.raises(ValueError, match=f"{name}=.* is not supported yet"):
            SamplingParams(**{name: value})  # type: ignore[arg-type]


def test_neutral_values_of_unsupported_parameters_are_accepted() -> None:
    params = SamplingParams(
        n=1, presence_penalty=0, frequency_penalty=0.0, repetition_penalty=1, logit_bias={}, bad_words=[], logprobs=None
    )
    assert params.presence_penalty == 0


def test_unknown_parameters_are_refused() -> None:
    with pytest.raises(TypeError, match="use_beam_search"):
        SamplingParams(use_beam_search=True)  # type: ignore[call-arg]


def test_numpy_numbers_are_numbers() -> None:
    params = SamplingParams(temperature=np.float32(0.5), top_k=np.int64(3), max_tokens=np.int32(7), seed=np.int64(-5))
    resolved = resolve(params, {}, [])
    assert (resolved.temperature, resolved.top_k, resolved.max_tokens, resolved.seed) == (0.5, 3, 7, -5)
    assert [type(x) for x in (resolved.temperature, resolved.top_k, resolved.max_tokens)] == [float, int, int]


def test_an_eos_id_that_no_token_has_is_passed_over() -> None:
    resolved = resolve(SamplingParams(stop_token_ids=[2**31 - 1]), {}, [2**31, 7, -1])
    assert resolved.stop_ids == (7, 2**31 - 1)


def test_stop_is_a_string_or_a_list() -> None:
    assert SamplingParams(stop="ab").stop == ("ab",)
    assert SamplingParams(stop=["ab", "c"]).stop == ("ab", "c")
    assert SamplingParams().stop == ()
    with pytest.raises(ValueError, match="needs text"):
        SamplingParams(stop="ab", detokenize=False)


def test_values_come_from_the_request_then_the_model_then_are_neutral() -> None:
    defaults = {"temperature": 0.6, "top_k": 20, "eos_token_id": 5}
    resolved = resolve(SamplingParams(temperature=0, top_p=0.5), defaults, [])
    assert (resolved.temperature, resolved.top_k, resolved.top_p, resolved.min_p) == (0.0, 20, 0.5, 0.0)
    neutral = resolve(SamplingParams(), {}, [])
    assert (neutral.temperature, neutral.top_k, neutral.top_p, neutral.min_p) == (1.0, 0, 1.0, 0.0)
    assert (neutral.max_tokens, neutral.min_tokens) == (16, 0)


def test_defaults_obey_the_same_rules() -> None:
    with pytest.raises(ValueError, match="top_p=3"):
        resolve(SamplingParams(), {"top_p": 3}, [])


@pytest.mark.parametrize(
    ("asked", "resolved"), [(-1, 0), (0, 0), (1, 1), (255, 255), (10**6, 10**6), (10**12, 2**31 - 1)]
)
def test_top_k_is_off_at_0_and_below_and_fits_32_bits(asked: int, resolved: int) -> None:
    assert resolve(SamplingParams(top_k=asked), {}, []).top_k == resolved


def test_seeds_are_kept_or_given_or_drawn() -> None:
    assert resolve(SamplingParams(seed=7), {}, [], seed=3).seed == 7
    assert resolve(SamplingParams(seed=0), {}, [], seed=3).seed == 0
    assert resolve(SamplingParams(), {}, [], seed=3).seed == 3
    assert resolve(SamplingParams(), {}, []).seed != resolve(SamplingParams(), {}, []).seed


def test_eos_comes_first_and_ignore_eos_leaves_the_users_stop_ids() -> None:
    params = SamplingParams(stop_token_ids=[9, 5, 9])
    assert resolve(params, {}, [5, 7]).stop_ids == (5, 7, 9)
    assert resolve(SamplingParams(stop_token_ids=[9], ignore_eos=True), {}, [5, 7]).stop_ids == (9,)
    assert resolve(SamplingParams(stop_token_ids=[5], ignore_eos=True), {}, [5, 7]).stop_ids == (5,)


def test_more_stop_ids_than_the_device_holds_are_the_hosts() -> None:
    resolved = resolve(SamplingParams(stop_token_ids=list(range(10, 20))), {}, [1])
    assert resolved.stop_ids == (1, *range(10, 17))
    assert len(resolved.stop_ids) == MAX_STOP_IDS
    assert resolved.host_stop_ids == {17, 18, 19}
    assert [token for token in range(25) if resolved.stops_at(token)] == [1, *range(10, 20)]
    with pytest.raises(ValueError, match="min_tokens=2 with 11 stop ids"):
        resolve(SamplingParams(stop_token_ids=list(range(10, 20)), min_tokens=2), {}, [1])


@pytest.mark.parametrize(
    ("values", "narrows"),
    [
        ({}, False),
        ({"temperature": 1.0}, False),
        ({"temperature": 1.0, "top_k": 5}, True),
        ({"temperature": 1.0, "top_p": 0.9}, True),
        ({"temperature": 1.0, "min_p": 0.1}, True),
        ({"temperature": 0.0, "top_k": 5, "top_p": 0.5}, False),
    ],
)
def test_what_narrows_the_choice(values: dict[str, float], narrows: bool) -> None:
    assert ResolvedSampling(**values).narrows is narrows  # type: ignore[arg-type]


def test_ignored_defaults_are_named() -> None:
    defaults = {"repetition_penalty": 1.1, "presence_penalty": 0.0, "temperature": 0.5, "n": 3}
    assert ignored_defaults(defaults) == {"repetition_penalty": 1.1}


@pytest.mark.parametrize("prompt", [[], (), np.array([], np.int32)])
def test_an_empty_prompt_is_refused(prompt: object) -> None:
    with pytest.raises(ValueError, match="the prompt is empty"):
        Request(id=0, prompt_ids=prompt, sampling=ResolvedSampling())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "prompt", ["abc", [1.0], [1, "a"], [True], [[1, 2]], [[1], [1, 2]], 5, np.array([1.5]), [2**70], [None]]
)
def test_what_is_no_list_of_ids_is_refused(prompt: object) -> None:
    with pytest.raises(ValueError, match="a prompt of token ids must"):
        prompt_array(prompt)


@pytest.mark.parametrize("prompt", [[-1], [3, 2**31], np.array([2**40])])
def test_ids_out_of_range_are_refused(prompt: object) -> None:
    with pytest.raises(ValueError, match="out of range"):
        prompt_array(prompt)


def test_a_prompt_is_copied_and_cannot_change() -> None:
    source = np.array([1, 2, 3])
    request = Request(id=0, prompt_ids=source, sampling=ResolvedSampling())
    source[0] = 9
    assert request.prompt_ids.tolist() == [1, 2, 3]
    assert request.prompt_ids.dtype == np.int32
    with pytest.raises(ValueError, match="read-only"):
        request.prompt_ids[0] = 5


def test_extras_are_whole_words() -> None:
    with pytest.raises(ValueError, match="extras of 3 bytes"):
        Request(id=0, prompt_ids=prompt_array([1]), sampling=ResolvedSampling(), extras=b"abc")


def test_tags_of_other_parts_never_collide() -> None:
    """A salt equal to an adapter's name, and parts whose bytes run together, are still different."""
    parts = [
        {},
        {"salt": b"x"},
        {"layers": b"x"},
        {"salt": b"x", "layers": b""},
        {"salt": b"", "layers": b"x"},
        {"salt": b"xlayers"},
        {"sal": b"tx"},
        {"salt": b"x", "layers": b"x"},
    ]
    tags = [prefix_tag(part) for part in parts]
    assert len(set(tags)) == len(parts)
    assert prefix_tag({"a": b"1", "b": b"2"}) == prefix_tag({"b": b"2", "a": b"1"})
