"""The engine at tp 1 on CPU, as its user sees it: tiny random models, in fp32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from funcllm import logits
from funcllm.compile import num_compiled
from funcllm.launch import engine as engine_module
from funcllm.launch.engine import Engine, Output, pack_extras
from funcllm.launch.errors import EngineError
from funcllm.launch.request import SamplingParams
from funcllm.layers import head as default_head
from funcllm.layers import swiglu
from funcllm.qwen3 import param_specs
from funcllm.record import Layers
from funcllm.specs import init_params, named
from funcllm.types import Component, Context, Extra, LayerCache
from funcllm.weights.save import save_params
from tests.tiny import tiny_config, tiny_folder

CONFIG = tiny_config(eos_token_ids=())
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
SAMPLED = SamplingParams(temperature=1.0, top_p=0.95, seed=7, max_tokens=12)


@lru_cache(maxsize=4)
def weights(seed: int = 0) -> Any:
    """Parameters of CONFIG, large enough that greedy tokens vary."""
    params = init_params(param_specs(CONFIG), seed=seed)
    return pytree.tree_map(lambda x: x * (1 if x.dim() == 1 else 0.25 / x.std()), params)


def start(layers: Layers = Layers(), **options: Any) -> Engine:
    """An engine over `weights()`, in memory, which checks its blocks after every step."""
    options = {"params": weights(), "config": CONFIG, "kv_blocks": 60, "block_size": 4, "debug": True} | options
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 64} | options
    return Engine(layers=layers, **options)


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(0, CONFIG.vocab_size, (length,), generator=generator).tolist()


def by_hand(ids: list[int], count: int, layers: Layers = Layers(), params: Any = None) -> list[int]:
    """Greedy tokens, each from the logits of the whole sequence."""
    known = list(ids)
    for _ in range(count):
        scores = logits(params or weights(), torch.tensor(known), config=CONFIG, layers=layers)[-1]
        best, second = scores.topk(2).values.tolist()
        assert best - second > 1e-4, "a near tie: the test would be about rounding"
        known.append(int(scores.argmax()))
    return known[len(ids) :]


def tokens(outputs: list[Output]) -> list[list[int]]:
    assert all(output.error is None for output in outputs), [output.error for output in outputs]
    return [output.token_ids for output in outputs]


def assert_idle(engine: Engine) -> None:
    """Nothing runs, nothing waits, every block is free or kept by the prefix cache alone, nothing is remembered."""
    engine._scheduler.check_blocks()
    stats = engine._scheduler.stats()
    assert (stats.running, stats.waiting, stats.used_blocks) == (0, 0, 0)
    assert stats.free_blocks + stats.cached_blocks == engine.num_blocks - 1
    assert not engine._requests
    assert not engine._executor.captured
    assert not engine._just_ended


# --- forced tokens ---------------------------------------------------------------------------------------------------

SCRIPT = 48


def forced_head(x_ld: Tensor, params: Any, context: Context, /) -> Tensor:
    """Logits that prefer the request's script at each position, and the id above it as the second choice."""
    inputs = context.inputs
    rows_l = inputs.rows_b.long()
    at_l = (inputs.sampling.positions_l - inputs.prompt_lens_b).clamp(0, SCRIPT - 1).long()
    ids_l = inputs.extras["script"][rows_l].gather(1, at_l[:, None])[:, 0].long()
    size = context.config.vocab_size
    first, second = (torch.nn.functional.one_hot((ids_l + i) % size, size) for i in (0, 1))
    return 10.0 * first + 5.0 * second


FORCED = Layers(head=forced_head).extra(
    "script", shape=(SCRIPT,), dtype=torch.int32, default=(0,) * SCRIPT, affects_kv=False
)


def script(ids: list[int] | bytes, **sampling: Any) -> SamplingParams:
    padded = [*ids, *[ord(".")] * (SCRIPT - len(ids))]
    return SamplingParams(**({"temperature": 0.0, "extra_args": {"script": padded}, "max_tokens": SCRIPT} | sampling))


@pytest.fixture(scope="module")
def forced(byte_folder: Path) -> Iterator[Engine]:
    """A model whose tokens are given, with a tokenizer of bytes; its EOS ids are 258 and 256."""
    with Engine(byte_folder, layers=FORCED, kv_blocks=60, block_size=4, max_num_seqs=8, debug=True) as engine:
        yield engine


# --- greedy tokens are the model's -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hugging_face(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, list[int]]]:
    """A folder, and what transformers generates from prompts of these lengths."""
    folder = tmp_path_factory.mktemp("hf")
    model = tiny_folder(folder, eos_token_id=None)
    expected = {}
    for length in (1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 17, 31):
        ids = torch.tensor([prompt(length)])
        mask = torch.ones_like(ids)
        out = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=12, use_cache=True)
        expected[length] = out[0, length:].tolist()
    return folder, expected


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_greedy_tokens_are_those_of_transformers(hugging_face: Any, depth: int) -> None:
    folder, expected = hugging_face
    with Engine(folder, depth=depth, kv_blocks=80, block_size=4, max_num_seqs=16, debug=True) as engine:
        outputs = engine.generate([prompt(length) for length in expected], GREEDY)
        assert tokens(outputs) == list(expected.values())
        assert [output.index for output in outputs] == list(range(len(expected)))
        assert {output.finish_reason for output in outputs} == {"length"}
        assert_idle(engine)


@pytest.mark.parametrize("budget", range(2, 15))
def test_every_chunk_size_gives_the_same_tokens(hugging_face: Any, budget: int) -> None:
    folder, expected = hugging_face
    options = {"max_num_batched_tokens": budget, "max_num_seqs": 2, "prefix_caching": budget % 2 == 0}
    with Engine(folder, kv_blocks=80, block_size=4, debug=True, **options) as engine:
        assert engine.options.max_num_batched_tokens == budget
        lengths = (13, 7, 31)
        assert tokens(engine.generate([prompt(n) for n in lengths], GREEDY)) == [expected[n] for n in lengths]


@pytest.mark.parametrize("block_size", [1, 2, 3, 5, 16])
def test_any_block_size_gives_the_same_tokens(block_size: int) -> None:
    lengths = (1, block_size, block_size + 1, 3 * block_size, 3 * block_size + 2)
    with start(block_size=block_size, kv_blocks=400 // block_size + 2, max_model_len=67) as engine:
        outputs = engine.generate([prompt(n) for n in lengths], GREEDY)
        assert tokens(outputs) == [by_hand(prompt(n), 12) for n in lengths]
        assert_idle(engine)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("sampling", [replace(GREEDY, max_tokens=30), replace(SAMPLED, max_tokens=30)])
def test_preemption_changes_no_token(depth: int, sampling: SamplingParams) -> None:
    prompts = [prompt(5, seed) for seed in range(5)]
    with start(kv_blocks=80) as engine:
        expected = tokens(engine.generate(prompts, sampling))
        assert engine._scheduler.stats().preemptions == 0
    with start(kv_blocks=13, depth=depth, max_num_batched_tokens=9) as engine:
        assert tokens(engine.generate(prompts, sampling)) == expected
        assert engine._scheduler.stats().preemptions > 0
        assert_idle(engine)


# --- sampling does not depend on the others --------------------------------------------------------------------------


def test_a_seeded_request_is_the_same_alone_and_among_others() -> None:
    with start() as engine:
        alone = tokens(engine.generate([prompt(9)], SAMPLED))[0]
        others = [replace(SAMPLED, seed=None), GREEDY, SAMPLED, replace(SAMPLED, temperature=3.0, top_k=5, seed=1)]
        batch = engine.generate([prompt(3), prompt(20), prompt(9), prompt(14)], others)
        assert tokens(batch)[2] == alone
        assert tokens(batch)[1] == by_hand(prompt(20), 12)
    with start(depth=0, max_num_batched_tokens=8, prefix_caching=False) as engine:
        assert tokens(engine.generate([prompt(9)], SAMPLED))[0] == alone
        assert tokens(engine.generate([prompt(9)], replace(SAMPLED, seed=8)))[0] != alone


def test_without_a_seed_every_request_differs_and_the_engines_seed_repeats_them() -> None:
    sampling = replace(SAMPLED, seed=None, temperature=2.0)

    def run(seed: int | None) -> list[list[int]]:
        with start(seed=seed) as engine:
            return tokens(engine.generate([prompt(9)] * 3, sampling))

    first = run(5)
    assert first == run(5)
    assert len({tuple(ids) for ids in first}) == 3
    assert run(6) != first
    assert run(None) != run(None)
    assert run(2**63 - 1) == run(2**63 - 1)


def test_top_k_of_one_is_greedy_and_extreme_values_are_legal() -> None:
    with start() as engine:
        params = [replace(SAMPLED, top_k=k) for k in (1, -1, 0, 255, 256, 10**6)]
        results = tokens(engine.generate([prompt(9)] * 6, params))
        assert results[0] == by_hand(prompt(9), 12)
        assert results[1] == results[2] == results[4] == results[5]
        assert all(0 <= token < CONFIG.vocab_size for ids in results for token in ids)


def test_sampling_defaults_are_the_models(byte_folder: Path) -> None:
    """Its generation_config says temperature 0.6, top_k 20, top_p 0.95."""
    said = SamplingParams(temperature=0.6, top_k=20, top_p=0.95, seed=4)
    with Engine(byte_folder, kv_blocks=60) as engine:
        outputs = engine.generate(["The king"] * 3, [SamplingParams(seed=4), said, SamplingParams(seed=4, top_k=0)])
        assert outputs[0].token_ids == outputs[1].token_ids != outputs[2].token_ids


# --- the prefix cache ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 12, 15, 16, 17, 33])
@pytest.mark.parametrize("block_size", [4, 16, 32])
def test_a_second_run_hits_the_cache_and_gives_the_same(length: int, block_size: int) -> None:
    with start(block_size=block_size, max_num_batched_tokens=11) as engine:
        first, second = (engine.generate([prompt(length)], GREEDY)[0] for _ in range(2))
        assert first.cached_tokens == 0
        unit = min(block_size, 16)
        assert second.cached_tokens == min(length // unit * unit, length - 1)
        assert second.token_ids == first.token_ids == by_hand(prompt(length), 12)
        assert_idle(engine)


def test_a_hit_on_a_part_of_a_block_copies_it() -> None:
    with start(block_size=32) as engine:
        shared = prompt(40)
        engine.generate([shared], GREEDY)
        other = [*shared[:20], *prompt(9, 1)]
        output = engine.generate([other], GREEDY)[0]
        assert output.cached_tokens == 16
        assert output.token_ids == by_hand(other, 12)
        assert tokens(engine.generate([shared], GREEDY))[0] == by_hand(shared, 12)


def test_generated_tokens_are_hit_by_the_next_turn() -> None:
    with start() as engine:
        reply = engine.generate([prompt(9)], GREEDY)[0].token_ids
        second = [*prompt(9), *reply, *prompt(3, 1)]
        output = engine.generate([second], GREEDY)[0]
        assert output.cached_tokens == 20
        assert output.token_ids == by_hand(second, 12)


def test_salts_do_not_share_prefixes() -> None:
    with start() as engine:
        salts = [None, "a", "b", "a", None]
        outputs = [engine.generate([prompt(9)], replace(GREEDY, cache_salt=salt))[0] for salt in salts]
        assert [output.cached_tokens for output in outputs] == [0, 0, 0, 8, 8]
        assert all(output.token_ids == by_hand(prompt(9), 12) for output in outputs)


def test_the_prefix_cache_can_be_off() -> None:
    with start(prefix_caching=False) as engine:
        outputs = [engine.generate([prompt(9)], GREEDY)[0] for _ in range(2)]
        assert [output.cached_tokens for output in outputs] == [0, 0]
        assert engine._scheduler.stats().cached_blocks == 0


def add_steer(x: Tensor, context: Context, /) -> Tensor:
    return x + context.inputs.extras["steer"][context.inputs.rows_t.long(), None]


@pytest.mark.parametrize("affects_kv", [True, False])
def test_an_extra_is_part_of_the_prefix_unless_it_says_not(affects_kv: bool) -> None:
    layers = Layers().edit("layers.0.residual_pre", add_steer).extra("steer", affects_kv=affects_kv)

    def steered(value: float) -> SamplingParams:
        return replace(GREEDY, extra_args={"steer": value})

    with start(layers) as engine:
        params = [GREEDY, steered(4.0), steered(-4.0), steered(4.0), steered(0.0), GREEDY]
        outputs = [engine.generate([prompt(9)], one)[0] for one in params]
        hits = [output.cached_tokens for output in outputs]
        if affects_kv:
            assert hits == [0, 0, 0, 8, 8, 8]
            plain, plus, minus = (output.token_ids for output in outputs[:3])
            assert plain == by_hand(prompt(9), 12)
            assert plain != plus != minus
            assert [o.token_ids for o in outputs[3:]] == [plus, plain, plain]
        else:
            assert hits == [0, 8, 8, 8, 8, 8]


# --- extras ----------------------------------------------------------------------------------------------------------


def test_several_extras_of_unlike_sizes_reach_their_own_requests() -> None:
    names = {
        "flag": Extra(name="flag", dtype=torch.bool, default=False),
        "half": Extra(name="half", shape=(3,), dtype=torch.bfloat16, default=(1.0, 2.0, 3.0)),
        "byte": Extra(name="byte", shape=(5,), dtype=torch.uint8, default=7),
        "long": Extra(name="long", dtype=torch.int64, default=2**40 + 1),
        "grid": Extra(name="grid", shape=(2, 2), default=0.5),
        "none": Extra(name="none", shape=(0,)),
    }

    def seen(x: Tensor, context: Context, /) -> Tensor:
        rows_b = context.inputs.rows_b.long()
        values = [context.inputs.extras[name][rows_b].reshape(len(rows_b), -1).double() for name in names]
        joined = torch.cat(values, dim=1)
        return torch.nn.functional.pad(joined, (0, x.shape[1] - joined.shape[1])).to(x.dtype)

    layers = replace(Layers(), extras=tuple(names.values())).edit("final", seen).capture("final")
    given = {"flag": True, "half": [-1.0, 0.5, 8.0], "byte": [1, 2, 3, 4, 255], "long": -3, "grid": [[1, 2], [3, 4]]}
    default = [0, 1, 2, 3, 7, 7, 7, 7, 7, float(2**40 + 1), 0.5, 0.5, 0.5, 0.5]
    changed = [1, -1, 0.5, 8, 1, 2, 3, 4, 255, -3, 1, 2, 3, 4]
    short = replace(GREEDY, max_tokens=2)
    with start(layers) as engine:
        params = [short, replace(short, extra_args=given), replace(short, extra_args={"long": 6}), short]
        outputs = engine.generate([prompt(n) for n in (5, 1, 9, 1)], params)
        rows = [default, changed, [*default[:9], 6, *default[10:]], default]
        for output, row in zip(outputs, rows):
            assert output.captured["final"].shape == (2, 64)
            assert torch.equal(output.captured["final"][:, :14], torch.tensor(row, dtype=torch.float32).expand(2, -1))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"wrong": 1}, "'wrong', which no function of the engine reads; known: v"),
        ({"v": [1, 2]}, r"extra 'v' must have shape \[3\]"),
        ({"v": "text"}, r"extra 'v' must have shape \[3\]"),
        ({"v": [10**400] * 3}, r"extra 'v' must have shape \[3\]"),
    ],
)
def test_extras_that_do_not_fit_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack_extras([Extra(name="v", shape=(3,))], values)


def test_bad_extras_fail_their_request_alone() -> None:
    with start() as engine:
        outputs = engine.generate([prompt(5)] * 2, [replace(GREEDY, extra_args={"nothing": 1}), GREEDY])
        assert "none is declared" in str(outputs[0].error)
        assert outputs[1].token_ids == by_hand(prompt(5), 12)
        assert_idle(engine)


def counting(logits_lv: Tensor, context: Context, /) -> tuple[Tensor, dict[str, Tensor]]:
    """A sampler with a memory: the best token, plus how many this request has sampled before."""
    count_l = context.inputs.extras["count"][context.inputs.rows_b.long()]
    ids_l = (logits_lv.argmax(-1) + count_l) % logits_lv.shape[1]
    return ids_l.to(torch.int32), {"count": count_l + 1}


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_what_a_sampler_keeps_in_an_extra_survives_preemption(depth: int) -> None:
    layers = Layers(sample=counting).extra("count", dtype=torch.int64, default=0)
    sampling = SamplingParams(max_tokens=30)
    prompts = [prompt(5, seed) for seed in range(5)]
    expected = []
    for ids in prompts:
        known = list(ids)
        for count in range(30):
            best = int(logits(weights(), torch.tensor(known), config=CONFIG)[-1].argmax())
            known.append((best + count) % CONFIG.vocab_size)
        expected.append(known[5:])
    for kv_blocks in (80, 13):
        with start(layers, kv_blocks=kv_blocks, depth=depth) as engine:
            assert tokens(engine.generate(prompts, sampling)) == expected
            assert (engine._scheduler.stats().preemptions > 0) == (kv_blocks == 13)
            assert_idle(engine)


# --- lengths ---------------------------------------------------------------------------------------------------------


def test_max_tokens_and_the_models_length_end_with_length() -> None:
    with start(max_model_len=16) as engine:
        params = [replace(GREEDY, max_tokens=n) for n in (1, 4, 400, None)]
        outputs = engine.generate([prompt(6)] * 4, params)
        assert [len(output.token_ids) for output in outputs] == [1, 4, 10, 10]
        assert {output.finish_reason for output in outputs} == {"length"}
        assert outputs[2].token_ids == by_hand(prompt(6), 10)


@pytest.mark.parametrize("prompt_length", [14, 15, 16, 17])
def test_a_prompt_must_leave_room_for_a_token(prompt_length: int) -> None:
    with start(max_model_len=16) as engine:
        if prompt_length < 16:
            output = engine.generate([prompt(prompt_length)], replace(GREEDY, max_tokens=5))[0]
            assert output.token_ids == by_hand(prompt(prompt_length), 16 - prompt_length)
            assert output.finish_reason == "length"
        else:
            with pytest.raises(ValueError, match=r"leaves no room to sample within max_model_len=16; shorten it to 15"):
                engine.generate(prompt(prompt_length), GREEDY)
        assert_idle(engine)


def test_a_pool_smaller_than_the_models_length_ends_sequences_and_says_so() -> None:
    with start(kv_blocks=5, max_model_len=64) as engine:
        assert engine.describe()["notes"] == ["sequences end at 17 tokens, where the KV pool is full"]
        outputs = engine.generate([prompt(6), prompt(17), prompt(16), prompt(3)], replace(GREEDY, max_tokens=30))
        assert [len(output.token_ids) for output in outputs] == [11, 0, 1, 14]
        assert [output.finish_reason for output in outputs] == ["length", "error", "length", "length"]
        assert "does not fit the KV pool of 4 blocks of 4 tokens" in str(outputs[1].error)
        assert outputs[0].token_ids == by_hand(prompt(6), 11)
        assert_idle(engine)


# --- stops -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("eos", [256, 258])
def test_every_eos_of_the_generation_config_stops(forced: Engine, eos: int) -> None:
    output = forced.generate([[5, 5]], script([*b"ab", eos, *b"cd"]))[0]
    assert output.token_ids == [*b"ab", eos]
    assert (output.text, output.finish_reason) == ("ab", "stop")


def test_a_stop_id_beside_the_eos_and_special_tokens_on_request(forced: Engine) -> None:
    sampling = script([*b"ab", ord("!"), *b"cd"], stop_token_ids=[ord("!")])
    output = forced.generate([[5]], sampling)[0]
    assert (output.token_ids, output.text, output.finish_reason) == ([*b"ab!"], "ab!", "stop")
    shown = forced.generate([[5]], script([*b"ab", 258], skip_special_tokens=False))[0]
    assert shown.text.startswith("ab<")
    assert len(shown.text) > 4


def test_more_stop_ids_than_the_device_knows(forced: Engine) -> None:
    ids = list(range(20, 40))
    outputs = forced.generate([[5]] * 3, [script([*b"ab", n, *b"c"], stop_token_ids=ids) for n in (20, 33, 39)])
    assert [output.token_ids for output in outputs] == [[*b"ab", 20], [*b"ab", 33], [*b"ab", 39]]
    assert [output.finish_reason for output in outputs] == ["stop"] * 3


def test_min_tokens_forbids_every_stop_id_before(forced: Engine) -> None:
    always = [256] * SCRIPT
    outputs = forced.generate([[5, 6, 7]] * 3, [script(always, min_tokens=n) for n in (0, 1, 4)])
    assert [output.token_ids for output in outputs] == [[256], [257, 256], [257] * 4 + [256]]
    assert [output.finish_reason for output in outputs] == ["stop"] * 3
    both = script([258, 256, 258, 256], min_tokens=2, stop_token_ids=[257], max_tokens=5)
    assert forced.generate([[5]], both)[0].token_ids == [259, 0, 258]


def test_min_tokens_beyond_every_length_runs_to_the_limit() -> None:
    with start(max_model_len=20) as engine:
        endless = SamplingParams(temperature=0.0, min_tokens=2**40, max_tokens=None, stop_token_ids=[2**31 - 1])
        (output,) = engine.generate([prompt(5)], endless)
        assert (len(output.token_ids), output.finish_reason) == (15, "length")
        assert output.token_ids == by_hand(prompt(5), 15)


def test_ignore_eos_leaves_the_users_own_stop_ids(forced: Engine) -> None:
    outputs = forced.generate(
        [[5]] * 2,
        [
            script([256, 258, 65, 256, 66, 67], ignore_eos=True, max_tokens=6),
            script([256, 258, 65, 256, 66, 67], ignore_eos=True, stop_token_ids=[66]),
        ],
    )
    assert [output.token_ids for output in outputs] == [[256, 258, 65, 256, 66, 67], [256, 258, 65, 256, 66]]
    assert [output.finish_reason for output in outputs] == ["length", "stop"]
    assert outputs[0].text == "ABC"


UNICODE = "ď 客单价 🌶️ 👩‍🚀"
TEXTS = {
    "stop over tokens": (b"the brown fox", {"stop": "own fox"}, "the br", 13, "stop"),
    "included": (
        b"the brown fox",
        {"stop": ["own fox"], "include_stop_str_in_output": True},
        "the brown fox",
        13,
        "stop",
    ),
    "the first that is complete": (b"abcdef", {"stop": ["def", "cd"]}, "ab", 4, "stop"),
    "held tail comes at the end": (b"the brown", {"stop": "own fox", "max_tokens": 9}, "the brown", 9, "length"),
    "held tail comes before an EOS": (b"the brow\x00", {"stop": "own fox"}, "the brow", 9, "stop"),
    "stop right after a mark": (b"why?\nx", {"stop": "\n"}, "why?", 5, "stop"),
    "stop on the last token": (b"abc", {"stop": "c", "max_tokens": 3}, "ab", 3, "stop"),
    "min_tokens": (b"a.b.c.d", {"stop": ".", "min_tokens": 4}, "a.b", 4, "stop"),
    "unicode": (UNICODE.encode(), {"max_tokens": len(UNICODE.encode())}, UNICODE, len(UNICODE.encode()), "length"),
    "cut in a character": ("ab🌶".encode(), {"max_tokens": 4}, "ab\ufffd", 4, "length"),
    "invalid bytes": (b"a\xff\xfeb", {"max_tokens": 4}, "a\ufffd\ufffdb", 4, "length"),
}


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_text_ends_alike_streamed_and_whole(byte_folder: Path, name: str, depth: int) -> None:
    forced_bytes, sampling, text, count, reason = TEXTS[name]
    ids = [256 if byte == 0 else byte for byte in forced_bytes]
    params = script(ids, **sampling)
    with Engine(byte_folder, layers=FORCED, kv_blocks=60, depth=depth, debug=True) as engine:
        output = engine.generate("hello", params)[0]
        deltas = list(engine.stream("hello", params))
        assert output.text == text
        assert output.token_ids == ids[:count]
        assert output.finish_reason == reason
        assert output.prompt == "hello"
        assert output.prompt_token_ids == [*b"hello"]
        assert "".join(delta.text for delta in deltas) == text
        assert [token for delta in deltas for token in delta.token_ids] == output.token_ids
        assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + [reason]
        if name == "unicode":
            assert not any("\ufffd" in delta.text for delta in deltas)
        assert_idle(engine)


def test_detokenize_false_gives_ids_only(forced: Engine) -> None:
    output = forced.generate("hello", script(b"abc", detokenize=False, max_tokens=3))[0]
    assert (output.text, output.token_ids, output.finish_reason) == ("", [*b"abc"], "length")
    deltas = list(forced.stream("hello", script(b"abc", detokenize=False, max_tokens=3)))
    assert [token for delta in deltas for token in delta.token_ids] == [*b"abc"]
    assert {delta.text for delta in deltas} == {""}


# --- bad prompts -----------------------------------------------------------------------------------------------------

BAD_PROMPTS = {
    "no text": ("", "the prompt is empty"),
    "no ids": ([], "the prompt is empty"),
    "id too large": ([1, 320], "token id 320 is out of range; the model's vocabulary has 320 ids"),
    "id below zero": ([1, -1], "out of range; ids start at 0"),
    "huge id": ([2**70], "integers|out of range"),
    "floats": ([1.5, 2.0], "integers only"),
    "nested": ([[1, 2], [3]], "flat list of integers"),
    "nothing": (None, "must be a string or a list of token ids, not NoneType"),
    "a mapping": ({"a": 1}, "must be a string or a list of token ids, not dict"),
    "too long": ([1] * 600, "leaves no room to sample within max_model_len=512|does not fit the KV pool"),
}


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_a_bad_prompt_fails_alone(forced: Engine, name: str) -> None:
    bad, message = BAD_PROMPTS[name]
    outputs = forced.generate(["one", bad, "two"], script(b"abc", max_tokens=3))
    assert [output.text for output in outputs] == ["abc", "", "abc"]
    assert [output.finish_reason for output in outputs] == ["length", "error", "length"]
    with pytest.raises(ValueError, match=message):
        raise ValueError(outputs[1].error)
    with pytest.raises(ValueError, match=message):
        forced.submit(bad)
    with pytest.raises(ValueError, match=message):
        forced.stream(bad)
    assert_idle(forced)


@pytest.mark.parametrize("bad", ["", [1, 320], [1] * 600])
def test_a_single_bad_prompt_raises(forced: Engine, bad: Any) -> None:
    with pytest.raises(ValueError, match=r"prompt|token"):
        forced.generate(bad)
    assert_idle(forced)


@pytest.mark.parametrize("bad", [None, 3, b"bytes", {"prompt": "x"}, np.array(3), torch.tensor(3)])
def test_what_is_no_list_of_prompts_is_refused(forced: Engine, bad: Any) -> None:
    with pytest.raises(ValueError, match="prompts must be a string"):
        forced.generate(bad)


def test_no_prompts_give_no_outputs(forced: Engine) -> None:
    assert forced.generate([]) == []


def test_a_hundred_refusals_take_no_block(forced: Engine) -> None:
    before = forced._scheduler.stats()
    outputs = forced.generate([[1] * 600] * 100, GREEDY)
    assert all(output.error for output in outputs)
    after = forced._scheduler.stats()
    assert (after.free_blocks, after.cached_blocks) == (before.free_blocks, before.cached_blocks)
    assert_idle(forced)


def test_prompts_may_be_arrays_and_tensors() -> None:
    ids = prompt(5)
    expected = by_hand(ids, 12)
    with start() as engine:
        for given in (ids, tuple(ids), np.array(ids), torch.tensor(ids), [np.array(ids)], torch.tensor([ids])):
            assert tokens(engine.generate(given, GREEDY)) == [expected]


def test_sampling_must_fit_the_prompts(forced: Engine) -> None:
    with pytest.raises(ValueError, match="2 sampling parameters for 3 prompts; give one, or one for each"):
        forced.generate(["a", "b", "c"], [GREEDY, GREEDY])
    for wrong in ({"temperature": 0}, [{"temperature": 0}], 0.5):
        with pytest.raises(ValueError, match="sampling must be SamplingParams or a list of them"):
            forced.generate(["a"], wrong)
    mixed = forced.generate(["a", "b"], [script(b"xy", max_tokens=2), None])
    assert mixed[0].text == "xy"
    assert len(mixed[1].token_ids) == 16
    assert_idle(forced)


def test_without_a_tokenizer_text_is_refused_and_ids_are_not() -> None:
    with start() as engine:
        with pytest.raises(ValueError, match="a text prompt needs a tokenizer"):
            engine.generate("text")
        with pytest.raises(ValueError, match=r"stop=\['x'\] needs a tokenizer"):
            engine.generate([1], SamplingParams(stop="x"))
        output = engine.generate([1, 2], GREEDY)[0]
        assert (output.text, output.prompt, len(output.token_ids)) == ("", None, 12)


# --- streams, aborts and steps ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("read", [0, 1, 3])
@pytest.mark.parametrize("depth", [0, 2])
def test_closing_a_stream_frees_everything(read: int, depth: int) -> None:
    with start(depth=depth, max_num_batched_tokens=8) as engine:
        stream = engine.stream(prompt(20), replace(GREEDY, max_tokens=None))
        for _ in range(read):
            next(stream)
        stream.close()
        steps = engine._scheduler.stats().steps
        while engine.has_work:
            engine.step()
        assert engine._scheduler.stats().steps <= steps + 1
        assert_idle(engine)
        assert tokens(engine.generate([prompt(20)], GREEDY))[0] == by_hand(prompt(20), 12)


def test_a_dropped_stream_ends_its_request() -> None:
    with start() as engine:
        stream = engine.stream(prompt(20), replace(GREEDY, max_tokens=None))
        next(stream)
        del stream
        while engine.has_work:
            engine.step()
        assert_idle(engine)


def test_streams_and_batches_go_on_beside_each_other() -> None:
    with start() as engine:
        long = engine.stream(prompt(9), replace(GREEDY, max_tokens=30))
        first = next(long)
        other = engine.stream(prompt(5), GREEDY)
        batch = engine.generate([prompt(3), prompt(4)], replace(GREEDY, max_tokens=40))
        assert tokens(batch) == [by_hand(prompt(3), 40), by_hand(prompt(4), 40)]
        # Both have ended in the meantime; nothing of them is lost.
        rest = [token for delta in long for token in delta.token_ids]
        assert [*first.token_ids, *rest] == by_hand(prompt(9), 30)
        deltas = list(other)
        assert [token for delta in deltas for token in delta.token_ids] == by_hand(prompt(5), 12)
        assert deltas[-1].finish_reason == "length"
        assert_idle(engine)


def test_interleaved_streams() -> None:
    with start() as engine:
        streams = [engine.stream(prompt(n), GREEDY) for n in (3, 9, 14)]
        got: list[list[int]] = [[], [], []]
        live = [0, 1, 2]
        while live:
            for i in list(live):
                delta = next(streams[i], None)
                if delta is None:
                    live.remove(i)
                else:
                    got[i] += delta.token_ids
        assert got == [by_hand(prompt(n), 12) for n in (3, 9, 14)]
        assert_idle(engine)


def test_submit_step_output() -> None:
    with start() as engine:
        ids = [engine.submit(prompt(n), GREEDY) for n in (3, 9)]
        late, seen = None, []
        while engine.has_work:
            seen += engine.step()
            if late is None:
                late = engine.submit(prompt(5), replace(GREEDY, max_tokens=2))
        assert sorted(seen) == sorted([*ids, late])
        outputs = [engine.output(request_id, index) for index, request_id in enumerate([*ids, late])]
        assert [output.index for output in outputs] == [0, 1, 2]
        assert tokens(outputs) == [by_hand(prompt(3), 12), by_hand(prompt(9), 12), by_hand(prompt(5), 2)]
        with pytest.raises(ValueError, match=f"there is no request {late}"):
            engine.output(late)
        assert engine.step() == []
        assert_idle(engine)


def test_an_output_is_given_at_the_end_only() -> None:
    with start() as engine:
        request_id = engine.submit(prompt(3), GREEDY)
        engine.step()
        with pytest.raises(ValueError, match=f"request {request_id} has not ended"):
            engine.output(request_id)
        while request_id not in engine.step():
            pass
        assert engine.output(request_id).token_ids == by_hand(prompt(3), 12)


def test_generate_leaves_the_requests_of_others_to_step() -> None:
    with start() as engine:
        other = engine.submit(prompt(5), replace(GREEDY, max_tokens=2))
        engine.generate([prompt(9)], GREEDY)
        assert engine.has_work
        assert engine.step() == [other]
        assert engine.output(other).token_ids == by_hand(prompt(5), 2)
        assert not engine.has_work
        assert_idle(engine)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5])
def test_an_abort_anywhere_frees_everything_at_once(depth: int, steps: int) -> None:
    with start(depth=depth, max_num_batched_tokens=8) as engine:
        engine.generate([prompt(9)], GREEDY)
        kept = engine.submit(prompt(9), GREEDY)
        gone = engine.submit(prompt(20), replace(GREEDY, max_tokens=None), stream=True)
        told = [request_id for _ in range(steps) for request_id in engine.step()]
        engine.abort(gone)
        engine.abort(gone)
        engine.abort(12345)
        assert engine._scheduler.stats().running + engine._scheduler.stats().waiting == 1
        while engine.has_work:
            told += engine.step()
        assert sorted(told) == [kept, gone]
        output = engine.output(gone)
        assert output.finish_reason == "abort"
        assert output.token_ids == by_hand(prompt(20), len(output.token_ids)) if output.token_ids else True
        assert engine.output(kept).token_ids == by_hand(prompt(9), 12)
        assert_idle(engine)
        assert tokens(engine.generate([prompt(20)], GREEDY))[0] == by_hand(prompt(20), 12)


def test_an_exception_in_the_middle_of_generate_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is not the step's: here the progress bar is interrupted."""
    with start() as engine:
        calls = []

        def interrupt(self: Any, pending: int) -> None:
            calls.append(pending)
            if len(calls) == 4:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(engine_module.GenerateProgress, "update", interrupt)
            with pytest.raises(KeyboardInterrupt):
                engine.generate([prompt(9), prompt(20)], GREEDY)
        while engine.has_work:
            assert engine.step() == []
        assert_idle(engine)
        assert tokens(engine.generate([prompt(9)], GREEDY))[0] == by_hand(prompt(9), 12)


def test_the_progress_bar_counts(capfd: pytest.CaptureFixture[str]) -> None:
    with start() as engine:
        engine.generate([prompt(9), prompt(20), []], GREEDY, progress=True)
        shown = capfd.readouterr()
        assert "2/2" in shown.err
        assert "decode" in shown.err
        assert not shown.out
        engine.generate([prompt(9)], GREEDY)
        assert capfd.readouterr().err == ""


# --- failures --------------------------------------------------------------------------------------------------------


class Bomb:
    """An mlp that raises at a given call behind those of the engine's start."""

    def __init__(self, error: BaseException | None, at: int = 6) -> None:
        self.error, self.left = error, at + CONFIG.num_layers

    def __call__(self, x_td: Tensor, params: Any, context: Context, /) -> Tensor:
        self.left -= 1
        if self.left == 0 and self.error is not None:
            raise self.error
        return swiglu(x_td, params, context)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_an_exception_in_a_step_ends_the_engine_clearly(depth: int) -> None:
    with start(Layers(mlp=Bomb(ArithmeticError("no good"))), depth=depth) as engine:
        other = engine.submit(prompt(3), replace(GREEDY, max_tokens=40))
        with pytest.raises(EngineError, match=r"a step failed \(ArithmeticError: no good\); open a new engine"):
            engine.generate([prompt(9), prompt(20)], GREEDY)
        for use in (lambda: engine.generate([1]), lambda: engine.submit([1]), engine.step, lambda: engine.call(id)):
            with pytest.raises(EngineError, match=r"a step failed before .*no good"):
                use()
        assert engine.has_work  # so that a loop over `step` hears of it
        assert engine.output(other).finish_reason == "error"
        assert torch.equal(engine.params.norm.weight, weights().norm.weight)  # the weights can still be read
        assert_idle(engine)


def test_an_interrupt_in_a_step_ends_the_engine_clearly() -> None:
    with start(Layers(mlp=Bomb(KeyboardInterrupt()))) as engine:
        stream = engine.stream(prompt(3), replace(GREEDY, max_tokens=40))
        next(stream)
        with pytest.raises(KeyboardInterrupt):
            engine.generate([prompt(9), prompt(20)], GREEDY)
        with pytest.raises(EngineError, match=r"a step failed before \(KeyboardInterrupt\); open a new engine"):
            engine.generate([prompt(9)], GREEDY)
        with pytest.raises(EngineError, match="KeyboardInterrupt"):
            list(stream)
        assert_idle(engine)


def test_an_interrupt_while_steps_are_read_ends_the_engine_clearly(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(launched: Any) -> Any:
        raise KeyboardInterrupt

    with start(depth=2) as engine:
        engine.submit(prompt(9), GREEDY)
        engine.step()
        monkeypatch.setattr(engine._executor, "read", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.call(id)
        with pytest.raises(EngineError, match="a step failed before"):
            engine.step()


def test_nan_logits_fail_their_request_alone() -> None:
    def broken(x_ld: Tensor, params: Any, context: Context, /) -> Tensor:
        scores_lv = default_head(x_ld, params, context)
        is_nine = (context.inputs.prompt_lens_b == 9)[:, None]
        return torch.where(is_nine, torch.nan, scores_lv)

    with start(Layers(head=broken)) as engine:
        outputs = engine.generate([prompt(9), prompt(5)], GREEDY)
        assert outputs[0].finish_reason == "error"
        assert "NaN" in str(outputs[0].error)
        assert outputs[1].token_ids == by_hand(prompt(5), 12)
        with pytest.raises(EngineError, match="NaN"):
            list(engine.stream(prompt(9), GREEDY))
        assert_idle(engine)
        assert tokens(engine.generate([prompt(5)], GREEDY))[0] == by_hand(prompt(5), 12)


def test_a_closed_engine_says_so() -> None:
    engine = start()
    stream = engine.stream(prompt(3), GREEDY)
    next(stream)
    engine.close()
    engine.close()
    uses = [
        lambda: engine.generate([1]),
        lambda: engine.stream([1]),
        lambda: engine.submit([1]),
        engine.step,
        lambda: engine.params,
        lambda: engine.call(id),
        lambda: engine.update_layers(Layers()),
        lambda: engine.update_params(weights()),
        lambda: list(stream),
    ]
    for use in uses:
        with pytest.raises(EngineError, match="the engine is closed; open a new one"):
            use()


BAD_OPTIONS = {
    "tp": ({"tp": 0}, "tp=0"),
    "tp that does not divide": ({"tp": 3}, "tp=3"),
    "device": ({"device": "tpu"}, "device='tpu' must be cpu or cuda"),
    "device of no number": ({"device": "cpu:x"}, "device='cpu:x' must be cpu or cuda"),
    "tp as a word": ({"tp": "2"}, "tp='2' must be an integer"),
    "seed": ({"seed": 1.5}, r"seed=1\.5 must be an integer"),
    "no layers": ({"layers": None}, "layers=None must be a record of functions"),
    "dtype": ({"dtype": "int8"}, "dtype='int8' must be auto, float32"),
    "a dtype": ({"dtype": torch.int8}, "dtype=torch.int8 must be auto, float32"),
    "model length": ({"max_model_len": 513}, "max_model_len=513 must be from 2 to .* 512"),
    "short model length": ({"max_model_len": 1}, "max_model_len=1 must be from 2"),
    "sequences": ({"max_num_seqs": 0}, "max_num_seqs=0 must be at least 1"),
    "many sequences": ({"max_num_seqs": 10**9}, "max_num_seqs=1000000000 must be at most 65536"),
    "block size": ({"block_size": -1}, "block_size=-1 must be at least 1"),
    "pool": ({"kv_blocks": 1}, "kv_blocks=1 is below 2"),
    "pool below zero": ({"kv_blocks": -2}, "kv_blocks=-2 is below 2"),
    "depth": ({"depth": -1}, "depth=-1 must be at least 0"),
    "no weights": ({"params": None}, "config= alone has no weights"),
    "layers": ({"layers": Layers().at(9, mlp=swiglu)}, "layer 9 is replaced"),
    "tokenizer": ({"tokenizer": object()}, "is no tokenizer"),
    "tree": ({"params": (1, 2)}, "no tree of the model's shape"),
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_bad_options_are_refused(name: str) -> None:
    options, message = BAD_OPTIONS[name]
    options = dict(options)
    with pytest.raises(ValueError, match=message):
        start(options.pop("layers", Layers()), **options)


def test_parameters_of_another_shape_are_refused() -> None:
    other = init_params(param_specs(replace(CONFIG, intermediate_size=80)))
    with pytest.raises(ValueError, match=r"gate_proj.* has shape \[160, 64\]; the model needs \[192, 64\]"):
        start(params=other)


def test_a_device_may_be_torchs_own() -> None:
    with start(device=torch.device("cpu")) as engine:
        assert engine.describe()["device"] == "cpu"


def test_a_budget_below_the_number_of_sequences_is_raised_audibly() -> None:
    with start(max_num_batched_tokens=4, max_num_seqs=8) as engine:
        assert engine.options.max_num_batched_tokens == 8
        assert "max_num_batched_tokens=4 is raised to 8" in engine.notes[0]


# --- engines in memory -----------------------------------------------------------------------------------------------


def test_random_weights_follow_the_seed(tmp_path: Path) -> None:
    tiny_folder(tmp_path, eos_token_id=None)

    def run(**options: Any) -> list[int]:
        with Engine(kv_blocks=40, **options) as engine:
            return tokens(engine.generate([prompt(9)], GREEDY))[0]

    memory = {"config": CONFIG, "random_weights": True}
    assert run(**memory, seed=3) == run(**memory, seed=3) != run(**memory, seed=4)
    from_folder = run(model=tmp_path, random_weights=True, seed=3)
    assert from_folder == run(**memory, seed=3)
    assert from_folder != run(model=tmp_path)


def test_two_engines_live_side_by_side() -> None:
    with start() as first, start(params=weights(1)) as second:
        one, two = first.stream(prompt(9), GREEDY), second.stream(prompt(9), GREEDY)
        pairs = list(zip(one, two))
        assert [token for delta, _ in pairs for token in delta.token_ids] == by_hand(prompt(9), 12)
        assert [token for _, delta in pairs for token in delta.token_ids] == by_hand(prompt(9), 12, params=weights(1))


def test_a_tokenizer_of_transformers(byte_folder: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(byte_folder)
    config = tiny_config(vocab_size=320, eos_token_ids=())
    options = {"config": config, "random_weights": True, "kv_blocks": 40}
    with Engine(layers=FORCED, tokenizer=theirs, **options) as engine:
        output = engine.generate("hello", script([*"grüß".encode(), 258]))[0]
        assert (output.text, output.finish_reason) == ("grüß", "stop")  # EOS is the tokenizer's
        assert output.prompt_token_ids == theirs.encode("hello")


def test_generate_is_one_call(byte_folder: Path) -> None:
    with Engine(byte_folder, kv_blocks=60) as engine:
        expected = engine.generate(["The king", "A queen"], SamplingParams(temperature=0.0, max_tokens=5))
    outputs = engine_module.generate(byte_folder, ["The king", "A queen"], temperature=0.0, max_tokens=5)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
    assert [output.text for output in outputs] == [output.text for output in expected]
    with pytest.raises(ValueError, match="temperature=-1"):
        engine_module.generate(byte_folder, "x", temperature=-1)


# --- gradients and modes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_the_engine_works_in_any_mode_and_its_parameters_can_be_trained(mode: Any) -> None:
    ids = torch.tensor(prompt(9))
    with mode():
        engine = start(params=pytree.tree_map(torch.clone, weights()))
        assert tokens(engine.generate([prompt(9)], GREEDY))[0] == by_hand(prompt(9), 12)
    with engine:
        assert tokens(engine.generate([prompt(9)], GREEDY))[0] == by_hand(prompt(9), 12)
        for leaf in pytree.tree_leaves((engine.params, engine._runner.cache, engine._runner.state)):
            assert not leaf.is_inference()
            assert not leaf.requires_grad

        leaves = [leaf.requires_grad_() for leaf in pytree.tree_leaves(engine.params)]
        loss = torch.nn.functional.cross_entropy(logits(engine.params, ids, config=CONFIG)[:-1], ids[1:])
        grads = torch.autograd.grad(loss, leaves)
        assert all(grad.abs().sum() > 0 for grad in grads)
        with torch.no_grad():
            for leaf, grad in zip(leaves, grads):
                leaf -= 0.5 * grad
        with mode():
            output = engine.generate([prompt(9, 1)], GREEDY)[0]
        assert output.token_ids == by_hand(prompt(9, 1), 12, params=engine.params)
        assert not output.captured


# --- calls and updates -----------------------------------------------------------------------------------------------


def test_call_runs_on_the_rank_between_steps() -> None:
    with start(depth=2) as engine:
        request = engine.submit(prompt(9), GREEDY)
        engine.step()
        engine.step()

        def facts(rank: Any, factor: float) -> tuple[Any, ...]:
            return rank.group.size, rank.model.config.vocab_size, factor * rank.params.norm.weight.sum().item()

        (found,) = engine.call(facts, 2.0)
        assert found == (1, 256, pytest.approx(2 * weights().norm.weight.sum().item()))
        assert engine._scheduler.num_in_flight == 0
        with pytest.raises(ZeroDivisionError):
            engine.call(lambda rank: 1 / 0)
        while engine.has_work:
            engine.step()
        assert engine.output(request).token_ids == by_hand(prompt(9), 12)


def half_mlp(x_td: Tensor, params: Any, context: Context, /) -> Tensor:
    return 0.5 * swiglu(x_td, params, context)


HALF = Layers(mlp=half_mlp)


def test_update_layers_takes_effect_and_no_old_prefix_is_hit() -> None:
    with start() as engine:
        engine.generate([prompt(9)], GREEDY)
        engine.update_layers(HALF)
        output = engine.generate([prompt(9)], GREEDY)[0]
        assert output.cached_tokens == 0
        assert output.token_ids == by_hand(prompt(9), 12, HALF) != by_hand(prompt(9), 12)
        assert engine.layers == HALF == engine.model.layers
        engine.update_layers(Layers())
        output = engine.generate([prompt(9)], GREEDY)[0]
        assert (output.cached_tokens, output.token_ids) == (0, by_hand(prompt(9), 12))


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_update_layers_in_the_middle_of_requests(depth: int) -> None:
    """With a swapped head the keys and values stay those of the prompt: the tokens can be told in advance."""

    def lowest(x_ld: Tensor, params: Any, context: Context, /) -> Tensor:
        return -default_head(x_ld, params, context)

    with start(depth=depth) as engine:
        running = engine.submit(prompt(9), GREEDY, stream=True)
        for _ in range(3):
            engine.step()
        before = len(engine._requests[running].token_ids)
        engine.update_layers(Layers(head=lowest))
        done = len(engine._requests[running].token_ids)
        assert before <= done <= before + depth
        while engine.has_work:
            engine.step()
        output = engine.output(running)
        head = by_hand(prompt(9), done)
        assert output.token_ids == [*head, *by_hand([*prompt(9), *head], 12 - done, Layers(head=lowest))]
        fresh = engine.generate([prompt(9)], GREEDY)[0]
        assert (fresh.cached_tokens, fresh.token_ids) == (0, by_hand(prompt(9), 12, Layers(head=lowest)))


class OwnCache(NamedTuple):
    k_pskh: Tensor
    v_pskh: Tensor
    more_ps: Tensor


def init_own(config: Any, group: Any, blocks: int, block_size: int, rows: int, device: Any, dtype: Any) -> OwnCache:
    shape = (blocks, block_size, config.num_kv_heads, config.head_dim)
    k, v = (torch.zeros(shape, device=device, dtype=dtype) for _ in range(2))
    return OwnCache(k, v, torch.zeros(blocks, block_size, device=device, dtype=dtype))


def own_attention(
    q_tnh: Tensor, k_tkh: Tensor, v_tkh: Tensor, cache: OwnCache, params: Any, context: Context, /
) -> tuple[Tensor, OwnCache]:
    from funcllm.attention import paged_attention

    cache.more_ps.view(-1)[context.inputs.slots_t] = context.inputs.positions_t.to(cache.more_ps.dtype) + 1
    out, kept = paged_attention(q_tnh, k_tkh, v_tkh, LayerCache(cache.k_pskh, cache.v_pskh), params, context)
    return out, OwnCache(kept.k_pskh, kept.v_pskh, cache.more_ps)


OWN = Layers().at(1, attention=Component(own_attention, init_cache=init_own))


def test_an_own_paged_cache_is_hit_and_copied_with_the_blocks() -> None:
    with start(OWN, block_size=32) as engine:
        assert not engine.notes
        shared = prompt(40)
        engine.generate([shared], GREEDY)
        other = [*shared[:20], *prompt(9, 1)]
        request = engine.submit(other, GREEDY)
        engine.step()
        own = engine._runner.cache[1]
        assert isinstance(own, OwnCache)
        row = int(engine._runner.state.block_table_rm[:, 0].nonzero()[0, 0])
        block = int(engine._runner.state.block_table_rm[row, 0])
        assert own.more_ps[block, :29].tolist() == list(range(1, 30))
        while engine.has_work:
            engine.step()
        output = engine.output(request)
        assert output.cached_tokens == 16
        assert output.token_ids == by_hand(other, 12)


def test_an_own_cache_by_rows_turns_the_prefix_cache_off() -> None:
    layers = Layers().at(1, attention=Component(own_attention, init_cache=init_own, paged=False))
    with start(layers) as engine:
        assert "the prefix cache is off" in engine.notes[0]
        outputs = [engine.generate([prompt(9)], GREEDY)[0] for _ in range(2)]
        assert [output.cached_tokens for output in outputs] == [0, 0]
        assert outputs[0].token_ids == by_hand(prompt(9), 12)


def own_specs(config: Any, group: Any, place: str) -> Any:
    return param_specs(replace(config, intermediate_size=80)).layers[0].mlp


@pytest.mark.parametrize(
    "layers",
    [
        Layers(mlp=Component(swiglu, specs=own_specs)),
        OWN,
        Layers().extra("more"),
        Layers().at(7, mlp=swiglu),
        Layers().capture("layers.9.residual_mid"),
    ],
    ids=["parameters", "cache", "extras", "layer", "site"],
)
def test_update_layers_refuses_what_needs_another_engine(layers: Layers) -> None:
    with start() as engine:
        with pytest.raises(ValueError, match=r"start a new Engine|layer 7|in layer 9"):
            engine.update_layers(layers)
        assert engine.layers == Layers() == engine.model.layers
        assert tokens(engine.generate([prompt(9)], GREEDY))[0] == by_hand(prompt(9), 12)


def test_an_edit_of_the_wrong_shape_is_refused_before_it_is_in_force() -> None:
    wrong = Layers().edit("layers.0.residual_mid", lambda x, context: x[:, :-1])
    with pytest.raises(ValueError, match="the edit of site 'residual_mid' returned"):
        start(wrong)
    with start() as engine:
        with pytest.raises(ValueError, match="the edit of site 'residual_mid' returned"):
            engine.update_layers(wrong)
        assert engine.layers == Layers()
        assert tokens(engine.generate([prompt(9)], GREEDY))[0] == by_hand(prompt(9), 12)


def test_a_state_that_does_not_fit_is_refused_with_its_size() -> None:
    config = replace(CONFIG, max_position_embeddings=10**12)
    with pytest.raises(ValueError, match=r"max_num_seqs=8 sequences of max_model_len=1000000000000 take .* lower one"):
        start(config=config, kv_blocks=None)


def test_layers_whose_warm_up_fails_are_not_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    with start() as engine:
        runner = engine._runner

        def warm_up() -> int:
            if runner.model.layers == HALF:
                raise RuntimeError("does not compile")
            return 0

        monkeypatch.setattr(runner, "_warm_up", warm_up)
        with pytest.raises(RuntimeError, match="does not compile"):
            engine.update_layers(HALF)
        assert engine.layers == Layers() == engine.model.layers
        assert tokens(engine.generate([prompt(9)], GREEDY))[0] == by_hand(prompt(9), 12)


def new_weights_as(kind: str, folder: Path) -> Any:
    params = weights(1)
    if kind == "tree":
        return params
    if kind == "folder":
        save_params(params, param_specs(CONFIG), CONFIG, folder)
        return folder
    pairs = named(params, param_specs(CONFIG))
    return {"mapping": pairs, "list": list(pairs.items()), "iterator": iter(pairs.items())}[kind]


@pytest.mark.parametrize("kind", ["tree", "folder", "mapping", "list", "iterator"])
def test_update_params_takes_every_kind_of_source(kind: str, tmp_path: Path) -> None:
    with start() as engine:
        old = engine.generate([prompt(9)], GREEDY)[0]
        places = [leaf.data_ptr() for leaf in pytree.tree_leaves(engine.params)]
        assert engine.update_params(new_weights_as(kind, tmp_path)) == 1
        new = engine.generate([prompt(9)], GREEDY)[0]
        assert (old.weight_version, new.weight_version, new.cached_tokens) == (0, 1, 0)
        assert new.token_ids == by_hand(prompt(9), 12, params=weights(1)) != old.token_ids
        assert [leaf.data_ptr() for leaf in pytree.tree_leaves(engine.params)] == places
        assert engine.update_params(weights(0)) == 2
        assert tokens(engine.generate([prompt(9)], GREEDY))[0] == old.token_ids
        assert torch.equal(weights(0).norm.weight, engine.params.norm.weight)
        assert weights(0).norm.weight.data_ptr() != engine.params.norm.weight.data_ptr()


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("in_flight", ["keep", "recompute"])
def test_requests_in_flight_keep_or_recompute(depth: int, in_flight: Any) -> None:
    with start(depth=depth) as engine:
        running = engine.submit(prompt(9), GREEDY, stream=True)
        for _ in range(4):
            engine.step()
        engine.update_params(weights(1), in_flight)
        done = list(engine._requests[running].token_ids)
        assert 0 < len(done) < 12
        while engine.has_work:
            engine.step()
        output = engine.output(running)
        assert output.token_ids[: len(done)] == done == by_hand(prompt(9), len(done))
        recomputed = [*done, *by_hand([*prompt(9), *done], 12 - len(done), params=weights(1))]
        assert (output.token_ids == recomputed) == (in_flight == "recompute")
        assert output.weight_version == 1
        fresh = engine.generate([[*prompt(9), *output.token_ids, 3]], GREEDY)[0]
        assert fresh.token_ids == by_hand([*prompt(9), *output.token_ids, 3], 12, params=weights(1))
        assert_idle(engine)


def test_weights_that_do_not_fit_are_refused() -> None:
    pairs = named(weights(1), param_specs(CONFIG))
    name = "model.layers.1.mlp.down_proj.weight"
    with start() as engine:
        engine.generate([prompt(9)], GREEDY)
        with pytest.raises(ValueError, match="'no' must be 'keep' or 'recompute'"):
            engine.update_params(weights(1), "no")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="no tree of the model's shape"):
            engine.update_params(weights(1)._replace(layers=()))
        with pytest.raises(ValueError, match="no tree of the model's shape"):
            engine.update_params(3)
        with pytest.raises(ValueError, match=f"pairs of .* and one is '{name}' with a ndarray"):
            engine.update_params({name: pairs[name].numpy()})
        with pytest.raises(ValueError, match="layers=None must be a record of functions"):
            engine.update_layers(None)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=f"1 parameters got no new value, the first is '{name}'"):
            engine.update_params({key: value for key, value in pairs.items() if key != name})
        with pytest.raises(ValueError, match=r"down_proj.*\[96, 64\].*\[64, 96\]|down_proj.*\[64, 96\].*\[96, 64\]"):
            engine.update_params(pairs | {name: pairs[name].T})
        # Some weights are new: no prefix made with the old ones may be hit.
        output = engine.generate([prompt(9)], GREEDY)[0]
        assert output.cached_tokens == 0
        assert output.weight_version > 0
        assert output.token_ids == by_hand(prompt(9), 12, params=engine.params)


def test_nan_in_unused_slots_poisons_nothing() -> None:
    lengths = (1, 3, 4, 20)
    with start() as engine:
        engine.call(lambda rank: [leaf.fill_(torch.nan) for layer in rank.cache for leaf in layer] and None)
        outputs = engine.generate([prompt(n) for n in lengths], GREEDY)
        assert tokens(outputs) == [by_hand(prompt(n), 12) for n in lengths]


# --- captures and edits ----------------------------------------------------------------------------------------------

SITES = ("embed", "layers.0.residual_mid", "layers.1.mlp.out", "final", "logits")


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_captures_are_what_a_whole_forward_sees(depth: int) -> None:
    layers = Layers().capture(*SITES)
    lengths = (9, 1, 20, 5)
    with start(layers, depth=depth, max_num_batched_tokens=8, kv_blocks=18) as engine:
        sampling = [replace(GREEDY, max_tokens=n) for n in (12, 3, 7, 20)]
        for _ in range(2):  # the second run hits the prefix cache
            outputs = engine.generate([prompt(n) for n in lengths], sampling)
            for output in outputs:
                first, count = len(output.prompt_token_ids) - 1, len(output.token_ids)
                ids = torch.tensor([*output.prompt_token_ids, *output.token_ids[:-1]])
                whole = logits(weights(), ids, config=CONFIG)[first:]
                assert set(output.captured) == set(SITES)
                torch.testing.assert_close(output.captured["logits"], whole, rtol=1e-4, atol=1e-4)
                embed = weights().embed_tokens.weight[ids[first:].long()]
                torch.testing.assert_close(output.captured["embed"], embed)
                assert output.captured["final"].shape == (count, 64)
                assert output.captured["logits"].argmax(1).tolist() == output.token_ids
            assert_idle(engine)


def test_captures_end_where_the_text_ends(byte_folder: Path) -> None:
    layers = FORCED.capture("final")
    with Engine(byte_folder, layers=layers, kv_blocks=60, depth=2, debug=True) as engine:
        output = engine.generate("hello", script(b"abcdef", stop="cd"))[0]
        assert output.token_ids == [*b"abcd"]
        assert output.captured["final"].shape == (4, 64)
        while engine.has_work:
            engine.step()
        assert_idle(engine)
        stream = engine.stream("hello", script(b"abcdef"))
        next(stream)
        stream.close()
        request = engine.submit("hello", script(b"abcdef"))
        engine.step()
        engine.abort(request)
        while engine.has_work:
            engine.step()
        assert engine.output(request).finish_reason == "abort"
        assert_idle(engine)


def test_other_captures_for_running_requests_leave_theirs_empty() -> None:
    with start(Layers().capture("final")) as engine:
        running = engine.submit(prompt(9), GREEDY)
        for _ in range(4):
            engine.step()
        engine.update_layers(Layers().capture("embed"))
        fresh = engine.submit(prompt(5), GREEDY)
        while engine.has_work:
            engine.step()
        old, new = engine.output(running), engine.output(fresh)
        assert old.captured == {}
        assert old.token_ids == by_hand(prompt(9), 12)
        assert set(new.captured) == {"embed"}
        ids = torch.tensor([*prompt(5)[-1:], *new.token_ids[:-1]])
        assert torch.equal(new.captured["embed"], weights().embed_tokens.weight[ids])
        assert_idle(engine)


def test_an_edit_is_the_same_in_the_engine_and_by_hand() -> None:
    layers = Layers().edit("layers.1.residual_mid", lambda x, context: x.roll(1, dims=-1)).capture("final")
    with start(layers, max_num_batched_tokens=8) as engine:
        outputs = engine.generate([prompt(9), prompt(20)], GREEDY)
        assert tokens(outputs) == [by_hand(prompt(9), 12, layers), by_hand(prompt(20), 12, layers)]
        assert tokens(outputs)[0] != by_hand(prompt(9), 12)


# --- what runs -------------------------------------------------------------------------------------------------------


def test_describe_says_what_runs() -> None:
    with start(depth=2, dtype="bf16", seed=1) as engine:
        facts = engine.describe()
        assert (facts["tp"], facts["device"], facts["dtype"], facts["depth"]) == (1, "cpu", "bfloat16", 2)
        assert (facts["kv_blocks"], facts["block_size"], facts["graphs"]) == (60, 4, 0)
        assert engine.params.norm.weight.dtype == torch.bfloat16
        parts = dict(engine.timings)
        assert parts.pop("start") == pytest.approx(sum(parts.values()), rel=1e-9)
        assert min(parts.values()) >= 0
        assert {"configuration", "context", "load", "warm up", "scheduler"} <= set(parts)
        assert facts["prefill"] == "cpu"
        engine.settle()  # nothing was put off
        assert engine.generate(prompt(9), GREEDY)[0].finish_reason == "length"


def test_debug_checks_the_blocks_after_every_step() -> None:
    for debug in (True, False):
        with start(debug=debug, depth=0) as engine:
            engine.submit(prompt(9), GREEDY)
            engine.step()
            engine._scheduler._rows.num_blocks[:] += 1  # a block that nobody owns
            if debug:
                with pytest.raises(EngineError, match="AssertionError"):
                    engine.step()
            else:
                engine.step()


@pytest.mark.slow
def test_a_compiled_engine_gives_the_same_tokens_in_any_mode() -> None:
    """Compiled for a few token counts at the start, and never again; not at all where kernels do the work."""
    before = num_compiled()
    with start(compile=True, kv_blocks=120) as engine:
        assert engine.describe()["compiled"] == before
    with start(compile=True, fusion=False, kv_blocks=120) as engine:
        compiled = engine.describe()["compiled"]
        assert compiled > before
        lengths = (1, 3, 9, 20)
        assert tokens(engine.generate([prompt(n) for n in lengths], GREEDY)) == [
            by_hand(prompt(n), 12) for n in lengths
        ]
        with torch.inference_mode():
            more = engine.generate([prompt(n) for n in range(2, 15)], SAMPLED)
        assert engine.describe()["compiled"] == compiled
    with start(kv_blocks=120) as engine:
        assert tokens(engine.generate([prompt(n) for n in range(2, 15)], SAMPLED)) == tokens(more)
