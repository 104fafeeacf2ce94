"""The plan format: what goes in comes out, on every rank, without copying."""

from __future__ import annotations

import numpy as np
import pytest

from funcllm.launch.plan import (
    ADMISSION,
    HEADER,
    MAX_STOP_IDS,
    Admission,
    PackedPlan,
    Plan,
    admission_column,
    pack,
    unpack,
)


def _ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def _admission(row: int, tokens: tuple[int, ...], **fields: object) -> Admission:
    return Admission(row=row, token_ids=_ints(*tokens), computed=1, prompt_length=2, limit=9, **fields)  # type: ignore[arg-type]


def _column(packed: PackedPlan, name: str) -> list[int]:
    return packed.part("admissions")[:, admission_column(name)].tolist()


def _mixed() -> Plan:
    return Plan(
        step=7,
        decode_rows=_ints(3, 1),
        chunk_rows=_ints(2, 4, 5),
        chunk_lens=_ints(10, 4, 1),
        decode_bucket=4,
        chunk_bucket=4,
        token_bucket=32,
        span=16,
        filtered=True,
        appends=np.array([[2, 0, 9], [2, 1, 8]], np.int32),
        copies=np.array([[5, 6, 3]], np.int32),
        admissions=(
            _admission(2, (11, 12, 13), extras=b"abcd"),
            _admission(
                4, (14,), temperature=0.5, top_k=3, top_p=0.25, min_p=0.125, seed=-5, min_length=6, extras=b"efgh"
            ),
        ),
    )


def test_a_plan_comes_out_as_it_went_in() -> None:
    plan = _mixed()
    packed = unpack(pack(plan))
    names = ("step", "decode_bucket", "chunk_bucket", "token_bucket", "span", "filtered")
    assert [getattr(packed, name) for name in names] == [getattr(plan, name) for name in names]
    assert (packed.num_decode, packed.num_chunks) == (2, 3)
    assert packed.part("decode_rows").tolist() == [3, 1, 0, 0]
    assert packed.part("chunk_rows").tolist() == [2, 4, 5, 0]
    assert packed.part("chunk_lens").tolist() == [10, 4, 1, 0]
    assert packed.part("appends").tolist() == [[2, 0, 9], [2, 1, 8]]
    assert packed.part("copies").tolist() == [[5, 6, 3]]
    assert packed.part("token_ids").tolist() == [11, 12, 13, 14]
    assert packed.part("extras").tobytes() == b"abcdefgh"


def test_admissions_keep_every_field() -> None:
    packed = unpack(pack(_mixed()))
    expected = {
        "row": [2, 4],
        "num_tokens": [3, 1],
        "computed": [1, 1],
        "prompt_length": [2, 2],
        "limit": [9, 9],
        "top_k": [0, 3],
        "min_length": [0, 6],
    }
    assert {name: _column(packed, name) for name in expected} == expected
    floats = {"temperature": [0.0, 0.5], "top_p": [1.0, 0.25], "min_p": [0.0, 0.125]}
    for name, values in floats.items():
        assert _ints(*_column(packed, name)).view(np.float32).tolist() == values


@pytest.mark.parametrize("seed", [0, 1, -1, 2**31, 2**32 + 5, 2**63 - 1, -(2**63)])
def test_seeds_keep_their_64_bits(seed: int) -> None:
    packed = unpack(
        pack(
            Plan(
                step=0,
                decode_rows=_ints(),
                decode_bucket=2,
                token_bucket=2,
                admissions=(_admission(1, (1,), seed=seed),),
            )
        )
    )
    words = packed.part("admissions")[0, admission_column("seed_low") : admission_column("seed_high") + 1]
    assert words.copy().view(np.int64).tolist() == [seed]


@pytest.mark.parametrize("count", [0, 1, MAX_STOP_IDS])
def test_absent_stop_ids_are_minus_one(count: int) -> None:
    admission = _admission(1, (1,), stop_ids=tuple(range(count)))
    packed = unpack(pack(Plan(step=0, decode_rows=_ints(), decode_bucket=2, token_bucket=2, admissions=(admission,))))
    stop_ids = packed.part("admissions")[0, admission_column("stop_ids") :]
    assert stop_ids.tolist() == [*range(count), *[-1] * (MAX_STOP_IDS - count)]


def test_the_smallest_plan_is_its_header_and_its_rows() -> None:
    words = pack(Plan(step=0, decode_rows=_ints(5), decode_bucket=2, token_bucket=2))
    assert (words.dtype, len(words)) == (np.int32, HEADER + 2)
    packed = unpack(words)
    assert packed.part("decode_rows").tolist() == [5, 0]
    assert packed.part("admissions").shape == (0, ADMISSION)
    assert packed.part("appends").shape == (0, 3)


def test_parts_are_views_of_the_buffer() -> None:
    packed = unpack(pack(_mixed()))
    assert all(np.shares_memory(packed.part(name), packed.words) for name in ("decode_rows", "appends", "token_ids"))


def test_rows_stand_in_the_padded_outputs_at_their_index() -> None:
    plan = _mixed()
    padded = np.concatenate([unpack(pack(plan)).part("decode_rows"), unpack(pack(plan)).part("chunk_rows")])
    assert plan.rows.tolist() == [3, 1, 2, 4, 5]
    assert plan.output_index.tolist() == [0, 1, 4, 5, 6]
    assert padded[plan.output_index].tolist() == plan.rows.tolist()


def test_step_numbers_wrap_and_stay_positive() -> None:
    assert unpack(pack(Plan(step=2**31 + 3, decode_rows=_ints(), decode_bucket=2, token_bucket=2))).step == 3


@pytest.mark.parametrize("cut", [1, 10])
def test_a_plan_cut_short_is_refused(cut: int) -> None:
    words = pack(_mixed())
    with pytest.raises(ValueError, match=f"a plan of {len(words) - cut} words says it has {len(words)}"):
        unpack(words[:-cut])


def test_a_header_that_does_not_add_up_is_refused() -> None:
    words = pack(_mixed())
    words[9] += 1
    with pytest.raises(ValueError, match="the parts of a plan end at word"):
        unpack(words)
