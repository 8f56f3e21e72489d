"""Token id -> its bytes. Unlike text, bytes also exist for tokens that hold a part of a character."""

from __future__ import annotations

import re
from typing import Any

__all__ = ["TokenBytes"]

# Byte-level vocabularies write each byte as a letter: itself if it is printable in Latin-1, else one from 256 on
# (GPT-2's `bytes_to_unicode`).
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = (byte for byte in range(256) if byte not in _PRINTABLE)
_BYTE_OF_LETTER = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + i): byte for i, byte in enumerate(_OTHERS)}
# SentencePiece's vocabularies have pieces for single bytes, and this character for a space.
_BYTE_PIECE = re.compile("<0x([0-9A-F]{2})>")
_SPACE = "\u2581"


class TokenBytes:
    """Reads the bytes of tokens from a byte-level or SentencePiece vocabulary.

    Args:
        tokenizer: a transformers tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._piece = tokenizer.convert_ids_to_tokens
        self._verbatim = frozenset(tokenizer.added_tokens_decoder)
        self._special = frozenset(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        self._is_byte_level = decoder is not None and b"ByteLevel" in decoder.__getstate__()

    def is_special(self, token_id: int) -> bool:
        """Whether the token never appears in a text."""
        return token_id in self._special

    def __call__(self, token_id: int) -> bytes:
        """Return the token's bytes; empty for an id that the model has but its vocabulary lacks."""
        piece: str = self._piece(token_id) or ""
        if token_id in self._verbatim:
            return piece.encode()
        if self._is_byte_level and _BYTE_OF_LETTER.keys() >= set(piece):
            return bytes(_BYTE_OF_LETTER[letter] for letter in piece)
        if single := _BYTE_PIECE.fullmatch(piece):
            return bytes.fromhex(single[1])
        return piece.replace(_SPACE, " ").encode()
