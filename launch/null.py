"""The null model: an executor that emits made-up tokens at once, to test the loop and to measure the host alone.

It keeps the state rows as the device does and has no keys and values. A token is a function of the request's seed and
its position, so the tokens of a request are the same at any batch, pool and depth.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from funcllm.launch.loop import Executor
from funcllm.launch.plan import MAX_STOP_IDS, Ints, PackedPlan, Plan, admission_column, pack, unpack
from funcllm.launch.request import Request, ResolvedSampling
from funcllm.launch.scheduler import Bools, Event, Scheduler

Numbers = npt.NDArray[np.integer]
Outputs = tuple[Ints, Ints, Bools]

_STRIDE = 7919


class NullExecutor:
    """num_rows: state rows with the trash row. Tokens are ids below vocab_size."""

    def __init__(self, num_rows: int, *, vocab_size: int = 1000) -> None:
        self.vocab_size = vocab_size
        self._length = np.zeros(num_rows, np.int32)
        self._computed = np.zeros(num_rows, np.int32)
        self._limit = np.zeros(num_rows, np.int32)
        self._min_length = np.zeros(num_rows, np.int32)
        self._seed = np.zeros(num_rows, np.int64)
        self._stop_ids = np.full((num_rows, MAX_STOP_IDS), -1, np.int32)
        self._alive = np.zeros(num_rows, bool)

    def launch(self, words: Ints, plan: Plan, /) -> Outputs:
        """Runs a plan; its handle holds the outputs already."""
        packed = unpack(words)
        self._admit(packed)
        rows = np.concatenate([packed.part("decode_rows"), packed.part("chunk_rows")])
        ones = (packed.part("decode_rows") > 0).astype(np.int32)
        lens = np.concatenate([ones, packed.part("chunk_lens")])
        return self._advance(np.where(self._alive[rows], rows, 0), lens)

    def read(self, handle: Outputs, /) -> Outputs:
        return handle

    def token(self, seed: int, position: int, stop_ids: tuple[int, ...] = (), min_length: int = 0) -> int:
        """The token of a request with this seed at this position."""
        stops = np.full((1, MAX_STOP_IDS), -1, np.int32)
        stops[0, : len(stop_ids)] = stop_ids
        tokens = self._tokens(np.array([seed]), np.array([position]), stops, np.array([min_length]))
        return int(tokens[0])

    def _admit(self, packed: PackedPlan) -> None:
        table = packed.part("admissions")
        rows = table[:, admission_column("row")]
        self._length[rows] = table[:, admission_column("num_tokens")]
        self._computed[rows] = table[:, admission_column("computed")]
        self._limit[rows] = table[:, admission_column("limit")]
        self._min_length[rows] = table[:, admission_column("min_length")]
        self._seed[rows] = table[:, admission_column("seed_low")]
        self._stop_ids[rows] = table[:, admission_column("stop_ids") :]
        self._alive[rows] = True

    def _advance(self, rows: Ints, lens: Ints) -> Outputs:
        lens = np.where(rows > 0, lens, 0)
        self._computed[rows] += lens
        lengths = self._length[rows]
        samples = (lens > 0) & (self._computed[rows] == lengths)
        stop_ids, min_lengths = self._stop_ids[rows], self._min_length[rows]
        tokens = self._tokens(self._seed[rows], lengths, stop_ids, min_lengths)
        is_stop = (tokens[:, None] == stop_ids).any(axis=1) & (lengths >= min_lengths)
        self._length[rows] = lengths + samples
        ends = samples & (is_stop | (lengths + 1 >= self._limit[rows]))
        alive = (rows > 0) & ~ends
        self._alive[rows] = alive
        return tokens, samples.astype(np.int32), alive

    def _tokens(self, seeds: Numbers, positions: Numbers, stop_ids: Ints, min_lengths: Numbers) -> Ints:
        """A token for each row; below min_length the next id that is no stop id."""
        tokens = ((seeds.astype(np.int64) + positions.astype(np.int64) * _STRIDE) % self.vocab_size).astype(np.int32)
        for _ in range(MAX_STOP_IDS):
            masked = (tokens[:, None] == stop_ids).any(axis=1) & (positions < min_lengths)
            if not masked.any():
                break
            tokens = np.where(masked, (tokens + 1) % self.vocab_size, tokens).astype(np.int32)
        return tokens


class HostTimes(NamedTuple):
    """Milliseconds that the host spends on one decode step, on average."""

    plan: float
    pack: float
    commit: float

    @property
    def total(self) -> float:
        return self.plan + self.pack + self.commit


def measure_host(rows: int, steps: int, *, depth: int = 1, prompt_length: int = 128, streams: bool = True) -> HostTimes:
    """The host's share of `steps` decode steps with `rows` sequences, at this depth, over the null model."""
    scheduler, executor = _decoding(rows, steps + depth + 2, prompt_length, streams)
    launched: list[tuple[Plan, Outputs]] = []
    spent = np.zeros(3)
    for _ in range(steps + depth):
        started = time.perf_counter()
        plan = scheduler.plan()
        assert plan is not None, "a row ended while it was measured"
        planned = time.perf_counter()
        words = pack(plan)
        packed = time.perf_counter()
        launched.append((plan, executor.launch(words, plan)))
        resumed = time.perf_counter()
        scheduler.launched(plan)
        if len(launched) > depth:
            oldest, outputs = launched.pop(0)
            scheduler.commit(oldest, *outputs)
            spent += [planned - started, packed - planned, time.perf_counter() - resumed]
    return HostTimes(*(spent / steps * 1e3).tolist())


def _decoding(rows: int, steps: int, prompt_length: int, streams: bool) -> tuple[Scheduler, NullExecutor]:
    """A scheduler in which `rows` sequences have just finished their prompts and have `steps` tokens to go."""
    block_size = 32
    length = prompt_length + steps + 1
    scheduler = Scheduler(
        num_blocks=rows * (length // block_size + 2) * 2,
        block_size=block_size,
        max_num_seqs=rows,
        max_num_batched_tokens=max(8192, rows),
        max_model_len=length,
    )
    executor = NullExecutor(rows + 1)
    for i in range(rows):
        prompt = np.arange(i, i + prompt_length, dtype=np.int32)
        sampling = ResolvedSampling(temperature=0.6, seed=i)
        scheduler.submit(Request(id=i, prompt_ids=prompt, sampling=sampling, stream=streams))
    while scheduler.stats().waiting or scheduler.stats().generated_tokens < rows:
        _step(scheduler, executor)
    return scheduler, executor


def _step(scheduler: Scheduler, executor: Executor) -> list[Event]:
    plan = scheduler.plan()
    assert plan is not None, "prompts are left and nothing can run"
    outputs = executor.read(executor.launch(pack(plan), plan))
    scheduler.launched(plan)
    return scheduler.commit(plan, *outputs)
