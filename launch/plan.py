"""The plan: what rank 0 decides for one step, as one flat int32 buffer that every rank applies in the same way.

Owns the format. Receives the scheduler's decisions; returns bytes that are sent to the workers before rank 0 launches.
Imports neither torch nor a model. Workers decide nothing: whatever varies between steps is in here.

Layout, in int32 words:

    header[HEADER]                    see `_HEADER_FIELDS`
    decode_rows[decode_bucket]        state rows with one query; padded with row 0
    chunk_rows[chunk_bucket]          state rows with a chunk of prompt; padded with row 0
    chunk_lens[chunk_bucket]          padded with 0
    appends[n, 3]                     (state row, index in its block table, block)
    copies[n, 3]                      (source block, destination block, number of slots), done before the step
    admissions[n, ADMISSION]          see `_ADMISSION_FIELDS`: floats as raw bits, seeds as two words
    token ids of the admissions, one after the other
    extras of the admissions, raw bytes in the order of the model's extras, each padded to a word
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]

MAX_STOP_IDS = 8

_HEADER_FIELDS = (
    "words",  # length of the whole buffer
    "step",
    "num_decode",
    "num_chunks",
    "decode_bucket",
    "chunk_bucket",
    "token_bucket",  # packed tokens of the step: decode bucket + chunk tokens, padded
    "span",  # upper bound of the longest chunk
    "filtered",  # 1: some row narrows the choice of its token
    "num_appends",
    "num_copies",
    "num_admissions",
    "num_tokens",  # of all admissions
    "extras_words",
)
HEADER = 16

_ADMISSION_FIELDS = (
    "row",
    "num_tokens",
    "computed",
    "prompt_length",
    "limit",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed_low",
    "seed_high",
    "min_length",
)
ADMISSION = len(_ADMISSION_FIELDS) + MAX_STOP_IDS


@dataclass(frozen=True, kw_only=True)
class Admission:
    """A sequence that takes a state row: its tokens so far, and everything the device must know of its request."""

    row: int
    token_ids: Ints
    computed: int  # tokens whose keys and values are already in the cache (prefix hit)
    prompt_length: int
    limit: int  # the length at which the row dies
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    min_length: int = 0
    stop_ids: tuple[int, ...] = ()  # at most MAX_STOP_IDS
    extras: bytes = b""  # this request's values in the order of the model's extras, each padded to 4 bytes


def _empty(columns: int) -> Ints:
    return np.zeros((0, columns), np.int32)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One step. Rows and lengths are unpadded here; `pack` pads them to the buckets."""

    step: int
    decode_rows: Ints
    chunk_rows: Ints = field(default_factory=lambda: np.zeros(0, np.int32))
    chunk_lens: Ints = field(default_factory=lambda: np.zeros(0, np.int32))
    decode_bucket: int
    chunk_bucket: int = 0  # 0: a pure decode step
    token_bucket: int
    span: int = 0
    filtered: bool = False
    appends: Ints = field(default_factory=lambda: _empty(3))
    copies: Ints = field(default_factory=lambda: _empty(3))
    admissions: tuple[Admission, ...] = ()

    @property
    def rows(self) -> Ints:
        """State rows in the order of StepOutputs, unpadded: decode rows, then chunk rows."""
        return np.concatenate([self.decode_rows, self.chunk_rows])

    @property
    def output_index(self) -> Ints:
        """Where each of `rows` stands in the padded outputs of the step."""
        decode = np.arange(len(self.decode_rows), dtype=np.int32)
        chunks = self.decode_bucket + np.arange(len(self.chunk_rows), dtype=np.int32)
        return np.concatenate([decode, chunks])


def pack(plan: Plan) -> Ints:
    """The plan as one flat int32 array."""
    admissions = np.zeros((len(plan.admissions), ADMISSION), np.int32)
    for fields, admission in zip(admissions, plan.admissions):
        _fill(fields, admission)
    tokens = [np.asarray(a.token_ids, np.int32) for a in plan.admissions]
    extras = np.frombuffer(b"".join(a.extras for a in plan.admissions), np.int32)
    parts = [
        _padded(plan.decode_rows, plan.decode_bucket),
        _padded(plan.chunk_rows, plan.chunk_bucket),
        _padded(plan.chunk_lens, plan.chunk_bucket),
        plan.appends.reshape(-1),
        plan.copies.reshape(-1),
        admissions.reshape(-1),
        *tokens,
        extras,
    ]
    header = np.zeros(HEADER, np.int32)
    values = {
        "words": HEADER + sum(len(part) for part in parts),
        "step": plan.step & 0x7FFFFFFF,
        "num_decode": len(plan.decode_rows),
        "num_chunks": len(plan.chunk_rows),
        "decode_bucket": plan.decode_bucket,
        "chunk_bucket": plan.chunk_bucket,
        "token_bucket": plan.token_bucket,
        "span": plan.span,
        "filtered": int(plan.filtered),
        "num_appends": len(plan.appends),
        "num_copies": len(plan.copies),
        "num_admissions": len(plan.admissions),
        "num_tokens": sum(map(len, tokens)),
        "extras_words": len(extras),
    }
    header[: len(_HEADER_FIELDS)] = [values[name] for name in _HEADER_FIELDS]
    return np.concatenate([header, *parts]).astype(np.int32, copy=False)


@dataclass(frozen=True, kw_only=True)
class PackedPlan:
    """A view of a packed plan: its header's numbers, and where each part lies in the buffer (start, stop), in words."""

    words: Ints
    step: int
    num_decode: int
    num_chunks: int
    decode_bucket: int
    chunk_bucket: int
    token_bucket: int
    span: int
    filtered: bool
    decode_rows: slice
    chunk_rows: slice
    chunk_lens: slice
    appends: slice
    copies: slice
    admissions: slice
    token_ids: slice
    extras: slice

    def part(self, name: str) -> Ints:
        """A part of the buffer by its name; tables with their columns."""
        flat = self.words[getattr(self, name)]
        columns = {"appends": 3, "copies": 3, "admissions": ADMISSION}.get(name)
        return flat if columns is None else flat.reshape(-1, columns)


def unpack(words: Ints) -> PackedPlan:
    """Reads a packed plan without copying. Raises ValueError where its length is not what its header says."""
    header = dict(zip(_HEADER_FIELDS, (int(x) for x in words[: len(_HEADER_FIELDS)])))
    if header["words"] != len(words):
        raise ValueError(f"a plan of {len(words)} words says it has {header['words']}")
    sizes = {
        "decode_rows": header["decode_bucket"],
        "chunk_rows": header["chunk_bucket"],
        "chunk_lens": header["chunk_bucket"],
        "appends": 3 * header["num_appends"],
        "copies": 3 * header["num_copies"],
        "admissions": ADMISSION * header["num_admissions"],
        "token_ids": header["num_tokens"],
        "extras": header["extras_words"],
    }
    slices: dict[str, Any] = {}
    start = HEADER
    for name, size in sizes.items():
        slices[name] = slice(start, start + size)
        start += size
    if start != len(words):
        raise ValueError(f"the parts of a plan end at word {start}, the plan at {len(words)}")
    names = ("step", "num_decode", "num_chunks", "decode_bucket", "chunk_bucket", "token_bucket", "span")
    numbers: dict[str, Any] = {name: header[name] for name in names}
    return PackedPlan(words=words, filtered=bool(header["filtered"]), **numbers, **slices)


def admission_column(name: str) -> int:
    """The column of a field in the admissions table; `stop_ids` is the first of MAX_STOP_IDS columns."""
    return len(_ADMISSION_FIELDS) if name == "stop_ids" else _ADMISSION_FIELDS.index(name)


def _fill(fields: Ints, admission: Admission) -> None:
    floats = np.array([admission.temperature, admission.top_p, admission.min_p], np.float32).view(np.int32)
    seed_low, seed_high = np.array([admission.seed], np.int64).view(np.int32)
    fields[: len(_ADMISSION_FIELDS)] = [
        admission.row,
        len(admission.token_ids),
        admission.computed,
        admission.prompt_length,
        admission.limit,
        floats[0],
        admission.top_k,
        floats[1],
        floats[2],
        seed_low,
        seed_high,
        admission.min_length,
    ]
    stop_ids = fields[len(_ADMISSION_FIELDS) :]
    stop_ids[:] = -1
    stop_ids[: len(admission.stop_ids)] = admission.stop_ids


def _padded(values: Ints, size: int) -> Ints:
    padded = np.zeros(size, np.int32)
    padded[: len(values)] = values
    return padded
