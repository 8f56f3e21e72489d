"""Turns token ids into text, piece by piece, without incomplete characters, and ends the text at a stop string."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

__all__ = ["Detokenizer", "TokenBytes"]

# A token may be a part of a character of several bytes. Decoders return this character for an incomplete character or,
# with byte fallback, for each of its bytes.
_INCOMPLETE = "\ufffd"
_MAX_INCOMPLETE = 3
# Number of tokens that are kept as context. It is larger than the number of bytes of a character, so that an incomplete
# character is never cut.
_CONTEXT = 8


class Detokenizer:
    """Turns the tokens of one answer into text.

    The text of a token can depend on the tokens before it, for example if they are parts of one character. So the last
    tokens (the window) are decoded again with each new token. The new text is what was added to the text of the window.
    The window always begins with a complete character.

    Args:
        tokenizer: a tokenizer of transformers.
        prompt_token_ids: the prompt. Its last tokens are the context of the first token. If the prompt ends with an
            incomplete character, the text of the answer begins with this character.
        stop: strings that end the text. A stop string, and the text after it, are not returned.
        begun_token_ids: the beginning of the answer, which another instance has generated. The client has the text of
            these tokens, so it is not returned, and stop strings that end in it are ignored.
        min_tokens: number of tokens after ``begun_token_ids`` in whose text stop strings are ignored, as in vLLM.
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt_token_ids: Sequence[int],
        stop: Sequence[str] = (),
        begun_token_ids: Sequence[int] = (),
        min_tokens: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._stops = [_StopSearch(text) for text in stop if text]
        self._tokens_before_stops = len(begun_token_ids) + min_tokens
        self._window = list(prompt_token_ids[-_CONTEXT:])
        num_unfinished = self._count_unfinished_tokens()
        unfinished = self._window[len(self._window) - num_unfinished :]
        del self._window[len(self._window) - num_unfinished :]
        while self._decode_tokens(self._window).startswith(_INCOMPLETE):  # the window begins within a character
            del self._window[0]
        self._context, self._num_context = "", 0  # text and number of the window's tokens that are context only
        self._given = 0  # number of characters of the window's text that were returned or held
        self._set_context()
        self._window += unfinished
        self._held = ""
        self.met_stop: str | None = None
        """The stop string that was found, or None if none was found."""
        for token_id in begun_token_ids:
            self.add_token(token_id)

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self.met_stop is not None

    def add_token(self, token_id: int) -> str:
        """Add a token, and return the new text that later tokens cannot change.

        The text of the token itself may be held back, because it is an incomplete character or may be the beginning of
        a stop string.
        """
        self._window.append(token_id)
        new = self._decode_new(final=False)
        ignores_stops = self._tokens_before_stops > 0
        if ignores_stops:
            self._tokens_before_stops -= 1
        return self._release_text(new, ignores_stops=ignores_stops)

    def flush_text(self) -> str:
        """Return the text that was held back. Call this after the last token."""
        text = self._release_text(self._decode_new(final=True)) + self._held
        self._held = ""
        return text

    def _count_unfinished_tokens(self) -> int:
        """Return the number of tokens at the end of the window that are an incomplete character."""
        if not self._decode_tokens(self._window).endswith(_INCOMPLETE):
            return 0
        written: list[int] = self._tokenizer(_INCOMPLETE, add_special_tokens=False)["input_ids"][-_MAX_INCOMPLETE:]
        if self._window[-len(written) :] == written:  # the text itself ends with the character U+FFFD
            return 0
        for count in range(1, min(_MAX_INCOMPLETE, len(self._window)) + 1):
            if not self._decode_tokens(self._window[:-count]).endswith(_INCOMPLETE):
                return count
        return 0

    def _decode_new(self, *, final: bool) -> str:
        text = self._decode_tokens(self._window)
        certain = len(text) if final else len(text) - _count_incomplete(text)
        may_complete = certain < len(text) and len(self._window) - self._num_context <= _MAX_INCOMPLETE
        if may_complete and not text.startswith(self._context):
            # With byte fallback, an incomplete character also makes the complete characters before it invalid.
            return ""
        new = text[self._given : certain]
        self._given = max(self._given, certain)
        if new and certain == len(text):
            del self._window[: self._num_context]
            self._set_context()
        elif len(self._window) > 2 * _CONTEXT:
            unfinished = len(text) - self._given
            del self._window[:-_CONTEXT]
            self._set_context()
            self._given -= unfinished
        return new

    def _set_context(self) -> None:
        """Mark all tokens of the window as context: their text was returned already, and only later tokens add text."""
        self._context = self._decode_tokens(self._window)
        self._num_context = len(self._window)
        self._given = len(self._context)

    def _decode_tokens(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def _release_text(self, new: str, *, ignores_stops: bool = False) -> str:
        """Return the held text and the new text, without an end that may be the beginning of a stop string.

        If a stop string ends in the new text, return only the text before it, unless ``ignores_stops``.
        """
        if self.stopped:
            return ""
        text = self._held + new
        ends = [(stop.text, stop.follow(new)) for stop in self._stops]
        met = [(len(self._held) + end - len(stop), stop) for stop, end in ends if end]
        if met and not ignores_stops:
            at, self.met_stop = min(met)
            self._held = ""
            return text[:at]
        released = len(text) - max((stop.begun for stop in self._stops), default=0)
        self._held = text[released:]
        return text[:released]


def _count_incomplete(text: str) -> int:
    """Return the number of characters at the end of ``text`` that may stand for an incomplete character."""
    return min(_MAX_INCOMPLETE, len(text) - len(text.rstrip(_INCOMPLETE)))


class _StopSearch:
    """Finds a stop string in a text that arrives in pieces (Knuth-Morris-Pratt).

    The time for each character does not depend on the length of the stop string, which clients choose.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.begun = 0
        """Number of characters at the end of the text that are a beginning of the stop string, but not all of it."""
        # For each beginning of the stop string that was met, by its length: the length of the longest shorter beginning
        # with which it ends.
        self._shorter = [0]

    def follow(self, new: str) -> int:
        """Return where the stop string first ends in ``new``, as a number of characters; 0: it does not end there."""
        first_end = 0
        for count, character in enumerate(new, 1):
            length = self._extend(self.begun, character)
            if length > len(self._shorter):
                self._shorter.append(self._extend(self._shorter[-1], character))
            if length == len(self.text):
                first_end = first_end or count
                length = self._shorter[-1]
            self.begun = length
        return first_end

    def _extend(self, length: int, character: str) -> int:
        """Return ``begun`` for a text whose ``begun`` was ``length`` before ``character`` was added to it."""
        while length and self.text[length] != character:
            length = self._shorter[length - 1]
        return length + (self.text[length] == character)


# Byte-level vocabularies have a letter for each byte: the same character if it is printable in Latin-1, else one from
# 256 on (see GPT-2's ``bytes_to_unicode``).
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = (byte for byte in range(256) if byte not in _PRINTABLE)
_BYTE_OF_LETTER = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + i): byte for i, byte in enumerate(_OTHERS)}
# SentencePiece's vocabularies have pieces like <0x0A> for single bytes, and U+2581 for a space.
_BYTE_PIECE = re.compile("<0x([0-9A-F]{2})>")
_SPACE = "\u2581"


class TokenBytes:
    """Returns the bytes of single tokens, for byte-level and SentencePiece tokenizers of transformers."""

    def __init__(self, tokenizer: Any) -> None:
        self._piece = tokenizer.convert_ids_to_tokens
        self._verbatim = frozenset(tokenizer.added_tokens_decoder)
        self._special = frozenset(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        self._is_byte_level = decoder is not None and b"ByteLevel" in decoder.__getstate__()

    def is_special(self, token_id: int) -> bool:
        """Return whether the token is a special one, which is not in the text."""
        return token_id in self._special

    def __call__(self, token_id: int) -> bytes:
        """Return the bytes of a token. They are empty if the vocabulary does not have the id."""
        piece: str = self._piece(token_id) or ""
        if token_id in self._verbatim:
            return piece.encode()
        if self._is_byte_level and _BYTE_OF_LETTER.keys() >= set(piece):
            return bytes(_BYTE_OF_LETTER[letter] for letter in piece)
        if single := _BYTE_PIECE.fullmatch(piece):
            return bytes.fromhex(single[1])
        return piece.replace(_SPACE, " ").encode()
