"""The KV oracle: an executor without a model that knows what must stand in every slot of every KV block.

It executes packed plans in launch order, with the semantics of the device: copies, then admissions, then appended
blocks, then the step. A slot holds a `Prefix`: all tokens up to its position, the request's tag, and the version of the
weights it was computed with. Every attended position of every scheduled row must hold exactly that row's own prefix.
The next token is a function of the prefix, so a request's tokens can be told without a scheduler (`expected_tokens`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from funcllm.launch.buckets import make_buckets
from funcllm.launch.plan import Ints, PackedPlan, Plan, admission_column, pack, unpack
from funcllm.launch.request import Request, ResolvedSampling
from funcllm.launch.scheduler import Event, Scheduler

VOCAB = 8
NAN = -1

Slot = tuple[int, int]  # (block, offset)
Outputs = tuple[Ints, Ints, np.ndarray]


class Fault(RuntimeError):
    """A launch that fails on purpose."""


@dataclass(frozen=True)
class Prefix:
    """Interned: equal prefixes are one object, so comparing two is comparing their identity."""

    number: int
    mix: int  # a number made of all that is in the prefix


class Prefixes:
    """All prefixes seen so far."""

    def __init__(self) -> None:
        self._interned: dict[tuple[int | bytes, int], Prefix] = {}

    def of(self, parent: Prefix | None, tag: bytes, version: int, token: int) -> Prefix:
        """The prefix behind `parent` (None: a sequence's first token), computed with these weights."""
        key = (tag + version.to_bytes(4, "little") if parent is None else parent.number, token * 64 + version)
        if key not in self._interned:
            start = int.from_bytes(tag, "little") if parent is None else parent.mix
            mix = (start * 6364136223846793005 + (token * 64 + version) * 1442695040888963407 + 99991) % 2**61
            self._interned[key] = Prefix(len(self._interned), mix)
        return self._interned[key]

    def chain(self, tokens: list[int], tag: bytes, version: int = 0) -> list[Prefix]:
        """The prefix at each position of a sequence."""
        chain: list[Prefix] = []
        for token in tokens:
            chain.append(self.of(chain[-1] if chain else None, tag, version, token))
        return chain


@dataclass
class Row:
    """One state row, as the device has it. The extras of a request are its tag, then whether it needs the host."""

    tokens: list[int]
    computed: int
    limit: int
    min_length: int
    stop_ids: list[int]
    tag: bytes
    needs_host: bool
    sampled_in: int = -1  # launch
    alive: bool = True
    table: dict[int, int] = field(default_factory=dict)
    prefixes: list[Prefix] = field(default_factory=list)  # of the computed positions


def next_token(prefix: Prefix, length: int, min_length: int, stop_ids: list[int], nan: bool = False) -> int:
    """The token behind a prefix of this length; stop ids are not chosen below min_length."""
    if nan and prefix.mix // VOCAB % 23 == 0:
        return NAN
    token = prefix.mix // 1000 % VOCAB
    while length < min_length and token in stop_ids:
        token = (token + 1) % VOCAB
    return token


def expected_tokens(
    prompt: list[int],
    *,
    tag: bytes = b"",
    limit: int,
    min_length: int = 0,
    stop_ids: list[int],
    device_stop_ids: list[int] | None = None,
    nan: bool = False,
) -> tuple[list[int], str]:
    """The tokens of a request and why it ends, one token after the other, alone in the world."""
    prefixes, tokens = Prefixes(), list(prompt)
    last = prefixes.chain(tokens, tag)[-1]
    masked = stop_ids if device_stop_ids is None else device_stop_ids
    while True:
        length = len(tokens)
        token = next_token(last, length, min_length, masked, nan)
        if token == NAN:
            return tokens[len(prompt) :], "error"
        tokens.append(token)
        last = prefixes.of(last, tag, 0, token)
        if token in stop_ids and length >= min_length:
            return tokens[len(prompt) :], "stop"
        if len(tokens) == limit:
            return tokens[len(prompt) :], "length"


class OracleExecutor:
    """Executes plans and checks them. `fail_next` makes the next launch raise after that many of its four phases."""

    def __init__(self, num_rows: int, block_size: int, num_blocks: int, max_tokens: int, *, nan: bool = False) -> None:
        self.version = 0
        self.fail_next: int | None = None
        self.num_attended = 0  # positions checked
        self.num_dead = 0  # dead rows in plans
        self.num_copied = 0
        self.num_sampled = 0
        self._launches = 0
        self._last_read = -1
        self._nan = nan
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._max_tokens = max_tokens
        self.rows: list[Row | None] = [None] * num_rows
        self._kv: dict[Slot, Prefix] = {}
        self._prefixes = Prefixes()

    def launch(self, words: Ints, plan: Plan, /) -> tuple[int, Outputs]:
        """Runs a packed plan; its handle holds the outputs, which the loop reads later."""
        packed = unpack(words.copy())
        phases = (self._copy, self._admit, self._append, self._run)
        stop_after, self.fail_next = self.fail_next, None
        for phase in phases[:stop_after]:
            outputs = phase(packed)
        if stop_after is not None:
            raise Fault(f"after {stop_after} phases")
        self._launches += 1
        return self._launches - 1, outputs

    def read(self, handle: tuple[int, Outputs], /) -> Outputs:
        launch, outputs = handle
        assert launch == self._last_read + 1, "steps are read out of order"
        self._last_read = launch
        return outputs

    def _copy(self, packed: PackedPlan) -> None:
        """All copies at once: none may read what another one writes."""
        copies = packed.part("copies").tolist()
        sources, targets = {c[0] for c in copies}, [c[1] for c in copies]
        assert not sources & set(targets), f"a copy reads what another writes: {copies}"
        assert len(set(targets)) == len(targets), f"two copies write one block: {copies}"
        for source, target, slots in copies:
            assert min(source, target) > 0, f"the trash block is copied: {copies}"
            assert 0 < slots < self._block_size
            for offset in range(slots):
                self._kv[target, offset] = self._kv[source, offset]
            self.num_copied += 1

    def _admit(self, packed: PackedPlan) -> None:
        table, tokens = packed.part("admissions"), packed.part("token_ids").tolist()
        extras = packed.part("extras").tobytes()
        size = len(extras) // len(table) if len(table) else 0
        for i, fields in enumerate(table.tolist()):
            row, count = fields[admission_column("row")], fields[admission_column("num_tokens")]
            assert 0 < row < len(self.rows), f"admission to row {row}"
            stop_ids = fields[admission_column("stop_ids") :]
            self.rows[row] = Row(
                tokens=tokens[:count],
                computed=fields[admission_column("computed")],
                limit=fields[admission_column("limit")],
                min_length=fields[admission_column("min_length")],
                stop_ids=[x for x in stop_ids if x >= 0],
                tag=extras[i * size : (i + 1) * size - 4],
                needs_host=extras[(i + 1) * size - 4] == 1,
            )
            tokens = tokens[count:]
        assert not tokens, "tokens of no admission"

    def _append(self, packed: PackedPlan) -> None:
        for row, index, block in packed.part("appends").tolist():
            state = self.rows[row]
            assert state is not None, f"a block for row {row}, which nobody has"
            assert 0 < block < self._num_blocks, f"block {block} is handed out"
            assert index == len(state.table), f"row {row} gets block {index} and has {len(state.table)}"
            state.table[index] = block

    def _run(self, packed: PackedPlan) -> Outputs:
        decode, chunks = packed.part("decode_rows").tolist(), packed.part("chunk_rows").tolist()
        lens = [int(row > 0) for row in decode] + packed.part("chunk_lens").tolist()
        rows = decode + chunks
        self._check_shape(packed, rows, lens)
        written: set[Slot] = set()
        alive = []
        for place, (row, length) in enumerate(zip(rows, lens)):
            state = self.rows[row]
            assert row == 0 or state is not None, f"row {row} was never admitted"
            if state is None or not state.alive:
                self.num_dead += row > 0
                self._kv[0, 0] = Prefix(-1, -1)
                continue
            assert place >= len(decode) or state.computed + 1 == len(state.tokens), f"row {row} does not decode yet"
            self._write(row, state, length, written)
            alive.append((place, row, state))
        outputs = np.zeros((3, len(rows)), np.int32)
        outputs[0] = NAN  # what stands in the outputs of rows that do not count means nothing
        for place, row, state in alive:
            self._check_attended(row, state)
            outputs[:, place] = self._sample(state)
        return outputs[0], outputs[1], outputs[2].astype(bool)

    def _check_shape(self, packed: PackedPlan, rows: list[int], lens: list[int]) -> None:
        real = [row for row in rows if row]
        assert len(set(real)) == len(real), f"a row is twice in a plan: {rows}"
        assert len(real) == packed.num_decode + packed.num_chunks, "a real row is row 0"
        assert sum(lens) <= self._max_tokens, f"{sum(lens)} tokens are above the budget"
        chunk_tokens = sum(lens[packed.decode_bucket :])
        assert packed.token_bucket >= packed.decode_bucket + chunk_tokens
        assert bool(packed.chunk_bucket) == bool(chunk_tokens)
        assert all(lens[packed.decode_bucket : packed.decode_bucket + packed.num_chunks]), "an empty chunk"
        assert packed.span >= max(lens[packed.decode_bucket :], default=0)
        assert packed.decode_bucket >= 2 or not chunk_tokens
        assert packed.token_bucket % 16 == 0 or (packed.token_bucket - packed.decode_bucket) % 16 == 0

    def _write(self, row: int, state: Row, length: int, written: set[Slot]) -> None:
        """Computes `length` tokens of a row and puts their prefixes into its slots."""
        start, stop = state.computed, state.computed + length
        assert 0 < length <= len(state.tokens) - start, f"row {row} computes what it does not have"
        assert stop < state.limit, f"row {row} computes its last token, {stop} of {state.limit}"
        assert not state.needs_host or state.sampled_in <= self._last_read, f"row {row} runs ahead of the host"
        state.prefixes = self._own_prefixes(state)
        for position in range(start, stop):
            parent = state.prefixes[-1] if position else None
            state.prefixes.append(self._prefixes.of(parent, state.tag, self.version, state.tokens[position]))
            slot = self._slot(state, position)
            assert slot not in written, f"slot {slot} is written twice in a step"
            written.add(slot)
            self._kv[slot] = state.prefixes[-1]
        state.computed = stop

    def _check_attended(self, row: int, state: Row) -> None:
        """Every position that a row attends to holds exactly its own prefix, after all writes of the step."""
        for position, prefix in enumerate(state.prefixes):
            slot = self._slot(state, position)
            assert self._kv.get(slot) is prefix, f"row {row} reads a foreign slot at position {position}: {slot}"
        self.num_attended += len(state.prefixes)

    def _slot(self, state: Row, position: int) -> Slot:
        return state.table[position // self._block_size], position % self._block_size

    def _own_prefixes(self, state: Row) -> list[Prefix]:
        """The prefixes of what a row has computed. A hit counts as computed with the weights of now."""
        if len(state.prefixes) == state.computed:
            return state.prefixes
        assert not state.prefixes
        return self._prefixes.chain(state.tokens[: state.computed], state.tag, self.version)

    def _sample(self, state: Row) -> tuple[int, int, bool]:
        before = len(state.tokens)
        if state.computed < before:
            return NAN, 0, True
        token = next_token(state.prefixes[-1], before, state.min_length, state.stop_ids, self._nan)
        state.tokens.append(max(token, 0))
        ends = token == NAN or before + 1 >= state.limit or (token in state.stop_ids and before >= state.min_length)
        state.alive = not ends
        state.sampled_in = self._launches
        self.num_sampled += 1
        return token, 1, state.alive


# --- workloads -------------------------------------------------------------------------------------------------------

Draw = Callable[[int, int], int]  # an integer between two bounds, both included


class Job(NamedTuple):
    """A request of a workload, and when it comes and goes (in steps)."""

    prompt: list[int]
    max_tokens: int
    min_tokens: int
    stop_ids: list[int]
    host_stop_ids: list[int]
    tag: bytes
    arrives: int
    aborts: int | None
    needs_host: bool
    stream: bool
    reads_cache: bool


class Workload(NamedTuple):
    block_size: int
    unit: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    prefix_caching: bool
    nan: bool
    jobs: list[Job]
    faults: dict[int, int]  # step -> phases that run before the launch raises
    swaps: dict[int, bool]  # step -> whether running sequences compute all again with the new weights
    captured_tokens: int = 0


class Result(NamedTuple):
    tokens: list[int]
    reason: str


def make_workload(draw: Draw, *, with_swaps: bool = False) -> Workload:
    """A workload as `draw` decides it: small pools, shared prefixes, and much that goes wrong."""
    block_size = (1, 2, 3, 4, 4, 6, 8, 16, 32)[draw(0, 8)]
    units = [unit for unit in range(1, block_size + 1) if block_size % unit == 0]
    max_num_seqs = draw(1, 6)
    stems = [[draw(0, 2) for _ in range(draw(1, 14 if block_size < 16 else 60))] for _ in range(2)]
    return Workload(
        block_size=block_size,
        unit=units[draw(0, len(units) - 1)],
        num_blocks=draw(4, 14),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=draw(max_num_seqs, 20),
        max_model_len=draw(12, 40) * (1 if block_size < 16 else 3),
        prefix_caching=draw(0, 7) > 0,
        nan=draw(0, 7) == 0,
        jobs=[_make_job(draw, stems) for _ in range(draw(1, 8))],
        faults={draw(0, 20): draw(0, 4) for _ in range(max(0, draw(0, 4) - 2))},
        swaps={draw(0, 20): draw(0, 1) == 1 for _ in range(draw(1, 2))} if with_swaps else {},
        captured_tokens=16 * draw(0, 4),
    )


def _make_job(draw: Draw, stems: list[list[int]]) -> Job:
    stem = stems[draw(0, len(stems) - 1)]
    max_tokens = draw(1, 16)
    with_host_stops = draw(0, 5) == 0
    return Job(
        prompt=stem[: draw(1, len(stem))] + [draw(0, 3) for _ in range(draw(0, 6))],
        max_tokens=max_tokens,
        min_tokens=0 if with_host_stops else max(0, draw(0, max_tokens + 4) - 4),
        stop_ids=[draw(0, VOCAB - 1)] * draw(0, 1),
        host_stop_ids=[draw(0, VOCAB - 1)] if with_host_stops else [],
        tag=bytes([max(0, draw(0, 4) - 3), 0, 0, 0]),
        arrives=draw(0, 12),
        aborts=draw(0, 20) if draw(0, 4) == 0 else None,
        needs_host=draw(0, 5) == 0,
        stream=draw(0, 1) == 0,
        reads_cache=draw(0, 9) > 0,
    )


def make_scheduler(workload: Workload) -> Scheduler:
    return Scheduler(
        num_blocks=workload.num_blocks,
        block_size=workload.block_size,
        max_num_seqs=workload.max_num_seqs,
        max_num_batched_tokens=workload.max_num_batched_tokens,
        max_model_len=workload.max_model_len,
        buckets=make_buckets(workload.max_num_seqs, captured_tokens=workload.captured_tokens),
        prefix_caching=workload.prefix_caching,
        unit=workload.unit,
        vocab_size=VOCAB,
        check=True,
    )


def make_executor(workload: Workload) -> OracleExecutor:
    rows = workload.max_num_seqs + 1
    tokens = workload.max_num_batched_tokens
    return OracleExecutor(rows, workload.block_size, workload.num_blocks, tokens, nan=workload.nan)


def drive(
    workload: Workload, depth: int, executor: OracleExecutor | None = None
) -> tuple[dict[int, Result], Scheduler, OracleExecutor]:
    """Runs a workload with outputs read `depth` steps late; a failed launch is planned again. Checks as it goes."""
    scheduler, executor = make_scheduler(workload), executor or make_executor(workload)
    launched: deque[tuple[Plan, Any]] = deque()
    results: dict[int, Result] = {}
    last_arrival = max(job.arrives for job in workload.jobs)
    for step in range(4000):
        _submit_and_abort(workload, scheduler, step, results)
        if step in workload.swaps:
            executor.version += 1
            scheduler.reset_prefix_cache()
            if workload.swaps[step]:
                scheduler.preempt_all()
        executor.fail_next = workload.faults.get(step)
        plan = scheduler.plan()
        if plan is not None:
            _launch(scheduler, executor, plan, launched)
        assert plan is not None or launched or not scheduler.has_work, "the scheduler is stuck"
        scheduler.check_blocks()
        while len(launched) > (depth if plan is not None else max(0, len(launched) - 1)):
            oldest, handle = launched.popleft()
            _collect(workload, scheduler.commit(oldest, *executor.read(handle)), results)
        if step >= last_arrival and not scheduler.has_work:
            break
    else:
        raise AssertionError("the workload does not end")
    stats = scheduler.stats()
    assert (stats.running, stats.waiting, stats.used_blocks) == (0, 0, 0)
    assert stats.free_blocks + stats.cached_blocks == workload.num_blocks - 1
    if not workload.faults and all(job.aborts is None and not job.host_stop_ids for job in workload.jobs):
        delivered = sum(len(result.tokens) + (result.reason == "error") for result in results.values())
        assert executor.num_sampled == delivered, "a token was sampled twice, or never delivered"
    return results, scheduler, executor


def check_results(workload: Workload, results: dict[int, Result], length_limit: int) -> None:
    """Every request has the tokens that it has alone in the world; an aborted one the first of them."""
    for i, job in enumerate(workload.jobs):
        if len(job.prompt) >= length_limit:
            assert results[i] == Result([], "refused"), f"request {i} is too long and was served"
            continue
        tokens, reason = expected_tokens(
            job.prompt,
            tag=job.tag,
            limit=min(len(job.prompt) + job.max_tokens, length_limit),
            min_length=len(job.prompt) + job.min_tokens,
            stop_ids=job.stop_ids + job.host_stop_ids,
            device_stop_ids=job.stop_ids,
            nan=workload.nan,
        )
        if results[i].reason == "abort":
            assert job.aborts is not None
            assert results[i].tokens == tokens[: len(results[i].tokens)], f"request {i}"
        else:
            assert results[i] == Result(tokens, reason), f"request {i}"


def make_request(i: int, job: Job) -> Request:
    sampling = ResolvedSampling(
        max_tokens=job.max_tokens,
        min_tokens=job.min_tokens,
        stop_ids=tuple(job.stop_ids),
        host_stop_ids=frozenset(job.host_stop_ids),
    )
    return Request(
        id=i,
        prompt_ids=np.array(job.prompt),
        sampling=sampling,
        tag=job.tag,
        extras=job.tag + bytes([job.needs_host, 0, 0, 0]),
        needs_host=job.needs_host,
        stream=job.stream,
        reads_cache=job.reads_cache,
    )


def _submit_and_abort(workload: Workload, scheduler: Scheduler, step: int, results: dict[int, Result]) -> None:
    for i, job in enumerate(workload.jobs):
        if job.arrives == step:
            free = scheduler.pool.available
            try:
                scheduler.submit(make_request(i, job))
            except ValueError:
                results[i] = Result([], "refused")
            assert scheduler.pool.available == free
        if job.aborts == step:
            event = scheduler.abort(i)
            _collect(workload, [event] if event is not None else [], results)
            assert scheduler.abort(i) is None


def _launch(scheduler: Scheduler, executor: OracleExecutor, plan: Plan, launched: deque[tuple[Plan, Any]]) -> None:
    try:
        handle = executor.launch(pack(plan), plan)
    except Fault:
        scheduler.launch_failed(plan)
        return
    scheduler.launched(plan)
    launched.append((plan, handle))


def _collect(workload: Workload, events: list[Event], results: dict[int, Result]) -> None:
    for event in events:
        i = int(event.request_id)
        job = workload.jobs[i]
        before = results.get(i, Result([], ""))
        assert before.reason == "", f"request {i} goes on after its end"
        assert event.finish_reason is not None or (job.stream and len(event.token_ids) == 1)
        assert event.cached_tokens < len(job.prompt)
        results[i] = Result(before.tokens + event.token_ids.tolist(), event.finish_reason or "")
