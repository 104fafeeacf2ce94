"""The state rows on the device against the KV oracle: both execute the same plans and must agree on every row."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from funcllm.launch.plan import Ints, PackedPlan, Plan, admission_column, unpack
from funcllm.state import Admissions, advance, apply_edits, init_state, inputs_of
from funcllm.types import SamplingState, StepInputs, StepOutputs
from tests.oracle import OracleExecutor, Outputs, Workload, drive, make_scheduler, make_workload


class WithState(OracleExecutor):
    """Executes each plan twice, on its own rows and on a SequenceState, and compares them."""

    def __init__(self, workload: Workload) -> None:
        rows, tokens = workload.max_num_seqs + 1, workload.max_num_batched_tokens
        super().__init__(rows, workload.block_size, workload.num_blocks, tokens, nan=workload.nan)
        scheduler = make_scheduler(workload)
        self._size = workload.block_size
        self.state = init_state(rows, scheduler.length_limit, scheduler.length_limit // workload.block_size + 1)

    def launch(self, words: Ints, plan: Plan, /) -> tuple[int, Outputs]:
        packed = unpack(words)
        admissions = _admissions(packed) if len(packed.part("admissions")) else ()
        appends = _part(packed, "appends")
        self.state = apply_edits(self.state, admissions, appends if len(appends) else ())
        inputs = self._inputs(packed)
        self._check_inputs_before(inputs)
        handle = super().launch(words, plan)
        token_ids, counts, alive = handle[1]
        outputs = StepOutputs(torch.from_numpy(token_ids.copy()), torch.zeros(0), torch.zeros(0))
        self.state, outputs = advance(self.state, inputs, outputs)
        assert outputs.count_l.tolist() == counts.tolist()
        assert outputs.alive_l.tolist() == alive.tolist()
        self._check_rows()
        self._check_slots(inputs)
        return handle

    def _inputs(self, packed: PackedPlan) -> StepInputs:
        chunks = (_part(packed, "chunk_rows"), _part(packed, "chunk_lens")) if packed.chunk_bucket else ((), ())
        return inputs_of(
            self.state,
            _part(packed, "decode_rows"),
            *chunks,
            num_tokens=packed.token_bucket,
            block_size=self._size,
            span=packed.span,
            filtered=packed.filtered,
        )

    def _check_inputs_before(self, inputs: StepInputs) -> None:
        """The tokens of the step are those that stand in the rows at their positions."""
        rows, positions = inputs.rows_t.tolist(), inputs.positions_t.tolist()
        stored = [int(self.state.token_ids_re[row, position]) for row, position in zip(rows, positions)]
        assert inputs.token_ids_t.tolist() == stored

    def _check_rows(self) -> None:
        state = self.state
        assert (int(state.length_r[0]), int(state.computed_r[0]), bool(state.alive_r[0])) == (0, 0, False)
        for i, row in enumerate(self.rows):
            if row is not None:
                assert state.token_ids_re[i, : int(state.length_r[i])].tolist() == row.tokens
                assert (int(state.computed_r[i]), bool(state.alive_r[i])) == (row.computed, row.alive)
                assert state.block_table_rm[i, : len(row.table)].tolist() == list(row.table.values())

    def _check_slots(self, inputs: StepInputs) -> None:
        """Each token is written to the slot of its position; padding and dead rows to the trash block."""
        positions, slots = inputs.positions_t.tolist(), inputs.slots_t.tolist()
        for i, position, slot in zip(inputs.rows_t.tolist(), positions, slots):
            row = self.rows[i]
            block = row.table[position // self._size] if i and row is not None else 0
            assert slot // self._size == block
            assert slot % self._size == position % self._size


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("seed", range(12))
def test_the_device_does_what_the_oracle_does(seed: int, depth: int) -> None:
    workload = make_workload(random.Random(seed).randint)._replace(faults={})
    _, _, executor = drive(workload, depth, WithState(workload))
    assert executor.num_attended > 0


def _part(packed: PackedPlan, name: str) -> torch.Tensor:
    return torch.from_numpy(packed.part(name).copy())


def _admissions(packed: PackedPlan) -> Admissions:
    table = packed.part("admissions")

    def ints(name: str, width: int = 1) -> Any:
        start = admission_column(name)
        return np.ascontiguousarray(table[:, start : start + width])

    def column(name: str, dtype: Any = np.int32, width: int = 1) -> torch.Tensor:
        return torch.from_numpy(ints(name, width).view(dtype)[:, 0].copy())

    return Admissions(
        rows_a=column("row"),
        length_a=column("num_tokens"),
        computed_a=column("computed"),
        prompt_length_a=column("prompt_length"),
        limit_a=column("limit"),
        sampling=SamplingState(
            temperature_r=column("temperature", np.float32),
            top_k_r=column("top_k"),
            top_p_r=column("top_p", np.float32),
            min_p_r=column("min_p", np.float32),
            seed_r=column("seed_low", np.int64, 2),
            min_length_r=column("min_length"),
            stop_ids_rs=torch.from_numpy(ints("stop_ids", 8)),
        ),
        token_ids_x=_part(packed, "token_ids"),
        extras={},
    )
