"""The scheduler: which sequences run in the next step, in which state rows and KV blocks, and what came of it.

Owns the host's mirror of the state rows and all sequences; the blocks are `blocks.BlockPool`'s. Receives requests and
the outputs of steps; returns plans and events. It makes plan(n + 1) before it has seen the outputs of step n, at any
depth: `scheduled_*` says how far a row is once every launched step has run, if it lives; `committed_len` what the host
has read.

Invariants: steps run on one stream in the order of their plans, so a row or block that is given up may be used by the
next plan at once, whatever is still under way. Blocks for `scheduled_computed` tokens are allocated before the launch,
and no others: the last sampled token of a sequence never needs a slot. A row is never planned beyond its limit.
"""

from __future__ import annotations

import heapq
import logging
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from funcllm.launch.blocks import TRASH, BlockPool, Chain, Hit, num_blocks_for
from funcllm.launch.buckets import Buckets, make_buckets
from funcllm.launch.plan import Admission, Plan
from funcllm.launch.request import FinishReason, Ints, Request, RequestId

logger = logging.getLogger(__name__)

Bools = npt.NDArray[np.bool_]

NAN_TOKEN = -1  # what a step returns for a row whose logits held NaN

_NO_ROWS = np.zeros(0, np.int32)
_NO_TRIPLES = np.zeros((0, 3), np.int32)
_RETRY_STEPS = 8  # by then a waiting prompt may share blocks with one that runs
_NEVER = np.iinfo(np.int32).max


class Event(NamedTuple):
    """What became of a request in a step: tokens not delivered before, and why it ended, if it did."""

    request_id: RequestId
    token_ids: Ints
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0  # of the prompt, found in the prefix cache
    error: str = ""


class Stats(NamedTuple):
    running: int
    waiting: int
    free_blocks: int  # nothing in them
    cached_blocks: int  # kept by the prefix cache alone
    used_blocks: int
    steps: int
    preemptions: int
    prefill_tokens: int
    cached_tokens: int
    generated_tokens: int


@dataclass(slots=True, eq=False)
class _Sequence:
    """A request and where it stands. `token_ids` is current while it has no row; the row's history is, otherwise."""

    request: Request
    arrival: int
    limit: int
    token_ids: Ints
    delivered: int  # length up to which its tokens have been delivered
    row: int = 0
    chain: Chain | None = None
    in_flight: int = 0  # of a preempted sequence: launched steps with it that are not committed
    cached_tokens: int = -1
    required: int = 0  # blocks it needed when it was last tried and had to wait
    retry_step: int = 0  # when to try it again although there are no more blocks than then
    is_done: bool = False

    @property
    def min_length(self) -> int:
        return min(len(self.request.prompt_ids) + self.request.sampling.min_tokens, self.limit)


class _Rows(NamedTuple):
    """The host's mirror of the state rows: one array for each fact, so that a step is a few array operations."""

    token_ids: Ints  # [row, position], up to committed_len
    block_table: Ints  # [row, index]
    active: Bools
    scheduled_len: Ints
    scheduled_computed: Ints
    committed_len: Ints
    num_blocks: Ints
    limit: Ints
    min_length: Ints
    units: Ints  # registered in the prefix cache
    delivered: Ints
    arrival: npt.NDArray[np.int64]
    occupant: npt.NDArray[np.int64]  # another number whenever the row is taken; 0 while it is free
    needs_host: Bools
    narrows: Bools
    streams: Bools
    host_stops: Bools


class _Step(NamedTuple):
    """A plan under way, and what its outputs mean."""

    plan: Plan
    rows: Ints
    places: Ints  # of each row in the padded outputs
    occupants: npt.NDArray[np.int64]
    sequences: npt.NDArray[np.object_]
    samples: Bools  # whether the row computes its last known token, and so samples
    prefilled: Ints  # rows that computed a part of a prompt, to be registered once launched


class _Composition(NamedTuple):
    """What a plan is made of, as the scheduler decides it."""

    decode_rows: Ints
    chunk_rows: Ints
    chunk_lens: Ints
    appends: Ints
    copies: Ints
    admissions: tuple[Admission, ...]
    admitted_rows: Ints


class _Admitted(NamedTuple):
    admission: Admission
    chunk_len: int
    appends: Ints
    copy: tuple[int, int, int] | None


class Scheduler:
    """Continuous batching over paged blocks: decode rows first, then chunks of prompts, then new sequences.

    num_blocks counts the trash block; max_num_seqs is the number of state rows without the trash row; table_width
    bounds the blocks of a sequence; unit is that of the prefix cache; check=True proves the block pool after each step.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        table_width: int | None = None,
        buckets: Buckets | None = None,
        prefix_caching: bool = True,
        unit: int | None = None,
        vocab_size: int | None = None,
        check: bool = False,
    ) -> None:
        self.pool = BlockPool(num_blocks, block_size, unit=unit, caching=prefix_caching)
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.buckets = make_buckets(max_num_seqs) if buckets is None else buckets
        self.vocab_size = vocab_size
        self.length_limit = min(max_model_len, pool_capacity(num_blocks, block_size))
        self.check = check
        self.extras_of: Callable[[int], bytes] | None = None  # of a state row, as the launched steps leave them
        width = num_blocks_for(self.length_limit - 1, block_size) if table_width is None else table_width
        self._validate(width)

        self._rows = _empty_rows(max_num_seqs + 1, self.length_limit, width)
        self._row_sequences = np.full(max_num_seqs + 1, None, object)
        self._free_rows = list(range(max_num_seqs, 0, -1))
        self._sequences: dict[RequestId, _Sequence] = {}
        self._waiting: list[tuple[int, _Sequence]] = []
        self._draining: set[_Sequence] = set()
        self._planned: _Step | None = None
        self._in_flight: deque[_Step] = deque()
        self._events: list[Event] = []  # of the commit under way
        self._arrivals = 0
        self._occupants = 0
        self._steps = 0
        self._preemptions = 0
        self._prefill_tokens = 0
        self._cached_tokens = 0
        self._generated_tokens = 0

    # --- requests ---

    def submit(self, request: Request) -> None:
        """Queues a request. Raises ValueError, for this request alone, when it can never be served."""
        num_prompt = len(request.prompt_ids)
        if request.id in self._sequences:
            raise ValueError(f"request id {request.id!r} is in use; give each request an id of its own")
        if self.vocab_size is not None and int(request.prompt_ids.max()) >= self.vocab_size:
            raise ValueError(
                f"token id {int(request.prompt_ids.max())} is out of range; the model's vocabulary has "
                f"{self.vocab_size} ids, from 0 to {self.vocab_size - 1}"
            )
        if num_prompt >= self.length_limit:
            raise ValueError(self._too_long(num_prompt))
        max_tokens = request.sampling.max_tokens
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens={max_tokens} must be at least 1")
        room = self.length_limit - num_prompt
        sequence = _Sequence(
            request=request,
            arrival=self._arrivals,
            limit=num_prompt + (room if max_tokens is None else min(max_tokens, room)),
            token_ids=request.prompt_ids,
            delivered=num_prompt,
        )
        self._arrivals += 1
        self._sequences[request.id] = sequence
        self._enqueue(sequence)

    def finish(self, request_id: RequestId, reason: FinishReason, error: str = "") -> Event | None:
        """Ends a request now, wherever it is; its row and blocks are free at once. None when it is not known."""
        sequence = self._sequences.get(request_id)
        return None if sequence is None else self._finish(sequence, reason, error)

    def abort(self, request_id: RequestId) -> Event | None:
        """Ends a request because nobody wants it any more. Aborting it again, or an unknown one, does nothing."""
        return self.finish(request_id, "abort")

    def fail_all(self, error: str) -> list[Event]:
        """Ends every request with an error and forgets all steps under way. Nothing computed so far is trusted."""
        self._planned = None
        self._in_flight.clear()
        events = self._take_events()  # of a commit that raised
        events += [self._finish(sequence, "error", error) for sequence in list(self._sequences.values())]
        self.pool.reset()
        return events

    def reset_prefix_cache(self) -> None:
        """Forgets every cached prefix, also of what is under way: the weights have changed."""
        self.pool.reset()

    def preempt_all(self) -> None:
        """Lets every running sequence compute all its tokens again, with the weights as they are then."""
        self._preempt_rows(np.flatnonzero(self._rows.active))

    def request_ids(self, rows: Ints) -> list[RequestId | None]:
        """The ids of the requests in these state rows now; None for a free row."""
        return [None if s is None else s.request.id for s in self._row_sequences[rows]]

    @property
    def has_work(self) -> bool:
        return bool(self._sequences or self._in_flight or self._planned)

    @property
    def num_in_flight(self) -> int:
        """Steps that are launched and not committed."""
        return len(self._in_flight)

    def stats(self) -> Stats:
        running = int(self._rows.active.sum())
        return Stats(
            running=running,
            waiting=len(self._sequences) - running,
            free_blocks=self.pool.available - self.pool.num_cached,
            cached_blocks=self.pool.num_cached,
            used_blocks=self.pool.num_used,
            steps=self._steps,
            preemptions=self._preemptions,
            prefill_tokens=self._prefill_tokens,
            cached_tokens=self._cached_tokens,
            generated_tokens=self._generated_tokens,
        )

    # --- steps ---

    def plan(self) -> Plan | None:
        """The next step, or None when nothing can run before another step is committed. `launched` or `launch_failed`
        must follow."""
        assert self._planned is None, "the last plan was neither launched nor reported as failed"
        composition = self._compose()
        num_rows = len(composition.decode_rows) + len(composition.chunk_rows)
        if not num_rows:
            return None
        self._planned = self._schedule(composition)
        return self._planned.plan

    def launched(self, plan: Plan) -> None:
        """The step is on the stream: what it computes of prompts can be hit by the plans after it."""
        step = self._take_planned(plan)
        self._in_flight.append(step)
        for row in step.prefilled.tolist():
            if self._rows.active[row]:
                self._register(row, min(self._rows.scheduled_computed[row], self._rows.committed_len[row]))

    def launch_failed(self, plan: Plan) -> None:
        """The step did not run, or not wholly: none of it is registered, and its sequences compute all again."""
        step = self._take_planned(plan)
        current = self._rows.occupant[step.rows] == step.occupants
        self._preempt_rows(step.rows[current])

    def commit(self, plan: Plan, token_ids: Ints, counts: Ints, alive: Bools | Ints) -> list[Event]:
        """Reads the outputs of the oldest launched step, in padded order. Returns what became of its requests.

        Requests that stream get an event for each token; the others one event, when they end.
        """
        step = self._in_flight.popleft()
        assert step.plan is plan, f"step {plan.step} is committed before step {step.plan.step}"
        outputs = _Outputs(token_ids[step.places], counts[step.places] > 0, alive[step.places].astype(bool))
        current = self._rows.occupant[step.rows] == step.occupants
        self._commit_preempted(step, outputs, np.flatnonzero(~current))
        self._commit_rows(step, outputs, np.flatnonzero(current & step.samples))
        if self.check:
            self.check_blocks()
        return self._take_events()

    def check_blocks(self) -> None:
        """Raises AssertionError unless every block is in exactly one place and owned by the rows that use it."""
        rows = self._rows
        owners: Counter[int] = Counter()
        for row in np.flatnonzero(rows.active).tolist():
            owners.update(rows.block_table[row, : rows.num_blocks[row]].tolist())
        self.pool.check(owners)
        assert len(self._free_rows) + int(rows.active.sum()) == self.max_num_seqs, "a state row is lost"

    # --- planning ---

    def _compose(self) -> _Composition:
        rows = self._rows
        waits = rows.needs_host & (rows.scheduled_len > rows.committed_len)
        ready = rows.active & ~waits & (rows.scheduled_len < rows.limit)
        remaining = rows.scheduled_len - rows.scheduled_computed
        decode = np.flatnonzero(ready & (remaining == 1)).astype(np.int32)
        prompts = np.flatnonzero(ready & (remaining > 1))
        short = decode[rows.scheduled_computed[decode] >= rows.num_blocks[decode] * self.block_size]
        has_preempted = len(short) > self.pool.available
        if has_preempted:
            short = self._make_room(short)
            decode, prompts = decode[rows.active[decode]], prompts[rows.active[prompts]]
        appends = self._append_blocks(short)
        left = self.max_num_batched_tokens - len(decode)
        chunks = self._chunks(prompts, left)
        left -= sum(length for _, length in chunks)
        admitted = [] if has_preempted or self._draining else self._admit(left)
        longest_first = np.argsort(-rows.scheduled_len[decode], kind="stable")  # attention ends with the short rows
        return _composition(decode[longest_first], chunks, appends, admitted)

    def _make_room(self, short: Ints) -> Ints:
        """Preempts, youngest first, until every row of `short` that is left can have one block more; returns those."""
        while len(short) > self.pool.available:
            victim = self._youngest()
            self._preempt_rows(np.array([victim]))
            short = short[short != victim]
        return short

    def _youngest(self) -> int:
        """The row to preempt: one with nothing left to compute, else the one that arrived last."""
        rows = self._rows
        is_scheduled = rows.scheduled_len >= rows.limit
        order = rows.arrival + np.where(is_scheduled, self._arrivals, 0)
        return int(np.argmax(np.where(rows.active, order, -1)))

    def _append_blocks(self, short: Ints) -> Ints:
        """One block more for each of these rows, whose next token has no slot yet."""
        rows = self._rows
        if not len(short):
            return _NO_TRIPLES
        blocks = np.array(self.pool.allocate(len(short)), np.int32)
        index = rows.num_blocks[short]
        rows.block_table[short, index] = blocks
        rows.num_blocks[short] += 1
        return np.stack([short, index, blocks], axis=1)

    def _chunks(self, prompts: npt.NDArray[np.intp], left: int) -> list[tuple[int, int]]:
        """(row, tokens) of the prompts under way, in the order of their arrival, as far as the budget goes."""
        rows = self._rows
        chunks = []
        for row in prompts[np.argsort(rows.arrival[prompts])].tolist():
            length = min(int(rows.scheduled_len[row] - rows.scheduled_computed[row]), left)
            if length:
                chunks.append((row, length))
            left -= length
        return chunks

    def _admit(self, left: int) -> list[_Admitted]:
        """Takes waiting sequences into free rows, first come first served, as far as budget and blocks go."""
        admitted: list[_Admitted] = []
        pinned: list[int] = []
        while left > 0 and self._free_rows:
            sequence = self._first_waiting()
            hit = None if sequence is None else self._fitting_hit(sequence)
            if sequence is None or hit is None:
                break
            heapq.heappop(self._waiting)
            if hit.source != TRASH:
                # A block that a later admission of this plan could get, and fill, must not be the source of a copy.
                self.pool.take([hit.source])
                pinned.append(hit.source)
            admitted.append(self._occupy(sequence, hit, left))
            left -= admitted[-1].chunk_len
        self.pool.release(pinned)
        return admitted

    def _first_waiting(self) -> _Sequence | None:
        while self._waiting and self._waiting[0][1].is_done:
            heapq.heappop(self._waiting)
        return self._waiting[0][1] if self._waiting else None

    def _fitting_hit(self, sequence: _Sequence) -> Hit | None:
        """What the prefix cache has of a sequence, if the blocks for the rest are there; None if it must wait."""
        pool = self.pool
        is_alone = not self._rows.active.any()
        if not is_alone and pool.available < sequence.required and self._steps < sequence.retry_step:
            return None
        request = sequence.request
        hit = pool.match(request.tag, sequence.token_ids, read=request.reads_cache)
        needed = num_blocks_for(len(sequence.token_ids), self.block_size)
        spare = 0 if is_alone else self._watermark()
        if hit.source != TRASH and self._blocks_taken(hit, needed) + spare <= pool.available:
            return hit
        hit = hit.without_copy(self.block_size)
        taken = self._blocks_taken(hit, needed)
        if taken + spare <= pool.available:
            return hit
        sequence.required, sequence.retry_step = taken, self._steps + _RETRY_STEPS
        return None

    def _blocks_taken(self, hit: Hit, needed: int) -> int:
        """By how many an admission with this hit lowers the number of available blocks while it is planned."""
        source = [hit.source] if hit.source != TRASH else []
        return needed - len(hit.blocks) + self.pool.num_idle([*hit.blocks, *source])

    def _watermark(self) -> int:
        """Blocks that an admission leaves to the rows that run: about what they need soon, at most a twentieth."""
        running = self.max_num_seqs - len(self._free_rows)
        return max(self.pool.num_blocks // 100, min(running, self.pool.num_blocks // 20))

    def _occupy(self, sequence: _Sequence, hit: Hit, left: int) -> _Admitted:
        """Gives a sequence a row and blocks for all its tokens, and decides how many of them it computes now."""
        known = len(sequence.token_ids)
        self.pool.take(hit.blocks)
        fresh = self.pool.allocate(num_blocks_for(known, self.block_size) - len(hit.blocks))
        blocks = np.array([*hit.blocks, *fresh], np.int32)
        row = self._free_rows.pop()
        self._fill_row(row, sequence, hit, blocks)
        if sequence.cached_tokens < 0:
            sequence.cached_tokens = hit.tokens
        self._cached_tokens += hit.tokens
        copy = None if hit.source == TRASH else (hit.source, fresh[0], hit.slots)
        index = np.arange(len(blocks), dtype=np.int32)
        appends = np.stack([np.full(len(blocks), row, np.int32), index, blocks], axis=1)
        return _Admitted(_admission(sequence, row, hit.tokens), min(known - hit.tokens, left), appends, copy)

    def _fill_row(self, row: int, sequence: _Sequence, hit: Hit, blocks: Ints) -> None:
        rows, request, known = self._rows, sequence.request, len(sequence.token_ids)
        self._occupants += 1
        self._row_sequences[row] = sequence
        sequence.row, sequence.chain = row, hit.chain
        rows.token_ids[row, :known] = sequence.token_ids
        rows.block_table[row, : len(blocks)] = blocks
        rows.active[row] = True
        rows.scheduled_len[row] = known
        rows.scheduled_computed[row] = hit.tokens
        rows.committed_len[row] = known
        rows.num_blocks[row] = len(blocks)
        rows.limit[row] = sequence.limit
        rows.min_length[row] = sequence.min_length
        rows.units[row] = hit.chain.count if self.pool.caching else _NEVER
        rows.delivered[row] = sequence.delivered
        rows.arrival[row] = sequence.arrival
        rows.occupant[row] = self._occupants
        rows.needs_host[row] = request.needs_host
        rows.narrows[row] = request.sampling.narrows
        rows.streams[row] = request.stream
        rows.host_stops[row] = bool(request.sampling.host_stop_ids)

    def _schedule(self, composition: _Composition) -> _Step:
        """Moves the rows of a step forward, as if they all lived, and makes the plan of it."""
        rows, decode, chunks = self._rows, composition.decode_rows, composition.chunk_rows
        rows.scheduled_computed[decode] += 1
        rows.scheduled_len[decode] += 1
        rows.scheduled_computed[chunks] += composition.chunk_lens
        is_complete = rows.scheduled_computed[chunks] == rows.scheduled_len[chunks]
        rows.scheduled_len[chunks] += is_complete
        samples = np.concatenate([np.ones(len(decode), bool), is_complete])
        both = np.concatenate([decode, chunks])
        plan = self._make_plan(composition, self._is_filtered(both[samples]))
        self._steps += 1
        return _Step(
            plan=plan,
            rows=both,
            places=plan.output_index,
            occupants=rows.occupant[both],
            sequences=self._row_sequences[both],
            samples=samples,
            prefilled=self._prefilled(composition),
        )

    def _prefilled(self, composition: _Composition) -> Ints:
        """The rows that compute a part of a prompt in this step, chunks and admitted decode rows; counts the tokens."""
        if not len(composition.chunk_rows) and not composition.admissions:
            return composition.chunk_rows
        singles = np.intersect1d(composition.decode_rows, composition.admitted_rows)
        self._prefill_tokens += int(composition.chunk_lens.sum()) + len(singles)
        return np.concatenate([composition.chunk_rows, singles])

    def _is_filtered(self, sampling_rows: Ints) -> bool:
        """Whether a row that samples in this step narrows its choice, or must not choose its stop ids yet."""
        rows = self._rows
        is_short = rows.min_length[sampling_rows] >= rows.scheduled_len[sampling_rows]
        return bool((rows.narrows[sampling_rows] | is_short).any())

    def _make_plan(self, composition: _Composition, filtered: bool) -> Plan:
        lens = composition.chunk_lens
        chunk_bucket = self.buckets.chunk_bucket(len(lens))
        chunk_tokens = int(lens.sum())
        decode_bucket = self.buckets.decode_bucket(len(composition.decode_rows), chunk_tokens=chunk_tokens)
        token_bucket = self.buckets.token_bucket(decode_bucket, chunk_tokens)
        return Plan(
            step=self._steps,
            decode_rows=composition.decode_rows,
            chunk_rows=composition.chunk_rows,
            chunk_lens=lens,
            decode_bucket=decode_bucket,
            chunk_bucket=chunk_bucket,
            token_bucket=token_bucket,
            span=self.buckets.span(int(lens.max(initial=0)), token_bucket - decode_bucket),
            filtered=filtered,
            appends=composition.appends,
            copies=composition.copies,
            admissions=composition.admissions,
        )

    def _take_planned(self, plan: Plan) -> _Step:
        step, self._planned = self._planned, None
        assert step is not None, "there is no plan to launch"
        assert step.plan is plan, f"plan {plan.step} is not the last one made"
        return step

    # --- giving up rows ---

    def _preempt_rows(self, rows: npt.NDArray[np.integer]) -> None:
        """Gives up rows and blocks at once. A sequence is queued again when its last launched step is committed."""
        for row in rows.tolist():
            sequence: _Sequence = self._row_sequences[row]
            sequence.token_ids = self._rows.token_ids[row, : self._rows.committed_len[row]].copy()
            sequence.delivered = int(self._rows.delivered[row])
            if self.extras_of is not None:
                sequence.request = replace(sequence.request, extras=self.extras_of(row))
            sequence.in_flight = sum(any(sequence is other for other in step.sequences) for step in self._in_flight)
            self._release_row(row)
            self._preemptions += 1
            if sequence.in_flight:
                self._draining.add(sequence)
            else:
                self._enqueue(sequence)

    def _release_row(self, row: int) -> None:
        rows = self._rows
        self.pool.release(rows.block_table[row, : rows.num_blocks[row]].tolist())
        rows.active[row] = False
        rows.occupant[row] = 0
        self._row_sequences[row].row = 0
        self._row_sequences[row] = None
        self._free_rows.append(row)

    def _enqueue(self, sequence: _Sequence) -> None:
        heapq.heappush(self._waiting, (sequence.arrival, sequence))

    def _finish(self, sequence: _Sequence, reason: FinishReason, error: str = "") -> Event:
        row, rows = sequence.row, self._rows
        if row:
            token_ids = rows.token_ids[row, rows.delivered[row] : rows.committed_len[row]].copy()
            self._release_row(row)
        else:
            token_ids = sequence.token_ids[sequence.delivered :]
        sequence.is_done = True
        self._draining.discard(sequence)
        del self._sequences[sequence.request.id]
        return Event(sequence.request.id, token_ids, reason, max(sequence.cached_tokens, 0), error)

    # --- committing ---

    def _commit_rows(self, step: _Step, outputs: _Outputs, at: npt.NDArray[np.intp]) -> None:
        """Commits the rows `at` of a step, which sampled and are occupied as they were when it was planned."""
        rows = self._rows
        counted = outputs.counted[at] & (outputs.token_ids[at] != NAN_TOKEN)
        for i in at[~counted].tolist():
            self._commit_nothing(step, outputs, i)
        at = at[counted]
        current, token_ids = step.rows[at], outputs.token_ids[at]
        lengths = rows.committed_len[current]
        rows.token_ids[current, lengths] = token_ids
        rows.committed_len[current] = lengths + 1
        self._generated_tokens += len(at)
        for row in current[lengths // self.pool.unit > rows.units[current]].tolist():
            self._register(row, rows.committed_len[row] - 1)
        is_over = ~outputs.alive[at] | (lengths + 1 >= rows.limit[current])
        for i in np.flatnonzero(rows.host_stops[current]).tolist():
            sampling = self._row_sequences[current[i]].request.sampling
            is_over[i] |= int(token_ids[i]) in sampling.host_stop_ids
        self._stream(current[rows.streams[current] & ~is_over])
        for i in np.flatnonzero(is_over).tolist():
            sequence = self._row_sequences[current[i]]
            reason = self._end_reason(sequence, int(token_ids[i]), int(lengths[i]))
            self._events.append(self._finish(sequence, reason))

    def _stream(self, streaming: Ints) -> None:
        """One event for each of these rows, with the token it has just got."""
        rows = self._rows
        new = rows.token_ids[streaming, rows.committed_len[streaming] - 1].reshape(-1, 1)
        rows.delivered[streaming] += 1
        for sequence, token_ids in zip(self._row_sequences[streaming], new):
            self._events.append(Event(sequence.request.id, token_ids, None, sequence.cached_tokens))

    def _commit_nothing(self, step: _Step, outputs: _Outputs, i: int) -> None:
        """Ends the request of a row that should have sampled and has no token."""
        sequence: _Sequence = step.sequences[i]
        if outputs.token_ids[i] != NAN_TOKEN:
            raise RuntimeError(
                f"step {step.plan.step}: state row {step.rows[i]} should have sampled, and the device did not"
            )
        if sequence.row:
            row = sequence.row
            self.pool.forget(self._rows.block_table[row, : self._rows.num_blocks[row]].tolist())
        error = "the logits held NaN: the weights or an edited function are at fault"
        self._events.append(self._finish(sequence, "error", error))

    def _commit_preempted(self, step: _Step, outputs: _Outputs, at: npt.NDArray[np.intp]) -> None:
        """Commits the entries `at` of a step whose rows were given up since: preempted sequences keep their tokens."""
        for i in at.tolist():
            sequence: _Sequence = step.sequences[i]
            if sequence in self._draining:
                sequence.in_flight -= 1
                if step.samples[i]:
                    self._commit_token(step, outputs, i)
                if not sequence.is_done and not sequence.in_flight:
                    self._draining.discard(sequence)
                    self._enqueue(sequence)

    def _commit_token(self, step: _Step, outputs: _Outputs, i: int) -> None:
        sequence: _Sequence = step.sequences[i]
        token_id, length = int(outputs.token_ids[i]), len(sequence.token_ids)
        if token_id == NAN_TOKEN or not outputs.counted[i]:
            self._commit_nothing(step, outputs, i)
            return
        sequence.token_ids = np.append(sequence.token_ids, np.int32(token_id))
        self._generated_tokens += 1
        is_over = not outputs.alive[i] or length + 1 >= sequence.limit
        if is_over or token_id in sequence.request.sampling.host_stop_ids:
            self._events.append(self._finish(sequence, self._end_reason(sequence, token_id, length)))
        elif sequence.request.stream:
            sequence.delivered += 1
            self._events.append(Event(sequence.request.id, sequence.token_ids[-1:], None, sequence.cached_tokens))

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _end_reason(self, sequence: _Sequence, token_id: int, length_before: int) -> FinishReason:
        if length_before >= sequence.min_length and sequence.request.sampling.stops_at(token_id):
            return "stop"
        if length_before + 1 >= sequence.limit:
            return "length"
        raise RuntimeError(
            f"the device ended request {sequence.request.id!r} at length {length_before + 1} of {sequence.limit} with "
            f"token {token_id}, which is none of its stop ids"
        )

    def _register(self, row: int, num_computed: int) -> None:
        """Registers what the launched steps have computed of a row in the prefix cache."""
        rows, chain = self._rows, self._row_sequences[row].chain
        self.pool.register(chain, rows.token_ids[row, :num_computed], rows.block_table[row])
        is_broken = (chain.count + 1) * self.pool.unit <= num_computed
        rows.units[row] = _NEVER if is_broken else chain.count

    # --- validation ---

    def _validate(self, table_width: int) -> None:
        if self.max_num_seqs < 1:
            raise ValueError(f"max_num_seqs={self.max_num_seqs} must be at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below max_num_seqs={self.max_num_seqs}: each "
                "running sequence needs a token in every step; raise the first or lower the second"
            )
        if self.max_model_len < 2:
            raise ValueError(f"max_model_len={self.max_model_len} must be at least 2: a prompt token and a sampled one")
        if self.buckets.decode[-1] < self.max_num_seqs:
            raise ValueError(f"the largest decode bucket, {self.buckets.decode[-1]}, is below {self.max_num_seqs=}")
        needed = num_blocks_for(self.length_limit - 1, self.block_size)
        if table_width < needed:
            raise ValueError(
                f"table_width={table_width} holds {table_width * self.block_size} tokens, a sequence may have "
                f"{self.length_limit - 1} in the cache; it must be at least {needed}"
            )
        if self.length_limit < self.max_model_len:
            logger.warning(
                "the KV pool of %d blocks of %d tokens holds no sequence of max_model_len=%d; all end at %d tokens",
                self.pool.num_blocks - 1,
                self.block_size,
                self.max_model_len,
                self.length_limit,
            )

    def _too_long(self, num_prompt: int) -> str:
        if self.length_limit < self.max_model_len:
            return (
                f"a prompt of {num_prompt} tokens does not fit the KV pool of {self.pool.num_blocks - 1} blocks of "
                f"{self.block_size} tokens with one token to sample; shorten it to {self.length_limit - 1}, or use "
                "more blocks"
            )
        return (
            f"a prompt of {num_prompt} tokens leaves no room to sample within max_model_len={self.max_model_len}; "
            f"shorten it to {self.max_model_len - 1}"
        )


class _Outputs(NamedTuple):
    """The outputs of a step, one for each row of its plan."""

    token_ids: Ints
    counted: Bools
    alive: Bools


def pool_capacity(num_blocks: int, block_size: int) -> int:
    """The longest sequence that a pool holds: every slot but those of the trash block, and the last sampled token."""
    return (num_blocks - 1) * block_size + 1


def _empty_rows(num_rows: int, capacity: int, table_width: int) -> _Rows:
    def zeros() -> Ints:
        return np.zeros(num_rows, np.int32)

    return _Rows(
        token_ids=np.zeros((num_rows, capacity), np.int32),
        block_table=np.zeros((num_rows, table_width), np.int32),
        active=np.zeros(num_rows, bool),
        scheduled_len=zeros(),
        scheduled_computed=zeros(),
        committed_len=zeros(),
        num_blocks=zeros(),
        limit=zeros(),
        min_length=zeros(),
        units=zeros(),
        delivered=zeros(),
        arrival=np.zeros(num_rows, np.int64),
        occupant=np.zeros(num_rows, np.int64),
        needs_host=np.zeros(num_rows, bool),
        narrows=np.zeros(num_rows, bool),
        streams=np.zeros(num_rows, bool),
        host_stops=np.zeros(num_rows, bool),
    )


def _composition(decode: Ints, chunks: list[tuple[int, int]], appends: Ints, admitted: list[_Admitted]) -> _Composition:
    """Sorts admitted sequences into the two groups: one that has a single token to compute is a decode row."""
    if not chunks and not admitted:
        return _Composition(decode, _NO_ROWS, _NO_ROWS, appends, _NO_TRIPLES, (), _NO_ROWS)
    is_single = [a.chunk_len == 1 and a.admission.computed + 1 == len(a.admission.token_ids) for a in admitted]
    singles = [a.admission.row for a, single in zip(admitted, is_single) if single]
    chunks = chunks + [(a.admission.row, a.chunk_len) for a, single in zip(admitted, is_single) if not single]
    table = np.array(chunks, np.int32).reshape(-1, 2)
    copies = [a.copy for a in admitted if a.copy is not None]
    return _Composition(
        decode_rows=np.concatenate([decode, np.array(singles, np.int32)]),
        chunk_rows=table[:, 0],
        chunk_lens=table[:, 1],
        appends=np.concatenate([appends, *(a.appends for a in admitted)]),
        copies=np.array(copies, np.int32).reshape(-1, 3),
        admissions=tuple(a.admission for a in admitted),
        admitted_rows=np.array([a.admission.row for a in admitted], np.int32),
    )


def _admission(sequence: _Sequence, row: int, computed: int) -> Admission:
    sampling = sequence.request.sampling
    return Admission(
        row=row,
        token_ids=sequence.token_ids,
        computed=computed,
        prompt_length=len(sequence.request.prompt_ids),
        limit=sequence.limit,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        min_length=sequence.min_length,
        stop_ids=sampling.stop_ids,
        extras=sequence.request.extras,
    )
