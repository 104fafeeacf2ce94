"""Token ids to text, piece by piece: no broken characters, stop strings cut out, nothing lost at the end.

A `TextStream` turns the ids of one sequence into text as they come. What it gives out never changes afterwards, and the
pieces joined are the same however the ids were chunked. Its cost is constant per token: it decodes a short window.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

Decode = Callable[[list[int]], str]

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MAX_PENDING = 3  # a character has at most 4 bytes, so at most 3 replacement characters may still become one
_SPLIT_WINDOW = 16  # tokens without a clean end, from which the window is shortened where it can be
_MAX_WINDOW = 256  # tokens without a clean end, at which the window is given up

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"


class TextStream:
    """The text of one sequence, from its generated ids.

    decode: a list of ids -> text, special tokens skipped or not as the request wants. stop: strings that end the text;
    it is cut before the one that is complete first, or behind it with include_stop. Stop strings that are complete
    before the token number min_tokens do not count.

    stopped: the stop string that ended the text, or None. num_tokens: how many ids belong to the text, up to the one
    that completed the stop string; ids pushed later are ignored.
    """

    def __init__(
        self, decode: Decode, stop: str | Sequence[str] = (), *, include_stop: bool = False, min_tokens: int = 0
    ) -> None:
        self.stopped: str | None = None
        self.num_tokens = 0
        self._pieces = _Pieces(decode)
        self._stop = (stop,) if isinstance(stop, str) else tuple(stop)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._held = ""  # known text that may be the head of a stop string
        self._finished = False
        if not all(self._stop):
            raise ValueError(f"stop={list(self._stop)} has an empty string, which would end every text; leave it out")

    def push(self, ids: Sequence[int]) -> str:
        """The text that is certain now and was not given out before; '' once a stop string was found."""
        out = []
        for token_id in ids:
            if self.stopped is not None or self._finished:
                break
            self.num_tokens += 1
            out.append(self._pass(self._pieces.push(int(token_id))))
        return "".join(out)

    def finish(self) -> str:
        """The rest, at the end of the sequence: what was held back, an incomplete character as U+FFFD."""
        if self.stopped is not None or self._finished:
            return ""
        self._finished = True
        text = self._pass(self._pieces.finish())
        held, self._held = self._held, ""
        return text if self.stopped is not None else text + held

    def _pass(self, piece: str) -> str:
        """What of the held text and the new piece may go out."""
        if not self._stop:
            return piece
        if self.num_tokens < self._min_tokens:
            return piece
        text = self._held + piece
        found = find_stop(text, self._stop)
        if found is not None:
            start, self.stopped = found
            self._held = ""
            return text[: start + len(self.stopped)] if self._include_stop else text[:start]
        keep = len(text) - _held_length(text, self._stop)
        self._held = text[keep:]
        return text[:keep]


def text_of(decode: Decode, ids: Sequence[int]) -> str:
    """The text of a whole sequence, equal to what a TextStream without stop strings gives for it."""
    text = decode(list(ids))
    if REPLACEMENT not in text:
        return text
    stream = TextStream(decode)
    return stream.push(ids) + stream.finish()


def find_stop(text: str, stop: Sequence[str]) -> tuple[int, str] | None:
    """Start and value of the stop string that is complete first in the text; the longest where several end there."""
    found = [(start + len(string), start, string) for string in stop if (start := text.find(string)) >= 0]
    if not found:
        return None
    _, start, string = min(found)
    return start, string


class Thought(NamedTuple):
    """A reply in two parts. closed: whether the thinking came to its end."""

    thinking: str
    answer: str
    closed: bool


def split_thinking(text: str, opened_by_template: bool = False) -> Thought:
    """Splits a reply into what stands in its think block and the answer behind it.

    Three shapes: the model writes both tags; the template wrote the opening tag, so that only the closing one is
    generated; or no closing tag, when the reply was cut while thinking. A reply without a block is all answer.
    """
    head = text.lstrip()
    if head.startswith(THINK_OPEN):
        head = head[len(THINK_OPEN) :]
    elif not opened_by_template:
        return Thought("", text, True)
    thinking, tag, answer = head.partition(THINK_CLOSE)
    return Thought(thinking.strip(), answer.lstrip("\n"), bool(tag))


def opens_thinking(prompt: str) -> bool:
    """Whether a rendered prompt ends inside a think block, so that the reply starts within it."""
    return prompt.rfind(THINK_OPEN) > prompt.rfind(THINK_CLOSE) and prompt.rstrip().endswith(THINK_OPEN)


def _held_length(text: str, stop: Sequence[str]) -> int:
    """The length of the longest tail of text that is a proper prefix of a stop string."""
    longest = min(len(text), max(map(len, stop)) - 1)
    tails = (text[len(text) - size :] for size in range(longest, 0, -1))
    return next((len(tail) for tail in tails if any(string.startswith(tail) for string in stop)), 0)


class _Pieces:
    """Ids to pieces of text that end at whole characters.

    The window ids[start:] is decoded anew for each token. It begins with the tokens of the last piece, because decoders
    look at the token before: the first word of a text loses its space. `_sent` is the window's text given out so far.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._read = 0  # tokens of the window whose text is out
        self._sent = ""

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        pending = _pending_length(text)
        certain = text[: len(text) - pending]
        piece = self._take(certain) if not pending or certain.startswith(self._sent) else ""
        if piece and not pending:
            self._slide()
        elif len(self._window) - self._read >= _SPLIT_WINDOW:
            piece += self._shorten(text, certain) if pending else self._drop_silent(text)
        return piece

    def finish(self) -> str:
        return self._take(self._decode(self._window)) if self._window else ""

    def _take(self, text: str) -> str:
        """What the window's text has more than is out. What is out stays, even if the decoder would change it now."""
        piece = text[len(self._sent) :]
        if piece:
            self._sent = text
        return piece

    def _slide(self) -> None:
        """Starts the window at the tokens of the piece that just went out."""
        del self._window[: self._read]
        self._read = len(self._window)
        self._sent = self._decode(self._window)

    def _drop_silent(self, text: str) -> str:
        """Takes tokens without text, such as skipped special ones, out of the window."""
        if text == self._sent:
            del self._window[self._read :]
        return ""

    def _shorten(self, text: str, certain: str) -> str:
        """Cuts a window that never ended at a whole character, where cutting it changes no text; returns a piece."""
        length = len(self._window)
        if length & (length - 1) == 0:
            for size in range(1, _SPLIT_WINDOW):
                head, tail = self._decode(self._window[:-size]), self._decode(self._window[-size:])
                if head + tail == text and len(head) <= len(certain):
                    del self._window[:-size]
                    self._read, self._sent = 0, certain[len(head) :]
                    return ""
        if length < _MAX_WINDOW:
            return ""
        piece = self._take(text)
        self._window, self._read, self._sent = [], 0, ""
        return piece


def _pending_length(text: str) -> int:
    """How many replacement characters at the end may still become a character."""
    return min(len(text) - len(text.rstrip(REPLACEMENT)), _MAX_PENDING)
