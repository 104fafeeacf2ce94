"""The scheduler and the block pool against the KV oracle, over random workloads."""

from __future__ import annotations

import logging
import os
import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from funcllm.launch.loop import Loop
from funcllm.launch.plan import Admission, Plan, pack
from funcllm.launch.request import Request, ResolvedSampling
from funcllm.launch.scheduler import Scheduler
from tests.oracle import (
    NAN,
    Job,
    OracleExecutor,
    Prefixes,
    Workload,
    check_results,
    drive,
    expected_tokens,
    make_executor,
    make_request,
    make_scheduler,
    make_workload,
    next_token,
)

EXAMPLES = int(os.environ.get("ORACLE_EXAMPLES", "200"))


def property_test(share: float) -> settings:
    checks = list(HealthCheck)
    return settings(max_examples=int(EXAMPLES * share), deadline=None, suppress_health_check=checks, database=None)


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, logger="funcllm.launch.scheduler")


@property_test(0.4)
@given(st.data())
def test_every_attended_slot_holds_its_own_prefix(data: st.DataObject) -> None:
    workload = make_workload(lambda low, high: data.draw(st.integers(low, high)))
    for depth in (0, 1, 2):
        results, scheduler, _ = drive(workload, depth)
        check_results(workload, results, scheduler.length_limit)


@property_test(1.0)
@given(st.integers(0, 2**32), st.integers(0, 3))
def test_random_workloads_give_the_tokens_of_a_request_alone(seed: int, depth: int) -> None:
    workload = make_workload(random.Random(seed).randint)
    results, scheduler, _ = drive(workload, depth)
    check_results(workload, results, scheduler.length_limit)


@property_test(1.0)
@given(st.integers(0, 2**32), st.integers(0, 2))
def test_no_prefix_survives_a_change_of_weights(seed: int, depth: int) -> None:
    drive(make_workload(random.Random(seed).randint, with_swaps=True), depth)


def test_workloads_reach_what_they_are_meant_to_reach() -> None:
    """The generator is worth something only while it preempts, copies, hits, and leaves dead rows behind."""
    seen = {"preemptions": 0, "cached": 0, "copies": 0, "dead": 0, "attended": 0}
    for seed in range(40):
        _, scheduler, executor = drive(make_workload(random.Random(seed).randint), 1)
        seen["preemptions"] += scheduler.stats().preemptions
        seen["cached"] += scheduler.stats().cached_tokens
        seen["copies"] += executor.num_copied
        seen["dead"] += executor.num_dead
        seen["attended"] += executor.num_attended
    assert min(seen.values()) > 10, seen


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("seed", range(20))
def test_the_loop_gives_the_tokens_of_a_request_alone(seed: int, depth: int) -> None:
    workload = make_workload(random.Random(seed).randint)._replace(faults={}, swaps={})
    loop = Loop(make_scheduler(workload), make_executor(workload), depth=depth)
    served = [i for i, job in enumerate(workload.jobs) if len(job.prompt) < loop.scheduler.length_limit]
    for i in served:
        loop.submit(make_request(i, workload.jobs[i]))
    tokens: dict[int, list[int]] = {i: [] for i in served}
    for event in loop.run():
        tokens[int(event.request_id)] += event.token_ids.tolist()
    for i in served:
        job = workload.jobs[i]
        expected, _ = expected_tokens(
            job.prompt,
            tag=job.tag,
            limit=min(len(job.prompt) + job.max_tokens, loop.scheduler.length_limit),
            min_length=len(job.prompt) + job.min_tokens,
            stop_ids=job.stop_ids + job.host_stop_ids,
            device_stop_ids=job.stop_ids,
            nan=workload.nan,
        )
        assert tokens[i] == expected, f"request {i}"


# --- the oracle itself must be able to fail ---


def _run(executor: OracleExecutor, **fields: object) -> tuple[np.ndarray, ...]:
    values = {"step": 0, "decode_rows": np.zeros(0, np.int32), "decode_bucket": 2, "token_bucket": 2, **fields}
    plan = Plan(**{k: np.array(v, np.int32) if isinstance(v, list) else v for k, v in values.items()})  # type: ignore[arg-type]
    return executor.read(executor.launch(pack(plan), plan))


def _admission(row: int, tokens: list[int], computed: int = 0, limit: int = 9) -> Admission:
    token_ids = np.array(tokens, np.int32)
    return Admission(row=row, token_ids=token_ids, computed=computed, prompt_length=1, limit=limit, extras=bytes(8))


def _prefill(executor: OracleExecutor, row: int, tokens: list[int], blocks: list[int]) -> tuple[np.ndarray, ...]:
    return _run(
        executor,
        admissions=(_admission(row, tokens),),
        appends=[[row, i, block] for i, block in enumerate(blocks)],
        chunk_rows=[row],
        chunk_lens=[len(tokens)],
        chunk_bucket=2,
        token_bucket=16,
        span=16,
    )


def test_the_oracle_samples_the_token_of_the_prefix() -> None:
    executor = OracleExecutor(4, 2, 6, 20)
    token_ids, counts, alive = _prefill(executor, 1, [4, 5, 6], [3, 4])
    last = Prefixes().chain([4, 5, 6], bytes(4))[-1]
    assert token_ids[2] == next_token(last, 3, 0, [])
    assert counts.tolist() == [0, 0, 1, 0]
    assert alive.tolist() == [False, False, True, False]
    assert token_ids[[0, 1, 3]].tolist() == [NAN] * 3


def test_the_oracle_sees_a_foreign_block() -> None:
    executor = OracleExecutor(4, 2, 6, 20)
    _prefill(executor, 1, [4, 5, 6], [3, 4])
    _prefill(executor, 2, [7, 7, 7], [3, 5])
    with pytest.raises(AssertionError, match="row 1 reads a foreign slot at position 0"):
        _run(executor, decode_rows=[1])


def test_the_oracle_sees_a_hit_of_other_tokens() -> None:
    executor = OracleExecutor(4, 2, 6, 20)
    _prefill(executor, 1, [4, 5, 6], [3, 4])
    hit = _admission(2, [4, 6, 7], computed=2)
    with pytest.raises(AssertionError, match="row 2 reads a foreign slot at position 1"):
        _run(executor, decode_rows=[2], admissions=(hit,), appends=[[2, 0, 3], [2, 1, 5]])


def test_the_oracle_sees_two_rows_that_write_one_slot() -> None:
    executor = OracleExecutor(4, 2, 6, 20)
    _prefill(executor, 1, [4, 5, 6], [3, 4])
    _prefill(executor, 2, [7, 7, 7], [5, 4])
    with pytest.raises(AssertionError, match="written twice"):
        _run(executor, decode_rows=[1, 2])


def test_the_oracle_sees_a_step_beyond_the_limit() -> None:
    executor = OracleExecutor(4, 4, 6, 20)
    admission = _admission(1, [4, 5], computed=0, limit=2)
    with pytest.raises(AssertionError, match="computes its last token"):
        _run(
            executor,
            admissions=(admission,),
            appends=[[1, 0, 3]],
            chunk_rows=[1],
            chunk_lens=[2],
            chunk_bucket=2,
            token_bucket=16,
            span=16,
        )


def test_the_oracle_treats_a_dead_row_as_the_trash_row() -> None:
    executor = OracleExecutor(4, 4, 6, 20)
    _run(
        executor,
        admissions=(_admission(1, [4, 5], limit=3),),
        appends=[[1, 0, 3]],
        chunk_rows=[1],
        chunk_lens=[2],
        chunk_bucket=2,
        token_bucket=16,
        span=16,
    )
    token_ids, counts, alive = _run(executor, decode_rows=[1])
    assert (token_ids.tolist(), counts.tolist(), alive.tolist()) == ([NAN, NAN], [0, 0], [False, False])
    assert executor.num_dead == 1


# --- the cases that random workloads may miss ---


def _workload(jobs: list[Job], **fields: object) -> Workload:
    base = Workload(
        block_size=4,
        unit=4,
        num_blocks=20,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_model_len=40,
        prefix_caching=True,
        nan=False,
        jobs=jobs,
        faults={},
        swaps={},
    )
    return base._replace(**fields)  # type: ignore[arg-type]


def _job(prompt: list[int], max_tokens: int = 4, arrives: int = 0, tag: bytes = bytes(4)) -> Job:
    return Job(
        prompt=prompt,
        max_tokens=max_tokens,
        min_tokens=0,
        stop_ids=[],
        host_stop_ids=[],
        tag=tag,
        arrives=arrives,
        aborts=None,
        needs_host=False,
        stream=False,
        reads_cache=True,
    )


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("length", [4, 7, 8, 9, 12])
def test_a_prompt_that_is_wholly_cached_computes_one_token(length: int, depth: int) -> None:
    prompt = [i % 3 for i in range(length)]
    workload = _workload([_job(prompt), _job(prompt, arrives=20)])
    results, scheduler, _ = drive(workload, depth)
    check_results(workload, results, scheduler.length_limit)
    assert scheduler.stats().cached_tokens == (length // 4 * 4 if length % 4 else length - 1)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_half_computed_unit_is_not_registered_after_a_change_of_weights(depth: int) -> None:
    """The first request has computed 5 of 8 tokens of its first unit with the old weights when they change."""
    prompt = [i % 3 for i in range(9)]
    jobs = [_job(prompt, arrives=0), _job([*prompt, 1], arrives=6)]
    workload = _workload(jobs, block_size=8, unit=8, max_num_batched_tokens=5, swaps={1: False})
    _, scheduler, _ = drive(workload, depth)
    assert scheduler.stats().cached_tokens == 0


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_requests_with_other_tags_share_nothing(depth: int) -> None:
    prompt = [i % 3 for i in range(12)]
    tags = [bytes(4), b"\1\0\0\0", bytes(4)]
    workload = _workload([_job(prompt, arrives=20 * i, tag=tag) for i, tag in enumerate(tags)])
    results, scheduler, _ = drive(workload, depth)
    check_results(workload, results, scheduler.length_limit)
    assert scheduler.stats().cached_tokens == 11


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("num_blocks", [6, 51])
def test_a_small_pool_gives_the_tokens_of_a_large_one(num_blocks: int, depth: int) -> None:
    jobs = [_job([i % 3, 1, 2, i % 2, 0], max_tokens=8) for i in range(3)]
    workload = _workload(jobs, num_blocks=num_blocks)
    results, scheduler, _ = drive(workload, depth)
    check_results(workload, results, scheduler.length_limit)
    assert (scheduler.stats().preemptions > 0) == (num_blocks == 6)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_block_that_is_used_again_is_no_hit_any_more(depth: int) -> None:
    first, other = [i % 3 for i in range(8)], [2 - i % 3 for i in range(14)]
    jobs = [_job(first, max_tokens=2), _job(other, max_tokens=3, arrives=20), _job(first, max_tokens=2, arrives=40)]
    workload = _workload(jobs, num_blocks=5)
    results, scheduler, _ = drive(workload, depth)
    check_results(workload, results, scheduler.length_limit)
    assert scheduler.stats().cached_tokens == 0


def test_a_request_may_refuse_to_read_the_cache() -> None:
    scheduler = Scheduler(
        num_blocks=9, block_size=2, max_num_seqs=2, max_num_batched_tokens=8, max_model_len=12, check=True
    )
    executor = OracleExecutor(3, 2, 9, 8)
    loop = Loop(scheduler, executor)
    for i, reads in enumerate((True, False, True)):
        sampling = ResolvedSampling(max_tokens=1)
        prompt = np.array([1, 2, 1, 2, 1])
        loop.submit(Request(id=i, prompt_ids=prompt, sampling=sampling, extras=bytes(8), reads_cache=reads))
        events = list(loop.run())
        assert events[-1].cached_tokens == (0, 0, 4)[i]
