"""HOST:PORT in flags."""

from __future__ import annotations

import pytest

from kvcommon.addresses import find_own_address, parse_address


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("a:1", "http://a:1"),
        ("https://a.b-c:65535/", "https://a.b-c:65535"),
        ("[::1]:80", "http://[::1]:80"),
    ],
)
def test_an_address_becomes_a_url(text: str, url: str) -> None:
    assert parse_address(text).url == url


@pytest.mark.parametrize("text", ["a", "a:0", "a:65536", "ftp://a:1", "a:1/path", "a b:1", "::1:80", "a:1\n"])
def test_any_other_text_is_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(ValueError, match="is not host:port"):
        parse_address(text)


def test_the_own_address_towards_loopback_is_loopback() -> None:
    assert find_own_address("http://127.0.0.1:9") == "127.0.0.1"
