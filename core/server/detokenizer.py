"""Token ids to text, piece by piece. Knows nothing of requests, sockets or HTTP.

A decode step brings any number of tokens, and neither tokens nor steps respect characters or stop strings.
Both classes here take what comes and release only text that later tokens cannot change.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"
# A UTF-8 character has at most four bytes: at most three replacement characters stand for an unfinished one.
MAX_UNFINISHED = 3
CONTEXT_TOKENS = 8
# A run of invalid bytes never ends at a clean place of its own accord; past this length one is searched for.
WINDOW_TOKENS = 48


class IncrementalDetokenizer:
    """Decode a growing token sequence; the deltas, joined, are the text of the whole.

        prompt ... [ c c | t t t t ]       window = ids kept for decoding
                     ^     ^               characters before `_sent` of decode(window) are already released

    The window begins with tokens whose text is already out, because decoders of the SentencePiece kind treat
    the first token of a sequence differently (its leading space is dropped). It is moved up where the text
    ends in a whole character, so its length stays small and cost does not grow with the output.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompt_ids: Sequence[int] = (),
        hidden_ids: frozenset[int] = frozenset(),
    ) -> None:
        """Decode after `prompt_ids`; tokens of `hidden_ids` (special ones) have no text."""
        self._tokenizer = tokenizer
        self._hidden_ids = hidden_ids
        context = self._visible(prompt_ids[-CONTEXT_TOKENS:])
        text = self._decode(context)
        if not text or text.endswith(REPLACEMENT):
            # A prompt may end inside a character (token-id prompts): its bytes must not leak into the answer.
            context, text = [], ""
        self._window = context
        self._sent = len(text)
        self._boundary = len(context)  # index in the window of the newest clean place

    def push(self, token_ids: Sequence[int]) -> str:
        """Take new tokens and return the text that is now certain (often all of it, sometimes none)."""
        self._window += self._visible(token_ids)
        text = self._decode(self._window)
        # Byte fallback decodes a whole run of bytes or none of it, so all of a short run may still change.
        limit = MAX_UNFINISHED if len(self._window) > WINDOW_TOKENS else len(text)
        certain = len(text) - _count_unfinished(text, limit)
        delta = text[self._sent : certain]
        self._sent = max(self._sent, certain)
        if certain == len(text):
            self._advance()
        elif len(self._window) > WINDOW_TOKENS:
            self._cut()
        return delta

    def flush(self) -> str:
        """Return what was held back: the sequence has ended, an unfinished character stays unfinished."""
        text = self._decode(self._window)
        delta = text[self._sent :]
        self._sent = len(text)
        return delta

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False) if ids else ""

    def _visible(self, ids: Sequence[int]) -> list[int]:
        # Decoders drop hidden tokens before anything else; dropped here, they cannot make the window grow.
        return [token for token in ids if token not in self._hidden_ids]

    def _advance(self) -> None:
        """Drop what lies before the last clean place; the part since then is the new context."""
        fresh = self._window[self._boundary :]
        # Context without text (a lone space that the decoder strips) would make the next token the first one.
        if text := self._decode(fresh):
            self._window, self._sent, self._boundary = fresh, len(text), len(fresh)

    def _cut(self) -> None:
        """Shorten a window that has seen no clean end, at a border that splits no character."""
        whole = self._decode(self._window)
        newest = len(self._window) - CONTEXT_TOKENS
        for border in range(newest, newest - CONTEXT_TOKENS, -1):
            head, tail = self._decode(self._window[:border]), self._window[border:]
            # A character that straddles the border decodes to fewer replacement characters when it is whole.
            if self._sent > len(head) and head + self._decode(tail) == whole:
                self._window, self._sent, self._boundary = tail, self._sent - len(head), 0
                return


class StopChecker:
    """Find stop strings in a stream of text and hold back what might be the beginning of one.

    The stop that is *complete* first wins, so the answer does not depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Return the text that may be shown and the stop string that ended it, if one did."""
        if not self._stops or not text:
            return text, None
        text = self._held + text
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            _, start, stop = min(found)
            self._held = ""
            return text[:start], stop
        keep = self._pending(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        """Return the held-back text: nothing follows, so it was no stop string."""
        held, self._held = self._held, ""
        return held

    def _pending(self, text: str) -> int:
        """Return the length of the longest end of `text` that begins a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest


def _count_unfinished(text: str, limit: int) -> int:
    """Return how many characters at the end of `text` may still change when more bytes arrive."""
    count = 0
    while count < min(limit, len(text)) and text[-1 - count] == REPLACEMENT:
        count += 1
    return count
