"""The device-resident state: admission, the inputs of a step, what a step leaves behind, and rows that are dead."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from funcllm.kernels.bundle import FAST
from funcllm.qwen3 import qwen3
from funcllm.record import Layers
from funcllm.state import Admissions, advance, apply_edits, init_state, inputs_of
from funcllm.types import DecodeRows, Extra, SequenceState, StepInputs, StepOutputs
from tests.steps import Driver, Request, admissions_of, generate, params_for, random_params
from tests.tiny import tiny_config

CONFIG = tiny_config()
INTS = torch.int32


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=INTS)


def copied(state: SequenceState) -> SequenceState:
    return torch.utils._pytree.tree_map(lambda x: x.clone(), state)


def admitted(*requests: Request, num_rows: int = 6, block_size: int = 4) -> SequenceState:
    """Rows 1, 2, ... hold these requests; block i of row r is 10 r + i."""
    state = init_state(num_rows, 32, 8)
    rows = range(1, len(requests) + 1)
    appends = torch.tensor([(row, i, 10 * row + i) for row in rows for i in range(8)], dtype=INTS)
    return apply_edits(state, admissions_of(list(rows), requests), appends)


def step_of(state: SequenceState, inputs: StepInputs, *tokens: int, **extras: Any) -> tuple[SequenceState, StepOutputs]:
    return advance(state, inputs, StepOutputs(ints(*tokens), ints(*[0] * len(tokens)), inputs.samples_l, **extras))


# --- admission -------------------------------------------------------------------------------------------------------


def test_the_empty_state_has_no_live_row() -> None:
    state = init_state(3, 16, 4, [Extra(name="a", shape=(2,), default=(1.0, 2.0)), Extra(name="n", dtype=torch.int64)])
    assert not state.alive_r.any()
    assert state.token_ids_re.shape == (3, 16)
    assert state.block_table_rm.tolist() == [[0] * 4] * 3
    assert state.sampling.stop_ids_rs.tolist() == [[-1] * 8] * 3
    assert state.sampling.top_p_r.tolist() == [1.0] * 3
    assert state.extras["a"].tolist() == [[1.0, 2.0]] * 3
    assert state.extras["n"].dtype == torch.int64


def test_admission_writes_the_rows_given_and_no_others() -> None:
    state = init_state(5, 16, 4, [Extra(name="a")])
    state.token_ids_re.fill_(77)
    state.block_table_rm.fill_(9)
    before = copied(state)
    layers = Layers().extra("a")
    requests = [
        Request(prompt=[5, 6, 7], max_tokens=4, temperature=0.5, seed=2**40, stop_ids=(3, 8), min_tokens=2),
        Request(prompt=[9], top_k=3, top_p=0.5, min_p=0.1, extras={"a": 2.5}),
    ]
    state = apply_edits(
        state, admissions_of([4, 2], requests, layers), torch.tensor([[4, 1, 6], [2, 0, 3]], dtype=INTS)
    )
    assert state.token_ids_re[4, :4].tolist() == [5, 6, 7, 77]
    assert state.token_ids_re[2, :2].tolist() == [9, 77]
    assert state.length_r[[4, 2]].tolist() == [3, 1]
    assert state.limit_r[[4, 2]].tolist() == [7, 9]
    assert state.alive_r.tolist() == [False, False, True, False, True]
    assert state.block_table_rm[[4, 2]].tolist() == [[0, 6, 0, 0], [3, 0, 0, 0]]
    assert state.sampling.seed_r[4] == 2**40
    assert state.sampling.stop_ids_rs[4].tolist() == [3, 8, *[-1] * 6]
    assert state.sampling.min_length_r[4] == 5
    assert state.sampling.top_k_r[2] == 3
    assert state.extras["a"].tolist() == [0.0, 0.0, 2.5, 0.0, 0.0]
    for ours, theirs in zip(torch.utils._pytree.tree_leaves(state), torch.utils._pytree.tree_leaves(before)):
        assert torch.equal(ours[[0, 1, 3]], theirs[[0, 1, 3]])


def test_a_prefix_hit_starts_behind_its_computed_tokens() -> None:
    state = admitted(Request(prompt=range(9)))
    state.computed_r[1] = 6
    inputs = inputs_of(state, ints(), ints(1), ints(3), num_tokens=3, block_size=4, span=3)
    assert inputs.token_ids_t.tolist() == [6, 7, 8]
    assert inputs.positions_t.tolist() == [6, 7, 8]
    assert inputs.slots_t.tolist() == [11 * 4 + 2, 11 * 4 + 3, 12 * 4]
    assert inputs.samples_l.tolist() == [True]


# --- inputs ----------------------------------------------------------------------------------------------------------


def test_the_inputs_of_a_mixed_step() -> None:
    state = admitted(Request(prompt=range(20, 25)), Request(prompt=range(40, 49)), Request(prompt=range(60, 63)))
    state.computed_r[1] = 4
    state.computed_r[2] = 3
    inputs = inputs_of(
        state, ints(1, 0), ints(2, 3, 0), ints(4, 3, 0), num_tokens=12, block_size=4, span=5, filtered=True
    )
    assert inputs.token_ids_t.tolist() == [24, 0, 43, 44, 45, 46, 60, 61, 62, 0, 0, 0]
    assert inputs.positions_t.tolist() == [4, 0, 3, 4, 5, 6, 0, 1, 2, 0, 0, 0]
    assert inputs.slots_t.tolist() == [44, 0, 83, 84, 85, 86, 120, 121, 122, 0, 0, 0]
    assert inputs.slots_t.dtype == torch.int64
    assert inputs.rows_t.tolist() == [1, 0, 2, 2, 2, 2, 3, 3, 3, 0, 0, 0]
    assert inputs.rows_b.tolist() == [1, 0, 2, 3, 0]
    assert inputs.query_lens_b.tolist() == [1, 0, 4, 3, 0]
    assert inputs.prompt_lens_b.tolist() == [5, 0, 9, 3, 0]
    assert inputs.logit_tokens_l.tolist() == [0, 1, 5, 8, 8]
    assert inputs.samples_l.tolist() == [True, False, False, True, False]
    assert isinstance(inputs.decode, DecodeRows)
    assert inputs.decode.kv_lens_b.tolist() == [5, 1]
    assert inputs.decode.block_table_bm[:, :2].tolist() == [[10, 11], [0, 0]]
    assert inputs.chunks != ()
    assert inputs.chunks.kv_lens_c.tolist() == [7, 3, 0]
    assert inputs.chunks.query_starts_c1.tolist() == [0, 4, 7, 7]
    assert inputs.chunks.span_q.shape == (5,)
    assert inputs.sampling.positions_l.tolist() == [5, 0, 9, 3, 0]
    assert inputs.capture_tokens_k == ()
    unfiltered = inputs_of(state, ints(1, 0), num_tokens=2, block_size=4, capturing=True)
    assert unfiltered.sampling.filters == ()
    assert unfiltered.chunks == ()
    assert unfiltered.capture_tokens_k.tolist() == [0, 1]


def test_dead_rows_act_as_the_trash_row_wherever_they_stand() -> None:
    state = admitted(Request(prompt=range(20, 25)), Request(prompt=range(40, 49)), Request(prompt=range(60, 63)))
    state.computed_r[1] = 4
    state.alive_r[1] = False
    state.alive_r[2] = False
    inputs = inputs_of(state, ints(1), ints(2, 3), ints(4, 3), num_tokens=10, block_size=4, span=4)
    assert inputs.rows_b.tolist() == [0, 0, 3]
    assert inputs.token_ids_t.tolist() == [0, 60, 61, 62, 0, 0, 0, 0, 0, 0]
    assert inputs.slots_t.tolist() == [0, 120, 121, 122, 0, 0, 0, 0, 0, 0]
    assert inputs.query_lens_b.tolist() == [0, 0, 3]
    assert inputs.samples_l.tolist() == [False, False, True]
    assert inputs.logit_tokens_l.tolist() == [0, 0, 3]
    first = inputs_of(state, ints(), ints(2, 3), ints(4, 3), num_tokens=7, block_size=4, span=4)
    assert first.logit_tokens_l.tolist() == [0, 2]
    assert first.token_ids_t.tolist() == [60, 61, 62, 0, 0, 0, 0]


def test_stop_ids_are_forbidden_only_below_the_least_length() -> None:
    state = admitted(
        Request(prompt=[1, 2], min_tokens=1, stop_ids=(7, 9)), Request(prompt=[1, 2], min_tokens=0, stop_ids=(7,))
    )
    inputs = inputs_of(state, ints(), ints(1, 2), ints(2, 2), num_tokens=4, block_size=4, span=2, filtered=True)
    assert inputs.sampling.filters.forbidden_ls[:, :3].tolist() == [[7, 9, -1], [-1, -1, -1]]


# --- advance ---------------------------------------------------------------------------------------------------------


def test_advance_appends_only_tokens_that_count() -> None:
    state = admitted(Request(prompt=[1, 2, 3]), Request(prompt=[4, 5, 6, 7]))
    inputs = inputs_of(state, ints(), ints(1, 2), ints(3, 2), num_tokens=6, block_size=4, span=3)
    state, outputs = step_of(state, inputs, 50, 60)
    assert outputs.count_l.tolist() == [1, 0]
    assert outputs.alive_l.tolist() == [True, True]
    assert state.length_r.tolist()[:3] == [0, 4, 4]
    assert state.computed_r.tolist()[:3] == [0, 3, 2]
    assert state.token_ids_re[1, :5].tolist() == [1, 2, 3, 50, 0]
    assert state.token_ids_re[2, :5].tolist() == [4, 5, 6, 7, 0]
    assert not state.token_ids_re[0].any()


def test_a_row_dies_of_a_stop_id_its_limit_or_nan() -> None:
    state = admitted(
        Request(prompt=[1], max_tokens=9, stop_ids=(50, 51)),
        Request(prompt=[1], max_tokens=9, stop_ids=(50,), min_tokens=1),
        Request(prompt=[1], max_tokens=1),
        Request(prompt=[1], max_tokens=9),
        Request(prompt=[1], max_tokens=9, stop_ids=(50,)),
    )
    rows = ints(1, 2, 3, 4, 5)
    inputs = inputs_of(state, rows, num_tokens=5, block_size=4)
    state, outputs = step_of(state, inputs, 51, 50, 7, -1, 7)
    assert outputs.count_l.tolist() == [1, 1, 1, 1, 1]
    assert outputs.alive_l.tolist() == [False, True, False, False, True]
    assert state.alive_r.tolist() == [False, False, True, False, False, True]
    assert state.length_r.tolist() == [0, 2, 2, 2, 2, 2]
    assert state.token_ids_re[:, 1].tolist() == [0, 51, 50, 7, 0, 7]
    inputs = inputs_of(state, rows, num_tokens=5, block_size=4)
    assert inputs.rows_b.tolist() == [0, 2, 0, 0, 5]
    before = copied(state)
    state, outputs = step_of(state, inputs, 9, 50, 9, 9, 9)
    assert outputs.count_l.tolist() == [0, 1, 0, 0, 1]
    assert outputs.alive_l.tolist() == [False, False, False, False, True]
    for ours, theirs in zip(torch.utils._pytree.tree_leaves(state), torch.utils._pytree.tree_leaves(before)):
        assert torch.equal(ours[[0, 1, 3, 4]], theirs[[0, 1, 3, 4]])


def test_what_an_unfinished_chunk_samples_ends_nothing() -> None:
    state = admitted(Request(prompt=[1, 2, 3], stop_ids=(50,)), Request(prompt=[4, 5, 6], max_tokens=1))
    state.limit_r[2] = 4
    inputs = inputs_of(state, ints(), ints(1, 2), ints(2, 2), num_tokens=4, block_size=4, span=2)
    state, outputs = step_of(state, inputs, 50, -1)
    assert outputs.count_l.tolist() == [0, 0]
    assert outputs.alive_l.tolist() == [True, True]
    assert state.length_r.tolist()[1:3] == [3, 3]


def test_extras_change_only_in_rows_that_sampled() -> None:
    state = admitted(Request(prompt=[1]), Request(prompt=[1, 2, 3]))
    state = state._replace(extras={"a": torch.zeros(6, 2)})
    inputs = inputs_of(state, ints(1, 0), ints(2), ints(2), num_tokens=4, block_size=4, span=2)
    state, _ = step_of(state, inputs, 5, 6, 7, extras={"a": torch.ones(3, 2, dtype=torch.float64)})
    assert state.extras["a"].tolist() == [[0, 0], [1, 1], *[[0, 0]] * 4]


# --- with a model ----------------------------------------------------------------------------------------------------


def test_tokens_below_the_least_length_are_no_stop_ids_and_then_one_ends_the_row() -> None:
    """Every id but two stops: exactly min_tokens of those two, then a stop id."""
    params = random_params(CONFIG)
    stops = (3, 5, 8, 9, 11, 20, 77, 200)
    [free] = generate(CONFIG, params_for(CONFIG), [Request(prompt=[4, 2], max_tokens=12)])
    stops = tuple(dict.fromkeys(free))[:8]
    [tokens] = generate(
        CONFIG, params_for(CONFIG), [Request(prompt=[4, 2], max_tokens=12, min_tokens=4, stop_ids=stops)]
    )
    assert len(tokens) >= 5 or len(tokens) == 12
    assert not set(tokens[:4]) & set(stops)
    assert all(token not in stops for token in tokens[:-1])
    [stopped] = generate(CONFIG, params_for(CONFIG), [Request(prompt=[4, 2], max_tokens=12, stop_ids=stops)])
    assert stopped == free[:1]
    assert params.embed_tokens.weight.shape[0] == CONFIG.vocab_size


def test_nan_weights_end_a_row_with_minus_1() -> None:
    params = random_params(CONFIG)
    params.lm_head.weight[3] = float("nan")
    driver = Driver(qwen3(CONFIG, kernels=FAST), params)
    assert driver.run([Request(prompt=[1, 2])]) == [[-1]]
    assert not driver.state.alive_r.any()


def test_a_dead_row_changes_nothing_but_the_trash_block() -> None:
    driver = Driver(qwen3(CONFIG, kernels=FAST), random_params(CONFIG))
    driver.admit([1, 2], [Request(prompt=[1, 2], max_tokens=1), Request(prompt=[3, 4, 5], max_tokens=9)])
    driver.step([], [(1, 2), (2, 3)])
    assert driver.state.alive_r[:3].tolist() == [False, False, True]
    state = copied(driver.state)
    caches = [(c.k_pskh.clone(), c.v_pskh.clone()) for c in driver.cache]
    outputs = driver.step([1, 2])
    assert outputs.count_l.tolist() == [0, 1]
    assert outputs.alive_l.tolist() == [False, True]
    others = [0, 1, *range(3, 16)]
    for ours, theirs in zip(torch.utils._pytree.tree_leaves(driver.state), torch.utils._pytree.tree_leaves(state)):
        assert torch.equal(ours[others], theirs[others])
    own = driver.state.block_table_rm[2, 0]
    for layer, before in zip(driver.cache, caches):
        for ours, theirs in zip(layer, before):
            changed = (ours != theirs).flatten(1).any(1).nonzero().flatten().tolist()
            assert sorted({*changed, 0}) == sorted([0, int(own)])
            assert (ours != theirs).flatten(2).any(2)[0].tolist() == [True, False, False, False]


def test_a_row_is_used_again_without_a_trace_of_the_last_request() -> None:
    first = Request(prompt=list(range(30, 45)), max_tokens=6, temperature=1.0, seed=9, top_k=4, stop_ids=(1,))
    second = Request(prompt=[7, 8], max_tokens=10)
    [fresh] = generate(CONFIG, params_for(CONFIG), [second])
    driver = Driver(qwen3(CONFIG, kernels=FAST), random_params(CONFIG))
    driver.run([first])
    assert driver.run([second]) == [fresh]


def test_padding_rows_and_tokens_change_no_other_row() -> None:
    requests = [
        Request(prompt=[1, 2, 3], max_tokens=5),
        Request(prompt=[9, 8, 7, 6], max_tokens=5, temperature=1.0, seed=3),
    ]
    expected = generate(CONFIG, params_for(CONFIG), requests)
    driver = Driver(qwen3(CONFIG, kernels=FAST), random_params(CONFIG), block_size=2)
    driver.admit([3, 7], requests)
    tokens: dict[int, list[int]] = {3: [], 7: []}

    def keep(rows: list[int], outputs: StepOutputs) -> None:
        for row, token, count in zip(rows, outputs.token_ids_l.tolist(), outputs.count_l.tolist()):
            assert count == (row > 0)
            if count:
                tokens[row].append(token)

    keep([0, 0, 3, 0, 7, 0], driver.step([0, 0], [(3, 3), (0, 0), (7, 4), (0, 0)], padding=5))
    for _ in range(4):
        keep([0, 7, 0, 3, 0], driver.step([0, 7, 0, 3, 0]))
    assert [tokens[3], tokens[7]] == expected


def test_appends_may_come_step_by_step() -> None:
    state = init_state(3, 16, 4)
    admissions: Admissions = admissions_of([1], [Request(prompt=[1, 2, 3])])
    state = apply_edits(state, admissions, torch.tensor([[1, 0, 5]], dtype=INTS))
    state = apply_edits(state, (), torch.tensor([[1, 1, 2], [1, 2, 7]], dtype=INTS))
    assert state.block_table_rm.tolist() == [[0] * 4, [5, 2, 7, 0], [0] * 4]
