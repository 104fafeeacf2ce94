"""The engine at tp 2 and 4, with real processes on CPU: the same as at tp 1, and nothing left when a rank dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from funcllm import logits
from funcllm.launch.engine import Engine, Output
from funcllm.launch.errors import EngineError
from funcllm.launch.request import SamplingParams
from funcllm.layers import swiglu
from funcllm.qwen3 import param_specs
from funcllm.record import Layers
from funcllm.specs import init_params, named
from funcllm.types import Context
from tests.patience import patient
from tests.tiny import tiny_config

CONFIG = tiny_config(vocab_size=199, eos_token_ids=(), tie_word_embeddings=True)
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
LENGTHS = (9, 1, 20, 5)
SITES = ("embed", "layers.0.residual_mid", "layers.1.mlp.out", "final", "logits")


@lru_cache(maxsize=2)
def weights(seed: int = 0) -> Any:
    params = init_params(param_specs(CONFIG), seed=seed)
    return pytree.tree_map(lambda x: x * (1 if x.dim() == 1 else 0.25 / x.std()), params)


def add_steer(x: Tensor, context: Context, /) -> Tensor:
    return x + context.inputs.extras["steer"][context.inputs.rows_t.long(), None]


STEERED = Layers().edit("layers.0.residual_pre", add_steer).extra("steer")


def start(tp: int, layers: Layers = STEERED, **options: Any) -> Engine:
    options = {"kv_blocks": 24, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 12} | options
    return Engine(params=weights(), config=CONFIG, tp=tp, layers=layers, debug=True, **options)


@pytest.fixture(scope="module", params=[2, 4])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with start(request.param, depth=2 if request.param == 2 else 1) as engine:
        yield engine


@pytest.fixture(scope="module")
def single() -> Iterator[Engine]:
    with start(1) as engine:
        yield engine


@pytest.fixture(autouse=True)
def usual_state(request: pytest.FixtureRequest) -> Iterator[None]:
    """Layers and weights as at the start, for the next test; and nothing leaks."""
    yield
    for name in ("engine", "single"):
        if name in request.fixturenames:
            engine = request.getfixturevalue(name)
            engine._scheduler.check_blocks()
            assert engine._scheduler.stats().used_blocks == 0
            assert not engine._executor.captured
            if engine.layers != STEERED:
                engine.update_layers(STEERED)
            if engine.weight_version:
                engine.update_params(weights())


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, CONFIG.vocab_size, (n,), generator=generator).tolist() for n in LENGTHS]


def tokens(outputs: list[Output]) -> list[list[int]]:
    assert all(output.error is None for output in outputs), [output.error for output in outputs]
    return [output.token_ids for output in outputs]


SAMPLINGS = {
    "greedy": GREEDY,
    "sampled": SamplingParams(temperature=1.0, seed=3, max_tokens=10),
    "narrow": SamplingParams(temperature=1.5, top_k=40, top_p=0.9, min_p=0.01, seed=4, max_tokens=8),
    "hot, of the last columns too": SamplingParams(temperature=5.0, top_p=0.99, seed=5, max_tokens=8),
    "no stop id early": replace(GREEDY, min_tokens=5, stop_token_ids=tuple(range(190, 198))),
}


@pytest.mark.parametrize("name", SAMPLINGS)
def test_tokens_are_those_of_one_rank(engine: Engine, single: Engine, name: str) -> None:
    def scramble(rank: Any) -> None:
        torch.manual_seed(rank.group.rank)

    engine.call(scramble)  # no rank's own generator matters
    expected = tokens(single.generate(prompts(), SAMPLINGS[name]))
    assert tokens(engine.generate(prompts(), SAMPLINGS[name])) == expected
    again = engine.generate(prompts(), SAMPLINGS[name])
    assert tokens(again) == expected
    assert again[0].cached_tokens == 8
    assert all(0 <= token < 199 for ids in expected for token in ids)


def test_preempted_sequences_go_on_with_the_same_tokens(engine: Engine, single: Engine) -> None:
    many = [[i, *ids] for i in range(2) for ids in prompts()]
    sampling = SamplingParams(temperature=1.0, seed=3, max_tokens=30)
    before = engine._scheduler.stats().preemptions
    together = tokens(engine.generate(many, sampling))
    assert engine._scheduler.stats().preemptions > before
    assert together == [tokens(single.generate([ids], sampling))[0] for ids in many]


def test_extras_reach_their_own_requests_on_every_rank(engine: Engine, single: Engine) -> None:
    params = [GREEDY, replace(GREEDY, extra_args={"steer": 3.0}), replace(GREEDY, extra_args={"steer": -3.0}), GREEDY]
    ids = prompts()[0]
    outputs = tokens(engine.generate([ids] * 4, params))
    assert outputs == tokens(single.generate([ids] * 4, params))
    assert outputs[0] == outputs[3]
    assert len({tuple(ids) for ids in outputs}) == 3


def test_bad_prompts_aborts_and_streams(engine: Engine, single: Engine) -> None:
    bad = engine.generate([prompts()[0], [199], []], GREEDY)
    assert [output.finish_reason for output in bad] == ["length", "error", "error"]
    stream = engine.stream(prompts()[2], replace(GREEDY, max_tokens=50))
    first = [token for _ in range(2) for token in next(stream).token_ids]
    stream.close()
    expected = tokens(single.generate([prompts()[2]], GREEDY))[0]
    assert first == expected[: len(first)] != []
    deltas = list(engine.stream(prompts()[2], GREEDY))
    assert [token for delta in deltas for token in delta.token_ids] == expected


def test_captures_and_edits_by_closures_are_what_a_whole_forward_sees(engine: Engine) -> None:
    factor = 0.5
    layers = STEERED.edit("layers.*.residual_mid", lambda x, context: x * factor).capture(*SITES)
    engine.update_layers(layers)
    for output in engine.generate(prompts(), GREEDY):
        first = len(output.prompt_token_ids) - 1
        ids = torch.tensor([*output.prompt_token_ids, *output.token_ids[:-1]])
        whole = logits(weights(), ids, config=CONFIG, layers=replace(layers, captures=()))[first:]
        share = -(-199 // engine.describe()["tp"])  # rank 0 sees its own columns
        torch.testing.assert_close(output.captured["logits"], whole[:, :share], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(output.captured["embed"], weights().embed_tokens.weight[ids[first:]])
        assert set(output.captured) == set(SITES)
        assert all(len(value) == 8 for value in output.captured.values())


def test_captures_are_the_same_at_every_size(engine: Engine, single: Engine) -> None:
    for one in (engine, single):
        one.update_layers(STEERED.capture(*SITES[:-1]))
    for ours, theirs in zip(engine.generate(prompts(), GREEDY), single.generate(prompts(), GREEDY)):
        assert ours.token_ids == theirs.token_ids
        for name in SITES[:-1]:
            torch.testing.assert_close(ours.captured[name], theirs.captured[name], rtol=1e-4, atol=1e-4)


def test_a_swapped_function_of_main_and_what_it_refuses(engine: Engine, single: Engine) -> None:
    usual = tokens(engine.generate(prompts(), GREEDY))
    halved = replace(STEERED, mlp=lambda x_td, params, context, /: 0.5 * swiglu(x_td, params, context))
    for one in (engine, single):
        one.update_layers(halved)
    swapped = tokens(engine.generate(prompts(), GREEDY))
    assert swapped == tokens(single.generate(prompts(), GREEDY)) != usual
    with pytest.raises(ValueError, match="start a new Engine"):
        engine.update_layers(Layers())  # without the extra
    assert tokens(engine.generate(prompts(), GREEDY)) == swapped


@pytest.mark.parametrize("in_flight", ["keep", "recompute"])
def test_new_weights_in_the_middle_of_requests(engine: Engine, single: Engine, in_flight: Any) -> None:
    results = []
    for one in (engine, single):
        request = one.submit(prompts()[0], replace(GREEDY, max_tokens=20), stream=True)
        while len(one._requests[request].token_ids) < 4:
            one.step()
        one.call(lambda rank: None)  # reads what is under way
        while len(one._requests[request].token_ids) < 7:
            one.step()
            one.call(lambda rank: None)
        pairs = named(weights(1), param_specs(CONFIG))
        one.update_params(weights(1) if one is single else iter(pairs.items()), in_flight)
        while one.has_work:
            one.step()
        results.append(one.output(request).token_ids)
        fresh = one.generate([prompts()[0]], GREEDY)[0]
        assert fresh.cached_tokens == 0
        ids = torch.tensor([*fresh.prompt_token_ids, *fresh.token_ids[:-1]])
        assert logits(weights(1), ids, config=CONFIG)[8:].argmax(1).tolist() == fresh.token_ids
    assert results[0] == results[1]


def test_call_runs_on_every_rank(engine: Engine) -> None:
    tp = engine.describe()["tp"]

    def facts(rank: Any, add: int) -> tuple[int, int, int, int]:
        heads = rank.cache[0].k_pskh.shape[2]
        return rank.group.rank + add, rank.group.size, rank.params.embed_tokens.weight.shape[0], heads

    share = -(-199 // tp)
    assert engine.call(facts, 10) == [(10 + rank, tp, share, max(1, 2 // tp)) for rank in range(tp)]
    with pytest.raises(ZeroDivisionError):
        engine.call(lambda rank: 1 / 0)
    states = engine.call(lambda rank: (rank.state.token_ids_re, rank.state.length_r, rank.state.computed_r))
    for state in states[1:]:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(states[0], state))


# --- ends ------------------------------------------------------------------------------------------------------------


def gone(process_id: int) -> bool:
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rsplit(")")[-1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_a_rank_killed_in_the_middle_of_generate() -> None:
    killed: list[float] = []

    def kill(worker: int) -> None:
        while engine._scheduler.stats().generated_tokens < 10:
            time.sleep(0.005)
        killed.append(time.monotonic())
        os.kill(worker, signal.SIGKILL)

    with start(2, kv_blocks=200) as engine:
        worker = engine.call(lambda rank: os.getpid())[1]
        threading.Thread(target=kill, args=(worker,), daemon=True).start()
        other = engine.submit(prompts()[1], GREEDY)
        with pytest.raises(EngineError, match="rank 1 was killed by SIGKILL"):
            engine.generate(prompts() * 2, replace(GREEDY, max_tokens=None))
        assert time.monotonic() - killed[0] < patient(10)  # 5 on an idle machine
        with pytest.raises(EngineError, match="rank 1 was killed by SIGKILL"):
            engine.generate([[1]], GREEDY)
        assert engine.output(other).finish_reason in ("error", "length")
    assert gone(worker)
    with start(1) as after:
        assert len(tokens(after.generate(prompts(), GREEDY))) == 4


def test_an_interrupt_in_a_step_ends_all_ranks() -> None:
    def interrupt(x_td: Tensor, params: Any, context: Context, /) -> Tensor:
        if context.group.rank == 0 and context.inputs.rows_b.any():  # a step with requests, not the one of the start
            raise KeyboardInterrupt
        return swiglu(x_td, params, context)

    with start(2) as engine:
        worker = engine.call(lambda rank: os.getpid())[1]
        engine.update_layers(replace(STEERED, mlp=interrupt))
        with pytest.raises(KeyboardInterrupt):
            engine.generate(prompts(), GREEDY)
        with pytest.raises(EngineError, match=r"KeyboardInterrupt|interrupted in the middle of a step"):
            engine.generate(prompts(), GREEDY)
    assert gone(worker)


SCRIPT = """
from funcllm import Engine, Layers, SamplingParams, generate
from funcllm.layers import swiglu
from tests.test_engine_tp import CONFIG, weights

SCALE = 0.5
GREEDY = SamplingParams(temperature=0, max_tokens=6)

def scaled(x_td, params, context):
    return SCALE * swiglu(x_td, params, context)

results = []
for tp in (1, 2):
    layers = Layers(mlp=scaled).edit("final", lambda x, context: x * SCALE).capture("final")
    with Engine(params=weights(), config=CONFIG, tp=tp, layers=layers, kv_blocks=20) as engine:
        outputs = engine.generate([[1, 2, 3], [4]], GREEDY)
        results.append([(o.token_ids, round(o.captured["final"].abs().sum().item(), 2)) for o in outputs])
        sizes = engine.call(lambda rank: (rank.group.size, SCALE))
        assert sizes == [(tp, 0.5)] * tp, sizes
assert results[0] == results[1], results
print("equal", len(results[0][0][0]))
"""


def test_a_script_without_a_guard_ships_its_functions(tmp_path: Path) -> None:
    path = tmp_path / "experiment.py"
    path.write_text(textwrap.dedent(SCRIPT))
    root = str(Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, str(path)],
        capture_output=True,
        text=True,
        timeout=250,
        env={**os.environ, "PYTHONPATH": root},
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "equal 6\n"
