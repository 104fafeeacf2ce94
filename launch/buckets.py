"""The shapes a step may have: every plan is padded up to one of them, so that graphs and compiled code are reused.

Owns the sizes only. `Buckets` is a static fact of an engine; the scheduler pads with it and the device side captures
one graph for each decode bucket.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

MIN_ROWS = 2  # of a group in a mixed step: the compiler takes a size of 1 for a constant
TOKEN_STEP = 16
MIN_SPAN = 16

_DECODE_STEPS = ((64, 8), (256, 16))  # (up to, step)
_TOKEN_STEPS = ((1024, TOKEN_STEP), (8192, 64))
_STEPS_AN_OCTAVE = 8  # of the tokens of a mixed step that may be captured
_FEWEST_COARSE_ROWS = 64
_COARSE_DECODE_STEP = 32
_COARSE_TOKEN_STEP = 256


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """decode: the numbers of decode rows a step may have, ascending; the last is the largest batch.

    captured_tokens: mixed steps with up to so many tokens of prompts may be captured, so their sizes are coarser, to
    come again.
    """

    decode: tuple[int, ...]
    captured_tokens: int = 0

    def decode_bucket(self, num_decode: int, *, chunk_tokens: int = 0) -> int:
        """The rows of the decode group, which stands beside so many tokens of prompts.

        A mixed step always has at least MIN_ROWS, filled with the trash row. Where it may be captured, it has a size of
        four to the n, if that pads the step by a sixteenth at most, or else two sizes an octave.
        """
        if num_decode > self.decode[-1]:
            raise ValueError(f"{num_decode} decode rows do not fit the largest bucket, {self.decode[-1]}")
        bucket = self.decode[bisect_left(self.decode, num_decode)]
        if not chunk_tokens:
            return bucket
        if num_decode > 1 and chunk_tokens <= self.captured_tokens:
            bucket = min(_coarse_rows(num_decode, chunk_tokens), self.decode[-1])
        return max(bucket, MIN_ROWS)

    def chunk_bucket(self, num_chunks: int) -> int:
        """The rows of the chunk group: 0 in a pure decode step, else two times a power of two, or of four where steps
        may be captured.
        """
        if not num_chunks:
            return 0
        bucket = _power_of_two(num_chunks, MIN_ROWS)
        is_between = self.captured_tokens > 0 and bucket.bit_length() % 2 == 1
        return 2 * bucket if is_between else bucket

    def token_bucket(self, decode_bucket: int, chunk_tokens: int) -> int:
        """The packed tokens of a step: the decode bucket itself, or a multiple of TOKEN_STEP in a mixed step.

        The steps grow with the size, so that the padding of a long step stays within a few percent. Where the step may
        be captured, it is the prompts' part alone that has such a size: a full chunk is not padded.
        """
        if not chunk_tokens:
            return decode_bucket
        if chunk_tokens <= self.captured_tokens:
            return decode_bucket + captured_size(chunk_tokens)
        tokens = decode_bucket + chunk_tokens
        step = next((step for up_to, step in _TOKEN_STEPS if tokens <= up_to), _COARSE_TOKEN_STEP)
        return -(-tokens // step) * step

    def span(self, longest_chunk: int, chunk_tokens: int) -> int:
        """An upper bound of the longest chunk, with so many tokens of prompts and of padding: a power of two, the same
        for all steps of a captured size; 0 without.
        """
        if not longest_chunk:
            return 0
        return _power_of_two(chunk_tokens if chunk_tokens <= self.captured_tokens else longest_chunk, MIN_SPAN)

    def largest_tokens(self, max_num_batched_tokens: int) -> int:
        """The largest token bucket that a step within this budget can have: what memory must be sized for."""
        shares = ((n, max_num_batched_tokens - n) for n in range(min(self.decode[-1] + 1, max_num_batched_tokens)))
        mixed = (self.token_bucket(self.decode_bucket(n, chunk_tokens=left), left) for n, left in shares)
        return max(self.decode[-1], *mixed)


def captured_size(tokens: int) -> int:
    """The next size of the prompts in a step that may be captured: eight an octave, multiples of TOKEN_STEP."""
    octave = 1 << (tokens - 1).bit_length()
    step = max(TOKEN_STEP, octave // (2 * _STEPS_AN_OCTAVE))
    return -(-tokens // step) * step


def make_buckets(max_num_seqs: int, *, captured_tokens: int = 0) -> Buckets:
    """Decode buckets that reach exactly `max_num_seqs`."""
    if max_num_seqs < 1:
        raise ValueError(f"max_num_seqs={max_num_seqs} must be at least 1")
    sizes = [1, 2, 4, 8]
    while sizes[-1] < max_num_seqs:
        step = next((step for up_to, step in _DECODE_STEPS if sizes[-1] < up_to), _COARSE_DECODE_STEP)
        sizes.append(sizes[-1] + step)
    decode = (*(size for size in sizes if size < max_num_seqs), max_num_seqs)
    return Buckets(decode=decode, captured_tokens=captured_size(captured_tokens) if captured_tokens else 0)


def _coarse_rows(num_decode: int, chunk_tokens: int) -> int:
    octave = 1 << (num_decode - 1).bit_length()
    coarse = octave if octave.bit_length() % 2 == 1 else 2 * octave
    coarse = max(coarse, _FEWEST_COARSE_ROWS)
    if coarse - num_decode <= (num_decode + chunk_tokens) // 16:
        return coarse
    return octave if octave <= 8 or 4 * num_decode > 3 * octave else 3 * octave // 4


def _power_of_two(value: int, smallest: int) -> int:
    return max(smallest, 1 << (value - 1).bit_length())
