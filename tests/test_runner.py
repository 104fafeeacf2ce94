"""One rank's runtime under plans written by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from funcllm import logits
from funcllm.group import SINGLE
from funcllm.kernels import fast, ops
from funcllm.kernels.bundle import Kernels, fast_kernels
from funcllm.launch.buckets import make_buckets
from funcllm.launch.memory import useful_kv_blocks
from funcllm.launch.plan import Admission, Plan, pack
from funcllm.launch.ring import Outputs
from funcllm.launch.runner import Rank, Runner, RunnerMethod, RunOptions, build_runtime, serving
from funcllm.layers import swiglu
from funcllm.qwen3 import param_specs
from funcllm.record import Layers
from funcllm.specs import init_params, named
from funcllm.types import Component, Context
from funcllm.weights.load import load_params
from funcllm.weights.save import save_params
from tests.tiny import tiny_config

CONFIG = tiny_config(eos_token_ids=())
BUCKETS = make_buckets(4)
PROMPT = [7, 201, 33, 90, 14, 61]


def weights(seed: int = 0) -> Any:
    params = init_params(param_specs(CONFIG), seed=seed)
    return pytree.tree_map(lambda x: x * (1 if x.dim() == 1 else 0.25 / x.std()), params)


WEIGHTS = weights()


def options(**changes: Any) -> RunOptions:
    values = {
        "config": CONFIG,
        "source": named(WEIGHTS, param_specs(CONFIG)),
        "dtype": torch.float32,
        "max_model_len": 30,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "buckets": BUCKETS,
        "block_size": 4,
        "kv_blocks": 12,
    }
    return RunOptions(**(values | changes))


def make_runner(**changes: Any) -> Runner:
    return build_runtime(SINGLE, torch.device("cpu"), options(**changes))


def appended(row: int, blocks: list[int], start: int = 0) -> Any:
    return np.array([[row, start + i, block] for i, block in enumerate(blocks)], np.int32).reshape(-1, 3)


def chunk_plan(row: int, length: int, *, decode: list[int] | None = None, **fields: Any) -> Plan:
    decode = decode or []
    bucket = BUCKETS.decode_bucket(len(decode), chunk_tokens=length)
    return Plan(
        step=1,
        decode_rows=np.array(decode, np.int32),
        chunk_rows=np.array([row], np.int32),
        chunk_lens=np.array([length], np.int32),
        decode_bucket=bucket,
        chunk_bucket=BUCKETS.chunk_bucket(1),
        token_bucket=BUCKETS.token_bucket(bucket, length),
        span=BUCKETS.span(length, length),
        **fields,
    )


def decode_plan(rows: list[int], **fields: Any) -> Plan:
    bucket = BUCKETS.decode_bucket(len(rows))
    return Plan(step=2, decode_rows=np.array(rows, np.int32), decode_bucket=bucket, token_bucket=bucket, **fields)


def admission(row: int, token_ids: list[int], **fields: Any) -> Admission:
    known = {"computed": 0, "prompt_length": len(token_ids), "limit": 30} | fields
    return Admission(row=row, token_ids=np.array(token_ids, np.int32), **known)


def execute(runner: Runner, plan: Plan) -> tuple[list[int], list[int], list[int]]:
    """Tokens, counts and lives of the plan's own rows."""
    outputs: Outputs = runner.execute(pack(plan)).read()
    return tuple(values[plan.output_index].tolist() for values in outputs[:3])  # type: ignore[return-value]


def admit(runner: Runner, row: int = 3, blocks: tuple[int, ...] = (2, 5), **fields: Any) -> int:
    """Computes the whole prompt in one chunk; the token it samples."""
    plan = chunk_plan(
        row, len(PROMPT), admissions=(admission(row, PROMPT, **fields),), appends=appended(row, list(blocks))
    )
    (token,), counts, _ = execute(runner, plan)
    assert counts == [1]
    return token


def greedy(count: int, ids: list[int] = PROMPT, layers: Layers = Layers(), params: Any = WEIGHTS) -> list[int]:
    known = list(ids)
    for _ in range(count):
        known.append(int(logits(params, torch.tensor(known), config=CONFIG, layers=layers)[-1].argmax()))
    return known[len(ids) :]


def test_a_prompt_then_its_tokens() -> None:
    runner = make_runner()
    expected = greedy(4)
    assert admit(runner) == expected[0]
    for step, plan in enumerate([decode_plan([3]), decode_plan([3]), decode_plan([3], appends=appended(3, [9], 2))], 1):
        assert execute(runner, plan) == ([expected[step]], [1], [1])
    assert runner.state.block_table_rm[3].tolist() == [2, 5, 9, 0, 0, 0, 0, 0]
    assert runner.state.token_ids_re[3, :10].tolist() == [*PROMPT, *expected]
    assert runner.state.length_r.tolist() == [0, 0, 0, 10, 0]
    used = runner.cache[0].k_pskh.abs().sum((2, 3)) > 0
    assert used[1:].nonzero().tolist() == [[b - 1, s] for b in (2, 5) for s in range(4)] + [[8, 0]]


def test_a_chunked_prompt_samples_with_its_last_chunk_and_beside_a_decoding_row() -> None:
    runner = make_runner()
    expected = greedy(4)
    other = admit(runner, row=1, blocks=(7, 8))
    assert other == expected[0]
    first = chunk_plan(
        2, 4, decode=[1], admissions=(admission(2, PROMPT, temperature=0.0),), appends=appended(2, [3, 4])
    )
    token_ids, counts, alive = execute(runner, first)
    assert (token_ids[0], counts, alive) == (expected[1], [1, 0], [1, 1])
    second = chunk_plan(2, 2, decode=[1])
    assert execute(runner, second) == ([expected[2], expected[0]], [1, 1], [1, 1])
    both = decode_plan([1, 2], appends=appended(1, [9], 2))
    assert execute(runner, both) == ([expected[3], expected[1]], [1, 1], [1, 1])


def test_a_dead_row_is_frozen_and_writes_nothing() -> None:
    runner = make_runner()
    admit(runner, limit=8)
    expected = greedy(2)
    assert execute(runner, decode_plan([3])) == ([expected[1]], [1], [0])
    cache = [layer.k_pskh[1:].clone() for layer in runner.cache]
    for _ in range(2):  # steps that were launched before the host knew
        _, counts, alive = execute(runner, decode_plan([3]))
        assert (counts, alive) == ([0], [0])
    assert runner.state.length_r[3] == 8
    assert runner.state.computed_r[3] == 7
    assert all(torch.equal(layer.k_pskh[1:], before) for layer, before in zip(runner.cache, cache))


def test_a_row_forgets_whom_it_served() -> None:
    runner = make_runner()
    expected = greedy(3)
    admit(runner, stop_ids=(expected[1], 250), min_length=0, temperature=0.0)
    assert execute(runner, decode_plan([3]))[2] == [0]
    assert admit(runner, blocks=(6, 1), temperature=0.0) == expected[0]
    assert execute(runner, decode_plan([3])) == ([expected[1]], [1], [1])
    assert runner.state.block_table_rm[3].tolist() == [6, 1, 0, 0, 0, 0, 0, 0]
    assert runner.state.sampling.stop_ids_rs[3].tolist() == [-1] * 8


def test_sampling_fields_arrive_bit_for_bit() -> None:
    runner = make_runner()
    fields: dict[str, Any] = {"temperature": 0.7, "top_k": 2**31 - 1, "top_p": 0.9}
    fields |= {"min_p": 1e-8, "seed": -(2**62) - 5, "min_length": 9}
    plan = chunk_plan(3, 6, filtered=True, admissions=(admission(3, PROMPT, **fields),), appends=appended(3, [2, 5]))
    execute(runner, plan)
    sampling = runner.state.sampling
    assert sampling.seed_r[3] == -(2**62) - 5
    assert sampling.top_k_r[3] == 2**31 - 1
    assert sampling.min_length_r[3] == 9
    got = torch.stack([sampling.temperature_r[3], sampling.top_p_r[3], sampling.min_p_r[3]])
    assert torch.equal(got, torch.tensor([0.7, 0.9, 1e-8]))


def test_a_part_of_a_block_is_copied_before_the_step() -> None:
    runner = make_runner()
    admit(runner)
    other = [*PROMPT[:5], 99, 98]
    plan = chunk_plan(
        1,
        2,
        admissions=(admission(1, other, computed=5),),
        appends=appended(1, [2, 10]),
        copies=np.array([[5, 10, 1]], np.int32),
    )
    assert execute(runner, plan)[0] == greedy(1, other)
    for layer in runner.cache:
        assert torch.equal(layer.k_pskh[10, 0], layer.k_pskh[5, 0])
        assert not torch.equal(layer.k_pskh[10, 1], layer.k_pskh[5, 1])


def test_nan_in_unused_slots_poisons_nothing() -> None:
    runner = make_runner()
    for layer in runner.cache:
        for leaf in layer:
            leaf.fill_(torch.nan)
    expected = greedy(3)
    assert admit(runner) == expected[0]
    assert execute(runner, decode_plan([3])) == ([expected[1]], [1], [1])
    assert execute(runner, decode_plan([3])) == ([expected[2]], [1], [1])


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.enable_grad])
def test_serving_is_neither_inference_mode_nor_with_gradients(mode: Any) -> None:
    with mode():
        with serving():
            assert not torch.is_inference_mode_enabled()
            assert not torch.is_grad_enabled()
        assert torch.is_inference_mode_enabled() == (mode is torch.inference_mode)
        assert torch.is_grad_enabled() == (mode is torch.enable_grad)


def test_call_hands_over_the_rank_or_runs_a_method() -> None:
    runner = make_runner()
    rank = runner.call(lambda rank, more: (rank, more), (5,))
    assert isinstance(rank[0], Rank)
    assert rank[0].params is runner.params
    assert rank[0].cache is runner.cache
    assert rank[0].state is runner.state
    assert rank[1] == 5
    assert runner.call(RunnerMethod("update_params"), ({"model.norm.weight": torch.full((64,), 2.0)}, True)) == {
        "model.norm.weight"
    }
    assert torch.equal(runner.params.norm.weight, torch.full((64,), 2.0))


def test_every_kind_of_source_loads_the_same(tmp_path: Path) -> None:
    save_params(WEIGHTS, param_specs(CONFIG), CONFIG, tmp_path)
    for source in (tmp_path, named(WEIGHTS, param_specs(CONFIG))):
        params = make_runner(source=source).params
        assert all(torch.equal(a, b) for a, b in zip(pytree.tree_leaves(params), pytree.tree_leaves(WEIGHTS)))
    seeded = make_runner(source=3, dtype=torch.bfloat16).params
    expected = init_params(param_specs(CONFIG), seed=3, dtype=torch.bfloat16)
    assert all(torch.equal(a, b) for a, b in zip(pytree.tree_leaves(seeded), pytree.tree_leaves(expected)))


def test_the_pool_is_as_asked_or_at_most_what_is_of_use() -> None:
    assert make_runner().num_blocks == 12
    runner = make_runner(kv_blocks=0)
    assert runner.num_blocks == useful_kv_blocks(4, 30, 4)
    assert runner.cache[1].v_pskh.shape == (runner.num_blocks, 4, 2, 16)
    assert options(max_model_len=29).table_width == options(max_model_len=32).table_width == 8
    assert options(max_model_len=33).table_width == 9


def test_new_functions_go_on_with_the_cache_as_it_is() -> None:
    def negated(x_ld: Tensor, params: Any, context: Context, /) -> Tensor:
        from funcllm.layers import head

        return -head(x_ld, params, context)

    runner = make_runner()
    token = admit(runner)
    cache = pytree.tree_leaves(runner.cache)
    runner.update_layers(Layers(head=negated))
    assert all(now is before for now, before in zip(pytree.tree_leaves(runner.cache), cache, strict=True))
    expected = greedy(1, [*PROMPT, token], Layers(head=negated))
    assert execute(runner, decode_plan([3]))[0] == expected != greedy(2)[1:]


def test_new_functions_that_need_other_parameters_caches_or_extras_are_refused() -> None:
    def narrow(config: Any, group: Any, place: str) -> Any:
        return param_specs(replace(config, intermediate_size=80)).layers[0].mlp

    def by_rows(config: Any, group: Any, blocks: int, block_size: int, rows: int, device: Any, dtype: Any) -> Any:
        return torch.zeros(rows, 4, device=device, dtype=dtype)

    def attention(q: Tensor, k: Tensor, v: Tensor, cache: Any, params: Any, context: Context, /) -> tuple[Tensor, Any]:
        return q, cache

    runner = make_runner()
    for layers in (
        Layers(mlp=Component(swiglu, specs=narrow)),
        Layers(attention=Component(attention, init_cache=by_rows, paged=False)),
        Layers().extra("more"),
    ):
        with pytest.raises(ValueError, match="start a new Engine"):
            runner.update_layers(layers)
    assert runner.model.layers == Layers()
    assert admit(runner) == greedy(1)[0]


# --- flash-attn-4 ----------------------------------------------------------------------------------------------------

LONG = [int(token) for token in np.random.default_rng(3).integers(0, 200, 24)]


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A CPU whose bundle has flash-attn-4 for 20 prompt tokens and more; what became of it is in `events`."""
    made: dict[str, Any] = {"events": [], "fault": ""}

    def kernels(*facts: Any) -> Kernels:
        return replace(fast_kernels(*facts), attend=fast.attend_flash, prefill=ops.FLASH)

    class Import:
        def join(self) -> None:
            made["events"].append("join")

    def import_ahead() -> Import:
        made["events"].append("import")
        return Import()

    def check(*facts: Any) -> str:
        made["events"].append("check")
        return made["fault"]

    monkeypatch.setattr("funcllm.launch.runner.fast_kernels", kernels)
    monkeypatch.setattr("funcllm.launch.runner.import_flash_ahead", import_ahead)
    monkeypatch.setattr("funcllm.launch.runner.flash_fault", check)
    monkeypatch.setattr("funcllm.launch.runner.FLASH_TOKENS", 20)
    return made


def admit_long(runner: Runner) -> int:
    plan = chunk_plan(1, 24, admissions=(admission(1, LONG),), appends=appended(1, [1, 3, 4, 6, 7, 8]))
    return execute(runner, plan)[0][0]


def test_flash_attention_is_put_in_force_before_the_first_step_that_asks_for_it(flash: dict[str, Any]) -> None:
    runner = make_runner()
    assert flash["events"] == []  # though the warm-up ran a step of that size
    assert runner.kernels.attend is fast.attend
    assert runner.prefill == "triton; flash-attn-4 from the first step of 20 prompt tokens on"
    assert admit(runner) == greedy(1)[0]
    assert execute(runner, decode_plan([3]))[0] == greedy(2)[1:]
    assert flash["events"] == []
    assert execute(runner, decode_plan([3]))[0] == greedy(3)[2:]
    assert flash["events"] == ["import"]  # behind the first step that has been read
    model = runner.model
    for _ in range(2):
        assert admit_long(runner) == greedy(1, LONG)[0]
        assert flash["events"] == ["import", "join", "check"]
        assert runner.kernels.attend is fast.attend_flash
        assert runner.prefill == "flash-attn-4 for 20 prompt tokens and more"
    assert runner.model is not model
    assert execute(runner, decode_plan([3]))[0] == greedy(4)[3:]
    runner.settle()
    assert flash["events"] == ["import", "join", "check"]
    assert runner.notes == []


def test_a_fault_of_flash_attention_leaves_triton_and_a_note(flash: dict[str, Any], caplog: Any) -> None:
    flash["fault"] = "ImportError: half an install"
    runner = make_runner()
    assert runner.notes == []
    assert admit_long(runner) == greedy(1, LONG)[0]
    assert runner.kernels.attend is fast.attend
    assert runner.prefill == "triton"
    note = "prefill: Triton, since flash-attn-4 cannot be used (ImportError: half an install)"
    assert runner.notes == [note] == caplog.messages
    runner.settle()
    assert flash["events"] == ["check"]


@pytest.mark.parametrize(("answers", "events"), [([False], []), ([True, False], ["check"])])
def test_ranks_have_flash_attention_together(
    answers: list[bool], events: list[str], flash: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = iter(answers)
    asked = []

    def agree(runner: Runner, ok: bool) -> bool:
        asked.append(ok)
        return next(said)

    monkeypatch.setattr(Runner, "_agree", agree)
    runner = make_runner()
    assert admit_long(runner) == greedy(1, LONG)[0]
    assert flash["events"] == events
    assert asked == [True] * len(answers)
    assert runner.prefill == "triton"
    assert [note.endswith("(on another rank)") for note in runner.notes] == [True] * (len(answers) - 1)


def test_what_is_compiled_is_so_once_with_flash_attention(
    flash: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiled(unit: Any, name: str) -> Any:
        flash["events"].append(name)
        return unit

    monkeypatch.setattr("funcllm.launch.runner.compile_unit", compiled)
    runner = make_runner(compile=True, fusion=False)
    assert flash["events"][0] == "check"
    assert "layer" in flash["events"][1:]
    assert runner.kernels.attend is fast.attend_flash
    assert runner.kernels.fused == frozenset()
    assert admit_long(runner) == greedy(1, LONG)[0]
    assert flash["events"].count("check") == 1
    assert "import" not in flash["events"]


def test_functions_that_are_compiled_later_wait_for_flash_attention(
    flash: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def negated(x_ld: Tensor, params: Any, context: Context, /) -> Tensor:
        from funcllm.layers import head

        return -head(x_ld, params, context)

    monkeypatch.setattr("funcllm.launch.runner.compile_unit", lambda unit, name: unit)
    runner = make_runner(compile=True)
    assert flash["events"] == []
    runner.update_layers(Layers(head=negated))
    assert flash["events"] == ["check"]
    assert admit(runner) == greedy(1, layers=Layers(head=negated))[0]


def test_a_long_load_has_flash_attention_imported_beside_it(
    tmp_path: Path, flash: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_params(WEIGHTS, param_specs(CONFIG), CONFIG, tmp_path)
    imported_before = []

    def load(*arguments: Any, **options: Any) -> Any:
        imported_before.append(list(flash["events"]))
        return load_params(*arguments, **options)

    monkeypatch.setattr("funcllm.launch.runner.load_params", load)
    make_runner(source=tmp_path)
    monkeypatch.setattr("funcllm.launch.runner._LONG_LOAD", 1000)
    make_runner(source=tmp_path)
    assert imported_before == [[], ["import"]]
    assert flash["events"] == ["import"]


def test_close_lets_go_of_everything() -> None:
    runner = make_runner()
    runner.close()
    runner.close()
    assert not {"params", "cache", "state", "model"} & set(vars(runner))
