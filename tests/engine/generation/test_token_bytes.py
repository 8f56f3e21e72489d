"""Bytes of tokens: joined, they are the bytes of the text, even if tokens divide a character."""

from __future__ import annotations

from typing import Any

import pytest

from engine.generation.detokenizer import TokenBytes
from tests.engine.checkpoints import byte_fallback_tokenizer

TEXT = "the river \u20ac of Zo\u00eb\n\x00\x7f\U0001f600"


@pytest.fixture(params=["byte level", "byte fallback"])
def tokenizer(request: pytest.FixtureRequest, word_tokenizer: Any) -> Any:
    return word_tokenizer if request.param == "byte level" else byte_fallback_tokenizer()


def test_the_bytes_of_the_tokens_of_a_text_are_the_bytes_of_the_text(tokenizer: Any) -> None:
    tokens = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    assert len(tokens) > len(TEXT.split())
    # Tokenizers of SentencePiece add a space before a text.
    assert b"".join(map(TokenBytes(tokenizer), tokens)).removeprefix(b" ") == TEXT.encode()


def test_the_bytes_of_a_special_token_are_its_name(tokenizer: Any) -> None:
    token_bytes = TokenBytes(tokenizer)
    for token_id, token in tokenizer.added_tokens_decoder.items():
        assert token_bytes(token_id) == str(token).encode()


def test_an_id_outside_the_vocabulary_has_no_bytes(tokenizer: Any) -> None:
    assert TokenBytes(tokenizer)(len(tokenizer) + 5) == b""
