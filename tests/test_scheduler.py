"""The scheduler, case by case. Random workloads against the KV oracle are in test_oracle.py."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from funcllm.launch.null import NullExecutor
from funcllm.launch.plan import Plan, pack
from funcllm.launch.request import Request, ResolvedSampling
from funcllm.launch.scheduler import NAN_TOKEN, Event, Scheduler, pool_capacity

VOCAB = 50


def _scheduler(**changed: Any) -> Scheduler:
    values = {
        "num_blocks": 20,
        "block_size": 4,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_model_len": 40,
        "check": True,
    }
    return Scheduler(**{**values, **changed})  # type: ignore[arg-type]


def _request(i: int | str, length: int = 5, *, start: int = 0, sampling: Any = (), **fields: Any) -> Request:
    seed = i if isinstance(i, int) else 0
    resolved = ResolvedSampling(**{"seed": seed, "max_tokens": 6, **dict(sampling)})
    return Request(id=i, prompt_ids=np.arange(start, start + length), sampling=resolved, **fields)


class Steps:
    """A scheduler, stepped by hand over the null model: `launch` plans and launches, `commit` reads the oldest step."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.executor = NullExecutor(scheduler.max_num_seqs + 1, vocab_size=VOCAB)
        self._launched: list[tuple[Plan, Any]] = []

    def launch(self) -> Plan:
        plan = self.scheduler.plan()
        assert plan is not None
        self.adopt(plan)
        return plan

    def adopt(self, plan: Plan) -> None:
        """Launches a plan that was made by hand."""
        self._launched.append((plan, self.executor.launch(pack(plan), plan)))
        self.scheduler.launched(plan)

    def commit(self, **changed: Any) -> list[Event]:
        plan, (token_ids, counts, alive) = self._launched.pop(0)
        outputs = {"token_ids": token_ids, "counts": counts, "alive": alive, **changed}
        return self.scheduler.commit(plan, **outputs)

    def step(self) -> tuple[Plan, list[Event]]:
        return self.launch(), self.commit()

    def run(self) -> list[Event]:
        events = []
        while self.scheduler.has_work:
            events += self.step()[1]
        return events


def _admitted(steps: Steps) -> list[int]:
    """The seeds (here the ids) of the requests in the order in which they get a row from now on."""
    seeds = []
    while steps.scheduler.has_work:
        seeds += [admission.seed for admission in steps.step()[0].admissions]
    return seeds


def _tokens(i: int, first: int, count: int) -> list[int]:
    return [NullExecutor(1, vocab_size=VOCAB).token(i, position) for position in range(first, first + count)]


# --- submission ---


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (_request("a", 40), "a prompt of 40 tokens leaves no room to sample within max_model_len=40; shorten it to 39"),
        (_request("a", 41), "a prompt of 41 tokens leaves no room"),
        (_request("a", 3, start=48), "token id 50 is out of range; the model's vocabulary has 50 ids, from 0 to 49"),
        (_request("a", sampling={"max_tokens": 0}), "max_tokens=0 must be at least 1"),
        (_request("twice"), "request id 'twice' is in use"),
    ],
)
def test_a_request_that_can_never_be_served_fails_alone(request_: Request, message: str) -> None:
    steps = Steps(_scheduler(vocab_size=VOCAB))
    steps.scheduler.submit(_request("twice"))
    for _ in range(100):
        with pytest.raises(ValueError, match=message):
            steps.scheduler.submit(request_)
    assert steps.scheduler.stats().used_blocks == 0
    assert [(e.request_id, e.finish_reason, len(e.token_ids)) for e in steps.run()] == [("twice", "length", 6)]


def test_a_prompt_that_fills_all_but_one_token_gives_one_token() -> None:
    steps = Steps(_scheduler())
    steps.scheduler.submit(_request(3, 39))
    (event,) = steps.run()
    assert (event.token_ids.tolist(), event.finish_reason) == (_tokens(3, 39, 1), "length")


def test_without_max_tokens_a_request_runs_up_to_the_models_length() -> None:
    steps = Steps(_scheduler())
    steps.scheduler.submit(_request(3, 5, sampling={"max_tokens": None}))
    (event,) = steps.run()
    assert (event.token_ids.tolist(), event.finish_reason) == (_tokens(3, 5, 35), "length")


def test_a_prompt_larger_than_the_pool_is_refused_with_numbers_and_the_others_are_served(
    caplog: pytest.LogCaptureFixture,
) -> None:
    steps = Steps(_scheduler(num_blocks=5, block_size=2))
    assert "the KV pool of 4 blocks of 2 tokens holds no sequence of max_model_len=40; all end at 9" in caplog.text
    steps.scheduler.submit(_request(1, 2))
    with pytest.raises(
        ValueError, match=r"9 tokens does not fit the KV pool of 4 blocks of 2 tokens .* shorten it to 8"
    ):
        steps.scheduler.submit(_request(2, 9))
    steps.scheduler.submit(_request(3, 2))
    assert sorted((e.request_id, len(e.token_ids)) for e in steps.run()) == [(1, 6), (3, 6)]


def test_a_sequence_that_outgrows_the_pool_ends_with_length() -> None:
    steps = Steps(_scheduler(num_blocks=5, block_size=2))
    steps.scheduler.submit(_request(1, 6, sampling={"max_tokens": 8}))
    (event,) = steps.run()
    assert (event.token_ids.tolist(), event.finish_reason) == (_tokens(1, 6, 3), "length")
    assert pool_capacity(5, 2) == 9 == 6 + 3


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"max_num_batched_tokens": 3}, "max_num_batched_tokens=3 is below max_num_seqs=4"),
        ({"max_model_len": 1}, "max_model_len=1 must be at least 2"),
        ({"table_width": 9}, "table_width=9 holds 36 tokens, .* it must be at least 10"),
        ({"num_blocks": 1}, "num_blocks=1"),
    ],
)
def test_impossible_settings_are_refused(changed: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _scheduler(**changed)


def test_no_warning_when_the_pool_holds_the_longest_sequence(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert _scheduler(num_blocks=11).length_limit == 40
    assert not caplog.records


# --- plans ---


def test_the_first_plan_admits_and_starts_the_prompts() -> None:
    scheduler = _scheduler(max_num_batched_tokens=9)
    sampling = {"temperature": 0.5, "top_k": 3, "min_tokens": 2, "stop_ids": (4, 5)}
    scheduler.submit(_request(7, 5, sampling=sampling, extras=b"abcd"))
    scheduler.submit(_request(8, 6, start=9))
    plan = scheduler.plan()
    assert plan is not None
    first, second = plan.admissions
    assert (plan.decode_rows.tolist(), plan.chunk_lens.tolist()) == ([], [5, 4])
    assert plan.chunk_rows.tolist() == [first.row, second.row]
    assert (plan.decode_bucket, plan.chunk_bucket, plan.token_bucket, plan.span) == (2, 2, 16, 16)
    assert (first.token_ids.tolist(), first.computed, first.prompt_length, first.limit) == ([0, 1, 2, 3, 4], 0, 5, 11)
    assert (first.temperature, first.top_k, first.seed, first.min_length) == (0.5, 3, 7, 7)
    assert (first.stop_ids, first.extras) == ((4, 5), b"abcd")
    tables = {row: plan.appends[plan.appends[:, 0] == row] for row in plan.chunk_rows.tolist()}
    assert [table[:, 1].tolist() for table in tables.values()] == [[0, 1], [0, 1]]
    assert len({*plan.appends[:, 2].tolist()} - {0}) == 4
    assert len(plan.copies) == 0


@pytest.mark.parametrize("budget", range(1, 15))
def test_a_prompt_is_computed_in_chunks_of_the_budget(budget: int) -> None:
    steps = Steps(_scheduler(max_num_seqs=1, max_num_batched_tokens=budget))
    steps.scheduler.submit(_request(0, 13, sampling={"max_tokens": 1}))
    lens = []
    while steps.scheduler.has_work:
        plan, events = steps.step()
        lens.append(int(plan.chunk_lens.sum()) + len(plan.decode_rows))
    assert lens == [budget] * (13 // budget) + [13 % budget] * (13 % budget > 0)
    assert events[0].token_ids.tolist() == _tokens(0, 13, 1)


def test_decode_rows_come_first_and_prompts_take_what_is_left() -> None:
    """A running sequence gets a token in every step while a new prompt arrives in every step."""
    steps = Steps(_scheduler(max_num_batched_tokens=6, num_blocks=60))
    steps.scheduler.submit(_request(0, 4, sampling={"max_tokens": 30}, stream=True))
    steps.step()
    for i in range(1, 25):
        steps.scheduler.submit(_request(i, 9, start=i, sampling={"max_tokens": 1}))
        plan, events = steps.step()
        assert [e.request_id for e in events if e.request_id == 0] == [0]
        assert int(plan.chunk_lens.sum()) == 6 - len(plan.decode_rows)
        assert (plan.decode_bucket, plan.token_bucket) == (2, 16)


def test_the_longest_rows_decode_first() -> None:
    steps = Steps(_scheduler())
    for i, length in enumerate((3, 7, 5)):
        steps.scheduler.submit(_request(i, length))
    steps.step()
    plan, _ = steps.step()
    assert plan.decode_rows.tolist() == [2, 3, 1]


def test_a_pure_decode_step_is_its_bucket() -> None:
    steps = Steps(_scheduler())
    for i in range(3):
        steps.scheduler.submit(_request(i, 5, start=i * 7))
    steps.step()
    plan, _ = steps.step()
    assert sorted(plan.decode_rows.tolist()) == [1, 2, 3]
    assert (plan.decode_bucket, plan.chunk_bucket, plan.token_bucket, plan.span) == (4, 0, 4, 0)


@pytest.mark.parametrize("block_size", [1, 2, 3, 4])
@pytest.mark.parametrize("length", range(1, 10))
def test_a_block_comes_exactly_when_a_computed_token_needs_it(length: int, block_size: int) -> None:
    """The sampled token is known and not computed: it needs no slot before the step that computes it."""
    steps = Steps(_scheduler(block_size=block_size, num_blocks=30, max_model_len=20))
    steps.scheduler.submit(_request(0, length, sampling={"max_tokens": 8}))
    num_blocks = 0
    for computed in range(length, length + 8):
        plan, _ = steps.step()
        num_blocks += len(plan.appends)
        assert num_blocks == -(-computed // block_size)
    assert not steps.scheduler.has_work


def test_the_last_token_fits_a_full_pool() -> None:
    """5 blocks of 1 token: 5 tokens are computed and a sixth is sampled."""
    steps = Steps(_scheduler(block_size=1, num_blocks=6))
    steps.scheduler.submit(_request(0, 2, sampling={"max_tokens": 4}))
    (event,) = steps.run()
    assert event.token_ids.tolist() == _tokens(0, 2, 4)
    assert steps.scheduler.stats().preemptions == 0


@pytest.mark.parametrize(
    ("sampling", "filtered"),
    [
        ({"temperature": 1.0}, [False, False, False, False]),
        ({"temperature": 1.0, "top_p": 0.5}, [True, True, True, True]),
        ({"temperature": 0.0, "top_p": 0.5}, [False, False, False, False]),
        ({"min_tokens": 2, "stop_ids": (60,)}, [True, True, False, False]),
    ],
)
def test_a_step_is_filtered_while_a_row_narrows_its_choice(sampling: dict[str, Any], filtered: list[bool]) -> None:
    steps = Steps(_scheduler())
    steps.scheduler.submit(_request(0, 5, sampling={"max_tokens": 4, **sampling}))
    assert [steps.step()[0].filtered for _ in range(4)] == filtered


def test_a_chunk_that_does_not_sample_is_not_filtered() -> None:
    steps = Steps(_scheduler(max_num_batched_tokens=4))
    steps.scheduler.submit(_request(0, 7, sampling={"temperature": 1.0, "top_k": 3}))
    assert [steps.step()[0].filtered for _ in range(3)] == [False, True, True]


def test_a_row_is_not_planned_beyond_its_limit() -> None:
    steps = Steps(_scheduler())
    steps.scheduler.submit(_request(0, 5, sampling={"max_tokens": 2}))
    steps.launch()
    steps.launch()
    assert steps.scheduler.plan() is None
    assert steps.scheduler.num_in_flight == 2
    assert steps.commit() == []
    assert [e.finish_reason for e in steps.commit()] == ["length"]


def test_a_row_that_needs_the_host_waits_for_its_last_token() -> None:
    steps = Steps(_scheduler())
    steps.scheduler.submit(_request(0, 5, needs_host=True))
    steps.scheduler.submit(_request(1, 5, start=20))
    assert len(steps.launch().chunk_rows) == 2
    assert steps.launch().decode_rows.tolist() == [2]
    steps.commit()
    assert sorted(steps.launch().decode_rows.tolist()) == [1, 2]


def test_a_needs_host_prompt_is_computed_ahead_in_chunks() -> None:
    steps = Steps(_scheduler(max_num_batched_tokens=4))
    steps.scheduler.submit(_request(0, 8, needs_host=True))
    assert [steps.launch().chunk_lens.tolist() for _ in range(2)] == [[4], [4]]
    assert steps.scheduler.plan() is None


def test_requests_are_admitted_in_the_order_of_their_arrival() -> None:
    steps = Steps(_scheduler(max_num_seqs=2))
    for i in range(5):
        steps.scheduler.submit(_request(i, 3, start=9 * i, sampling={"max_tokens": 2}))
    assert _admitted(steps) == [0, 1, 2, 3, 4]


def test_a_large_request_at_the_head_is_not_overtaken() -> None:
    steps = Steps(_scheduler(num_blocks=6))
    steps.scheduler.submit(_request(0, 9, sampling={"max_tokens": 3}))
    steps.step()
    steps.scheduler.submit(_request(1, 11, start=20, sampling={"max_tokens": 1}))
    steps.scheduler.submit(_request(2, 3, start=30, sampling={"max_tokens": 1}))
    assert steps.step()[0].admissions == ()
    assert _admitted(steps) == [1, 2]


# --- the prefix cache ---


def test_a_prompt_is_hit_by_the_plan_after_its_launch_and_not_before() -> None:
    steps = Steps(_scheduler())
    steps.scheduler.submit(_request(0, 6))
    steps.scheduler.submit(_request(1, 6))
    assert [a.computed for a in steps.launch().admissions] == [0, 0]
    steps.scheduler.submit(_request(2, 6))
    assert [a.computed for a in steps.launch().admissions] == [4]


def test_sampled_tokens_are_hit_once_they_are_committed() -> None:
    steps = Steps(_scheduler(max_model_len=30))
    steps.scheduler.submit(_request(0, 4, sampling={"max_tokens": 9}))
    tokens = [*range(4), *_tokens(0, 4, 9)]
    for _ in range(6):
        steps.launch()
    follow_up = Request(id=1, prompt_ids=np.array(tokens), sampling=ResolvedSampling(max_tokens=1))
    for _ in range(5):
        steps.commit()
    steps.scheduler.submit(follow_up)
    assert [a.computed for a in steps.launch().admissions] == [8]


def test_a_hit_on_a_part_of_a_block_is_a_copy_into_a_fresh_one() -> None:
    steps = Steps(_scheduler(unit=2))
    steps.scheduler.submit(_request(0, 6, sampling={"max_tokens": 1}))
    first, _ = steps.step()
    steps.scheduler.submit(_request(1, 11, sampling={"max_tokens": 1}))
    plan, events = steps.step()
    tables = [first.appends[:, 2].tolist(), plan.appends[:, 2].tolist()]
    assert plan.admissions[0].computed == 6
    assert plan.chunk_lens.tolist() == [5]
    assert tables[1][0] == tables[0][0]
    assert plan.copies.tolist() == [[tables[0][1], tables[1][1], 2]]
    assert events[0].cached_tokens == 6


def test_the_source_of_a_copy_is_not_handed_out_in_the_same_plan() -> None:
    """Three blocks are left, one of them the source: the second request must not get it."""
    steps = Steps(_scheduler(num_blocks=5, unit=2, max_model_len=13))
    steps.scheduler.submit(_request(0, 6, sampling={"max_tokens": 1}))
    first, _ = steps.step()
    steps.scheduler.submit(_request(1, 7, sampling={"max_tokens": 1}))
    steps.scheduler.submit(_request(2, 7, start=20, sampling={"max_tokens": 1}))
    plan = steps.launch()
    (source, target, _) = plan.copies[0].tolist()
    assert source == first.appends[1, 2]
    assert source not in plan.appends[:, 2]
    assert target == plan.appends[1, 2]


def test_a_copy_is_given_up_where_there_is_no_block_for_it() -> None:
    """The prompt needs the whole pool; keeping the source of a copy would leave it one block short for ever."""
    steps = Steps(_scheduler(num_blocks=4, unit=2, max_model_len=13))
    steps.scheduler.submit(_request(0, 6, sampling={"max_tokens": 1}))
    steps.step()
    steps.scheduler.submit(_request(1, 12, sampling={"max_tokens": 1}))
    plan, events = steps.step()
    assert len(plan.copies) == 0
    assert plan.admissions[0].computed == 4
    assert events[0].token_ids.tolist() == _tokens(1, 12, 1)


def test_a_prompt_with_one_token_left_is_a_decode_row() -> None:
    steps = Steps(_scheduler(unit=4))
    steps.scheduler.submit(_request(0, 9, sampling={"max_tokens": 1}))
    steps.step()
    steps.scheduler.submit(_request(1, 9, sampling={"max_tokens": 1}))
    plan, events = steps.step()
    assert (plan.decode_rows.tolist(), plan.chunk_bucket, plan.token_bucket) == ([plan.admissions[0].row], 0, 1)
    assert events[0].token_ids.tolist() == _tokens(1, 9, 1)


def test_an_aborted_prompt_leaves_only_what_it_has_computed() -> None:
    steps = Steps(_scheduler(max_num_batched_tokens=4))
    steps.scheduler.submit(_request(0, 12))
    steps.step()
    steps.scheduler.abort(0)
    steps.scheduler.submit(_request(1, 12))
    assert steps.launch().admissions[0].computed == 4


def test_tags_and_refusals_keep_requests_apart() -> None:
    steps = Steps(_scheduler())
    steps.scheduler.submit(_request(0, 9, tag=b"a"))
    steps.step()
    for i, (tag, reads, cached) in enumerate([(b"b", True, 0), (b"a", False, 0), (b"a", True, 8)], start=1):
        steps.scheduler.submit(_request(i, 9, tag=tag, reads_cache=reads))
        assert steps.step()[0].admissions[0].computed == cached


def test_without_prefix_caching_nothing_is_shared() -> None:
    steps = Steps(_scheduler(prefix_caching=False))
    for i in range(2):
        steps.scheduler.submit(_request(i, 9))
        assert steps.step()[0].admissions[0].computed == 0
    assert steps.scheduler.stats().cached_blocks == 0


def test_a_reset_forgets_what_is_cached_and_what_is_under_way() -> None:
    steps = Steps(_scheduler(max_num_batched_tokens=4))
    steps.scheduler.submit(_request(0, 12))
    steps.launch()
    steps.scheduler.reset_prefix_cache()
    for _ in range(3):
        steps.launch()
    steps.scheduler.submit(_request(1, 12))
    assert steps.launch().admissions[0].computed == 0


def test_blocks_that_held_nan_are_not_shared() -> None:
    steps = Steps(_scheduler())
    steps.scheduler.submit(_request(0, 9))
    steps.launch()
    (event,) = steps.commit(token_ids=np.full(4, NAN_TOKEN, np.int32))
    assert (event.finish_reason, len(event.token_ids)) == ("error", 0)
    assert "NaN" in event.error
    assert steps.scheduler.stats().cached_blocks == 0
    steps.scheduler.submit(_request(1, 9))
    assert steps.launch().admissions[0].computed == 0


# --- giving up rows ---


def test_the_youngest_is_preempted_and_gets_the_same_tokens_later() -> None:
    steps = Steps(_scheduler(num_blocks=6, max_model_len=21))
    for i in range(2):
        steps.scheduler.submit(_request(i, 7, start=9 * i, sampling={"max_tokens": 10}, stream=True))
    events, admitted = [], []
    while steps.scheduler.has_work:
        plan, new = steps.step()
        events += new
        admitted += [(a.seed, a.prompt_length, len(a.token_ids)) for a in plan.admissions]
    assert steps.scheduler.stats().preemptions == 1
    assert admitted == [(0, 7, 7), (1, 7, 7), (1, 7, 9)]
    for i in range(2):
        tokens = [token for e in events if e.request_id == i for token in e.token_ids.tolist()]
        assert tokens == _tokens(i, 7, 10)
    assert [e.request_id for e in events if e.finish_reason] == [0, 1]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_nobody_overtakes_a_preempted_sequence(depth: int) -> None:
    """A short prompt would fit the row and the blocks that are given up; it waits for the one that gave them up."""
    steps = Steps(_scheduler(num_blocks=6, max_model_len=21, max_num_seqs=2))
    for i in range(2):
        steps.scheduler.submit(_request(i, 7, start=9 * i, sampling={"max_tokens": 10}))
    steps.scheduler.submit(_request(2, 3, start=30, sampling={"max_tokens": 1}))
    seeds = []
    while steps.scheduler.has_work:
        plan = steps.scheduler.plan()
        if plan is not None:
            seeds += [admission.seed for admission in plan.admissions]
            steps.adopt(plan)
        if plan is None or steps.scheduler.num_in_flight > depth:
            steps.commit()
    assert steps.scheduler.stats().preemptions == 1
    assert seeds == [0, 1, 1, 2]


def test_a_waiting_prompt_is_tried_again_when_another_one_has_computed_its_beginning() -> None:
    """It needs 5 blocks and 4 are left; later 2 are left, but it shares 3 with the request that runs."""
    steps = Steps(_scheduler(num_blocks=8, max_model_len=29))
    steps.scheduler.submit(_request(0, 12, sampling={"max_tokens": 9}))
    steps.scheduler.submit(_request(1, 17, sampling={"max_tokens": 1}))
    plans = [steps.step()[0] for _ in range(9)]
    assert [[a.computed for a in plan.admissions] for plan in plans if plan.admissions] == [[0], [12]]


def test_a_preempted_sequence_keeps_the_tokens_under_way_and_waits_for_them() -> None:
    steps = Steps(_scheduler())
    steps.scheduler.submit(_request(0, 5, stream=True))
    for _ in range(3):
        steps.launch()
    steps.scheduler.preempt_all()
    assert steps.scheduler.stats().used_blocks == 0
    assert steps.scheduler.plan() is None
    streamed = [steps.commit()[0].token_ids.tolist() for _ in range(2)]
    assert steps.scheduler.plan() is None
    streamed.append(steps.commit()[0].token_ids.tolist())
    assert [token for tokens in streamed for token in tokens] == _tokens(0, 5, 3)
    (admission,) = steps.launch().admissions
    assert admission.token_ids.tolist() == [*range(5), *_tokens(0, 5, 3)]
    assert (admission.prompt_length, admission.limit) == (5, 11)


def test_a_preempted_sequence_can_end_with_the_tokens_under_way() -> None:
    steps = Steps(_scheduler())
    steps.scheduler.submit(_request(0, 5, sampling={"max_tokens": 2}))
    steps.launch()
    steps.launch()
    steps.scheduler.preempt_all()
    assert steps.commit() == []
    (event,) = steps.commit()
    assert (event.token_ids.tolist(), event.finish_reason) == (_tokens(0, 5, 2), "length")
    assert not steps.scheduler.has_work


def test_rows_with_nothing_left_to_compute_are_preempted_first() -> None:
    """Request 0 waits for its last tokens only: giving up its blocks costs nothing, and 1 goes on."""
    steps = Steps(_scheduler(num_blocks=5, max_model_len=17, prefix_caching=False))
    steps.scheduler.submit(_request(0, 7, sampling={"max_tokens": 2}))
    steps.scheduler.submit(_request(1, 7, start=20, sampling={"max_tokens": 9}))
    rows = {a.prompt_length: a.row for a in steps.launch().admissions}
    assert len(rows) == 1
    steps.launch()
    plan = steps.launch()
    assert len(plan.decode_rows) == 1
    assert len(plan.appends) == 1
    assert steps.scheduler.stats().preemptions == 1
    events = [event for _ in range(3) for event in steps.commit()]
    assert [(e.request_id, e.token_ids.tolist()) for e in events] == [(0, _tokens(0, 7, 2))]
    assert [(e.request_id, e.token_ids.tolist()) for e in steps.run()] == [(1, _tokens(1, 7, 9))]


@pytest.mark.parametrize("num_launched", range(5))
@pytest.mark.parametrize("num_committed", range(3))
def test_an_abort_frees_everything_at_once_and_the_next_takes_its_place(num_launched: int, num_committed: int) -> None:
    steps = Steps(_scheduler(max_num_batched_tokens=5, max_num_seqs=1))
    steps.scheduler.submit(_request(0, 9, sampling={"max_tokens": 9}))
    for _ in range(num_launched):
        steps.launch()
    for _ in range(min(num_committed, num_launched)):
        steps.commit()
    event = steps.scheduler.abort(0)
    assert event is not None
    assert event.finish_reason == "abort"
    assert event.token_ids.tolist() == _tokens(0, 9, max(0, min(num_committed, num_launched) - 1))
    assert steps.scheduler.abort(0) is None
    assert steps.scheduler.stats().used_blocks == 0
    steps.scheduler.submit(_request(1, 9, start=20, sampling={"max_tokens": 3}))
    steps.launch()
    events = [event for _ in range(max(0, num_launched - num_committed)) for event in steps.commit()]
    events += [event for _ in range(1) for event in steps.commit()] + steps.run()
    assert [(e.request_id, e.token_ids.tolist()) for e in events] == [(1, _tokens(1, 9, 3))]


def test_a_waiting_request_can_be_aborted() -> None:
    steps = Steps(_scheduler(max_num_seqs=1))
    for i in range(3):
        steps.scheduler.submit(_request(i, 5, start=9 * i))
    steps.step()
    event = steps.scheduler.abort(1)
    assert event is not None
    assert (event.finish_reason, event.token_ids.tolist()) == ("abort", [])
    assert [e.request_id for e in steps.run()] == [0, 2]


def test_a_request_can_be_ended_by_the_host_with_a_reason() -> None:
    steps = Steps(_scheduler())
    steps.scheduler.submit(_request(0, 5, stream=True))
    steps.launch()
    steps.launch()
    steps.commit()
    event = steps.scheduler.finish(0, "stop")
    assert event is not None
    assert (event.finish_reason, event.token_ids.tolist()) == ("stop", [])
    assert steps.commit() == []
    assert not steps.scheduler.has_work


def test_an_id_can_be_used_again_once_its_request_has_ended() -> None:
    steps = Steps(_scheduler())
    for _ in range(2):
        steps.scheduler.submit(_request(4, 5))
        assert [e.token_ids.tolist() for e in steps.run()] == [_tokens(4, 5, 6)]


def test_a_failed_launch_registers_nothing_and_is_planned_again() -> None:
    steps = Steps(_scheduler())
    steps.scheduler.submit(_request(0, 9))
    plan = steps.scheduler.plan()
    assert plan is not None
    steps.scheduler.launch_failed(plan)
    stats = steps.scheduler.stats()
    assert (stats.used_blocks, stats.cached_blocks, stats.waiting) == (0, 0, 1)
    assert [e.token_ids.tolist() for e in steps.run()] == [_tokens(0, 9, 6)]


def test_a_failed_launch_waits_for_the_steps_before_it() -> None:
    steps = Steps(_scheduler())
    steps.scheduler.submit(_request(0, 9))
    steps.launch()
    plan = steps.scheduler.plan()
    assert plan is not None
    steps.scheduler.launch_failed(plan)
    assert steps.scheduler.plan() is None
    steps.commit()
    assert steps.launch().admissions[0].token_ids.tolist() == [*range(9), *_tokens(0, 9, 1)]


def test_fail_all_ends_every_request_and_leaves_nothing() -> None:
    steps = Steps(_scheduler(max_num_seqs=2))
    for i in range(4):
        steps.scheduler.submit(_request(i, 5, start=9 * i))
    steps.launch()
    events = steps.scheduler.fail_all("the end")
    assert [(e.request_id, e.finish_reason, e.error) for e in events] == [(i, "error", "the end") for i in range(4)]
    stats = steps.scheduler.stats()
    assert (stats.running, stats.waiting, stats.used_blocks, stats.cached_blocks) == (0, 0, 0, 0)
    assert not steps.scheduler.has_work


# --- committing ---


def test_stop_ids_beyond_the_devices_are_the_hosts() -> None:
    """The device goes on; the host ends the request, and the step under way is not delivered."""
    tokens = _tokens(0, 5, 6)
    steps = Steps(_scheduler())
    steps.scheduler.submit(_request(0, 5, sampling={"host_stop_ids": frozenset([tokens[1], 77])}))
    for _ in range(3):
        steps.launch()
    assert steps.commit() == []
    (event,) = steps.commit()
    assert (event.token_ids.tolist(), event.finish_reason) == (tokens[:2], "stop")
    assert steps.commit() == []


def test_a_stop_id_as_the_last_token_counts_as_stop() -> None:
    tokens = _tokens(0, 5, 6)
    steps = Steps(_scheduler())
    steps.scheduler.submit(_request(0, 5, sampling={"max_tokens": 3, "stop_ids": (tokens[2],)}))
    (event,) = steps.run()
    assert (event.token_ids.tolist(), event.finish_reason) == (tokens[:3], "stop")


def test_a_device_that_does_not_sample_is_an_error() -> None:
    steps = Steps(_scheduler())
    steps.scheduler.submit(_request(0, 5))
    steps.launch()
    with pytest.raises(RuntimeError, match="state row 1 should have sampled, and the device did not"):
        steps.commit(counts=np.zeros(4, np.int32))


def test_a_device_that_ends_a_row_without_reason_is_an_error_and_no_event_is_lost() -> None:
    steps = Steps(_scheduler())
    steps.scheduler.submit(_request(0, 5, sampling={"max_tokens": 1}))
    steps.scheduler.submit(_request(1, 5, start=9))
    steps.launch()
    with pytest.raises(RuntimeError, match="the device ended request 1 at length 6 of 11"):
        steps.commit(alive=np.zeros(4, bool))
    events = steps.scheduler.fail_all("it")
    assert [(e.request_id, e.finish_reason) for e in events] == [(0, "length"), (1, "error")]


def test_steps_are_committed_in_the_order_of_their_launch() -> None:
    scheduler = _scheduler()
    scheduler.submit(_request(0, 5))
    plans = []
    for _ in range(2):
        plan = scheduler.plan()
        assert plan is not None
        scheduler.launched(plan)
        plans.append(plan)
    with pytest.raises(AssertionError, match="step 1 is committed before step 0"):
        scheduler.commit(plans[1], np.zeros(4, np.int32), np.ones(4, np.int32), np.ones(4, bool))


def test_only_one_plan_is_made_at_a_time() -> None:
    scheduler = _scheduler()
    scheduler.submit(_request(0, 5))
    assert scheduler.plan() is not None
    with pytest.raises(AssertionError, match="neither launched nor reported as failed"):
        scheduler.plan()


def test_the_ids_of_rows_are_those_of_their_requests() -> None:
    steps = Steps(_scheduler())
    steps.scheduler.submit(_request("x", 5))
    plan = steps.launch()
    assert steps.scheduler.request_ids(np.array([0, *plan.rows.tolist(), 4])) == [None, "x", None]


def test_statistics_count_what_happened() -> None:
    steps = Steps(_scheduler())
    for i in range(2):
        steps.scheduler.submit(_request(i, 9))
        steps.run()
    stats = steps.scheduler.stats()
    assert (stats.prefill_tokens, stats.cached_tokens, stats.generated_tokens) == (9 + 1, 8, 12)
    assert (stats.steps, stats.preemptions, stats.running, stats.waiting, stats.used_blocks) == (12, 0, 0, 0, 0)
    assert stats.free_blocks + stats.cached_blocks == 19
