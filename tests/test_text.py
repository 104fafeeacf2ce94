from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from funcllm.launch.text import TextStream, Thought, find_stop, opens_thinking, split_thinking, text_of

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
EMOJI = "ď 客单价 🌶️ 👩‍🚀"


def decode_bytes(ids: list[int]) -> str:
    """A tokenizer whose ids are bytes; from 256 on, special tokens that are skipped."""
    return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


def decode_fallback(ids: list[int]) -> str:
    """Bytes as sentencepiece models decode them: an invalid run is one replacement character a byte."""
    return _FALLBACK.decode([f"<0x{i:02X}>" if i < 256 else "▁w" for i in ids])


_FALLBACK = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])


def pieces_of(stream: TextStream, ids: list[int], chunks: list[int]) -> list[str]:
    pieces, start = [], 0
    for size in [*chunks, len(ids)]:
        pieces.append(stream.push(ids[start : start + size]))
        start += size
    return [*pieces, stream.finish()]


texts = st.text(alphabet=st.sampled_from("ab \né世🌶️👩\u200d🚀"), max_size=30)
chunkings = st.lists(st.integers(1, 5), max_size=40)


@given(texts, chunkings)
def test_the_pieces_of_valid_text_never_hold_a_broken_character(text: str, chunks: list[int]) -> None:
    pieces = pieces_of(TextStream(decode_bytes), list(text.encode()), chunks)
    assert "".join(pieces) == text
    assert not any(REPLACEMENT in piece for piece in pieces)


@given(st.binary(max_size=80), chunkings)
def test_any_bytes_stream_to_their_full_decoding(data: bytes, chunks: list[int]) -> None:
    ids = list(data)
    assert "".join(pieces_of(TextStream(decode_bytes), ids, chunks)) == decode_bytes(ids) == text_of(decode_bytes, ids)


@given(st.lists(st.sampled_from([0x61, 0xC3, 0xA9, 0xF0, 0x9F, 0x8C, 0xB6, 0x80, 300]), max_size=40), chunkings)
def test_byte_fallback_gives_the_same_text_streamed_or_whole(ids: list[int], chunks: list[int]) -> None:
    streamed = "".join(pieces_of(TextStream(decode_fallback), ids, chunks))
    assert streamed == text_of(decode_fallback, ids)
    assert streamed.count(" w") == ids.count(300)


@given(st.binary(max_size=60), chunkings, st.lists(st.binary(min_size=1, max_size=5), max_size=3))
def test_chunks_of_the_same_ids_never_change_the_text_or_the_stop(
    data: bytes, chunks: list[int], stops: list[bytes]
) -> None:
    data = bytes(b % 4 + 97 for b in data)
    stop = [bytes(b % 4 + 97 for b in s).decode() for s in stops]
    one, many = TextStream(decode_bytes, stop), TextStream(decode_bytes, stop)
    assert "".join(pieces_of(one, list(data), [])) == "".join(pieces_of(many, list(data), chunks))
    assert (one.num_tokens, one.stopped) == (many.num_tokens, many.stopped)


@given(texts, st.lists(st.text(alphabet="ab 世", min_size=1, max_size=4), min_size=1, max_size=3), st.booleans())
def test_stop_strings_cut_where_the_whole_text_says(text: str, stop: list[str], include_stop: bool) -> None:
    ids = list(text.encode())
    stream = TextStream(decode_bytes, stop, include_stop=include_stop)
    streamed = "".join(stream.push([i]) for i in ids) + stream.finish()
    found = find_stop(text, stop)
    if found is None:
        assert (streamed, stream.stopped, stream.num_tokens) == (text, None, len(ids))
    else:
        start, string = found
        end = start + len(string)
        assert streamed == text[: end if include_stop else start]
        assert stream.num_tokens == len(text[:end].encode())


def test_what_goes_out_is_all_but_a_possible_stop_head() -> None:
    stream = TextStream(decode_bytes, "own fox")
    out = [stream.push([i]) for i in b"a brown"]
    assert out == ["a", " ", "b", "r", "", "", ""]
    assert stream.push(b" cat") == "own cat"
    assert stream.push(b" brown f") == " br"
    assert stream.push(b"ox jumps") == ""
    assert (stream.stopped, stream.num_tokens) == ("own fox", len(b"a brown cat brown fox"))
    assert (stream.push(b"more"), stream.finish()) == ("", "")


def test_a_stop_right_behind_the_last_character_keeps_that_character() -> None:
    stream = TextStream(decode_bytes, ["\n"])
    assert stream.push(b"why?") + stream.push(b"\nbecause") + stream.finish() == "why?"


def test_a_held_tail_comes_out_when_the_text_ends_without_the_stop() -> None:
    stream = TextStream(decode_bytes, ["<end>"])
    assert stream.push(b"x <en") == "x "
    assert stream.finish() == "<en"
    assert stream.finish() == ""


def test_emoji_of_one_token_a_byte_come_out_whole() -> None:
    stream = TextStream(decode_bytes)
    pieces = [stream.push([i]) for i in EMOJI.encode()]
    assert "".join(pieces) == EMOJI
    assert [piece for piece in pieces if piece] == list(EMOJI)
    assert stream.finish() == ""


def test_an_incomplete_character_before_plain_text_repeats_nothing() -> None:
    ids = list("A 世".encode()) + [0xE5, 0xAE] + list(b"ab")
    stream = TextStream(decode_bytes)
    pieces = [stream.push([i]) for i in ids]
    assert pieces == ["A", " ", "", "", "世", "", "", REPLACEMENT + "a", "b"]


def test_an_end_inside_a_character_loses_nothing_before_it() -> None:
    ids = list("ab🌶".encode())[:-1]
    stream = TextStream(decode_bytes)
    assert stream.push(ids) == "ab"
    assert stream.finish() == REPLACEMENT


@pytest.mark.parametrize("run", [b"\x80" * 5000, b"\xf0\x9f" * 2500, b"\xe4" * 5000], ids=["tails", "heads", "lone"])
def test_long_invalid_runs_decode_short_windows(run: bytes) -> None:
    longest = 0

    def decode(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decode_bytes(ids)

    stream = TextStream(decode)
    text = "".join(stream.push([i]) for i in run) + stream.push("é".encode()) + stream.finish()
    assert text == decode_bytes(list(run)) + "é"
    assert longest <= 64


def test_tokens_without_text_do_not_lengthen_the_window() -> None:
    longest = 0

    def decode(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decode_bytes(ids)

    stream = TextStream(decode)
    assert "".join(stream.push([i]) for i in [*b"ab", *[300] * 2000, *"ç".encode()]) == "abç"
    assert longest <= 64


def test_the_first_words_space_is_lost_once_only() -> None:
    vocab = {"▁Once": 0, "▁upon": 1, "▁": 2, "a": 3}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.decoder = decoders.Metaspace()
    ids = [0, 1, 2, 3, 1, 2, 2, 3]
    stream = TextStream(tokenizer.decode)
    assert "".join(stream.push([i]) for i in ids) == tokenizer.decode(ids) == "Once upon a upon  a"


def test_the_stop_that_is_complete_first_wins_and_the_longest_of_those() -> None:
    assert find_stop("abcd", ["abcd", "bc"]) == (1, "bc")
    assert find_stop("abcd", ["bc", "abc"]) == (0, "abc")
    assert find_stop("abcd", ["x"]) is None


def test_stop_strings_do_not_count_before_min_tokens() -> None:
    stream = TextStream(decode_bytes, "b", min_tokens=4)
    assert stream.push(b"abab") == "aba"
    assert (stream.stopped, stream.num_tokens) == ("b", 4)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty string"):
        TextStream(decode_bytes, ["a", ""])


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("<think>\nhm\n</think>\n\nyes", False, Thought("hm", "yes", True)),
        ("<think>\nhm\n</think>\n\nyes", True, Thought("hm", "yes", True)),
        ("hm\n</think>\n\nyes", True, Thought("hm", "yes", True)),
        ("hm, and", True, Thought("hm, and", "", False)),
        ("<think>hm, and", False, Thought("hm, and", "", False)),
        ("yes", False, Thought("", "yes", True)),
        ("write </think> to end", False, Thought("", "write </think> to end", True)),
        ("", True, Thought("", "", False)),
    ],
)
def test_thinking_is_split_in_all_shapes(text: str, opened: bool, expected: Thought) -> None:
    assert split_thinking(text, opened) == expected


@pytest.mark.parametrize(
    ("prompt", "opened"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>assistant\n", False),
        ("what does <think> mean?<|im_start|>assistant\n", False),
    ],
)
def test_a_prompt_tells_whether_the_reply_starts_in_a_think_block(prompt: str, opened: bool) -> None:
    assert opens_thinking(prompt) is opened


@settings(max_examples=30)
@given(st.lists(st.sampled_from(["世", "é", "a", " ", "🚀"]), min_size=1, max_size=40), st.integers(2, 3))
def test_tokens_that_end_inside_characters_still_stream(parts: list[str], size: int) -> None:
    data = "".join(parts).encode()
    tokens = [data[i : i + size] for i in range(0, len(data), size)]

    def decode(ids: list[int]) -> str:
        return b"".join(tokens[i] for i in ids).decode("utf-8", errors="replace")

    stream = TextStream(decode)
    pieces = [stream.push([i]) for i in range(len(tokens))] + [stream.finish()]
    assert "".join(pieces) == "".join(parts)
    assert not any(REPLACEMENT in piece for piece in pieces)
