"""Large bodies: the router scans them in pieces before it parses them, and refuses those with too many values."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.http import large_body
from router.http.body import encode_member, parse_inference, parse_object, splice, splice_parts
from router.http.large_body import PIECE_BYTES, SHORTENED_BYTES, BadBody, LargeBody, hide_escapes, show_escapes
from router.policies import request_features
from tests.router.conftest import MakeRouter, MakeStandIn

MEGABYTE = 1024 * 1024
TOO_FINE = {
    "strings": b'{"prompt":[' + b'"",' * 2_000_000 + b'""]}',
    "names": b'{"prompt":{' + b",".join(b'"%d":0' % number for number in range(300_000)) + b"}}",
    "arrays": b'{"prompt":[' + b"[]," * 2_000_000 + b"[]]}",
    "objects": b'{"messages":[' + b'{"a":1},' * 200_000 + b"{}]}",
    "numbers": b'{"prompt_token_ids":[' + b"7," * 2_000_000 + b"7]}",
    "nesting": b'{"prompt":' + b"[" * 2_000_000 + b"]" * 2_000_000 + b"}",
}
FINE_ENOUGH = {
    "a million token ids": b'{"prompt_token_ids":[' + b",".join(b"%d" % i for i in range(1_000_000)) + b"]}",
    "one text": b'{"prompt":"' + b"word, " * (2 * MEGABYTE) + b'"}',
    "JSON within a text": json.dumps({"prompt": json.dumps([{"a": [1, 2], "b": "\n"}] * 200_000)}).encode(),
    "a long conversation": json.dumps({"messages": [{"role": "user", "content": "hi"}] * 40_000}).encode(),
    "texts that are escapes": b'{"prompt":"' + b"\\\\" * (6 * MEGABYTE) + b'"}',
}


def scan(data: bytes) -> LargeBody:
    large = LargeBody(data)
    for _ in large.check_values():
        pass
    return large


def find_parse_error(data: bytes) -> str:
    """Return the parser's error message without its position."""
    with pytest.raises(BadBody) as refused:
        parse_inference(data, scan(data))
    return str(refused.value).partition(": line")[0]


@given(st.text('"\\\\é😀a,'))
def test_hidden_escapes_are_restored_byte_for_byte(text: str) -> None:
    data = json.dumps({"a": text}).encode()
    hidden = hide_escapes(data)
    assert len(hidden) == len(data)
    assert hidden.count(b'"') == 4
    assert show_escapes(hidden) == data


@pytest.mark.parametrize("text", ["data:image/png;base64," + "QUJD" * 60_000, 'é中😀\n"\\' * 20_000])
def test_only_a_part_of_many_long_texts_is_parsed(text: str) -> None:
    for is_ascii in (True, False):
        parts = [{"image_url": {"url": text}}] * 30
        data = json.dumps({"messages": [{"content": parts}], "request_id": "r", "n": 2}, ensure_ascii=is_ascii).encode()
        large = scan(data)
        assert len(large.shorten()) < SHORTENED_BYTES + 2 * PIECE_BYTES
        body = parse_inference(data, large)
        assert [len(message["content"]) for message in body.members["messages"]] == [30]
        added = {"request_id": b'"request_id":"ours"'}
        assert splice(body, added) == splice(parse_inference(data), added)


def test_long_blanks_are_not_parsed() -> None:
    data = b'{"n":1' + b" \n" * 4 * MEGABYTE + b',"request_id":"r"}'
    large = scan(data)
    assert len(large.shorten()) < SHORTENED_BYTES + 2 * PIECE_BYTES
    assert parse_inference(data, large).members == {"n": 1, "request_id": "r"}
    assert find_parse_error(data.replace(b",", b"2,")) == find_parse_error(b'{"n":1 2,"request_id":"r"}')


@pytest.mark.parametrize("unit", [b" ", b"\n", b'\\"', b"\\\\", b"word "])
def test_the_bytes_of_a_dropped_member_are_not_copied(unit: bytes) -> None:
    filler = unit * (8 * MEGABYTE // len(unit))
    data = b'{"n":1,"user":' + (filler + b'"x"' if unit.isspace() else b'"%s"' % filler) + b"}"
    body = parse_inference(data, scan(data))
    parts = splice_parts(body, {}, dropped=("user",))
    assert sum(len(part) for part in parts if isinstance(part, bytes)) < SHORTENED_BYTES + 2 * PIECE_BYTES
    assert len(b"".join(parts)) == len(data)
    assert json.loads(b"".join(parts)) == {"n": 1}


def test_a_body_with_too_many_bytes_outside_texts_is_refused() -> None:
    with pytest.raises(BadBody, match="outside long texts and token ids; at most 6291456 are allowed"):
        scan(b'{"numbers":[' + (b"1" * 4000 + b",") * 2000 + b"1]}")


@pytest.mark.parametrize("name", TOO_FINE)
def test_a_body_with_too_many_values_is_refused_in_one_sentence(name: str) -> None:
    with pytest.raises(BadBody, match=r"^the body has too many values to be parsed in time; at most"):
        scan(TOO_FINE[name])


@pytest.mark.parametrize("name", FINE_ENOUGH)
def test_a_large_body_with_few_enough_values_is_parsed(name: str) -> None:
    data = FINE_ENOUGH[name]
    large = scan(data)
    assert parse_inference(data, large).members.keys() == json.loads(data).keys()


@pytest.mark.parametrize("name", [*TOO_FINE, *FINE_ENOUGH])
def test_the_scan_of_a_large_body_yields_after_each_piece(name: str) -> None:
    data = (TOO_FINE | FINE_ENOUGH)[name]
    pieces = 0
    try:
        for _ in LargeBody(data).check_values():
            pieces += 1
    except BadBody:
        return
    assert pieces >= len(data) / (PIECE_BYTES + 1024)


def test_only_the_beginning_of_a_long_text_is_parsed() -> None:
    text = 'é中😀\n"\\' * (MEGABYTE // 2)
    for is_ascii in (True, False):
        data = json.dumps({"prompt": text, "n": 2}, ensure_ascii=is_ascii).encode()
        large = scan(data)
        assert len(large.shorten()) < SHORTENED_BYTES + 2 * PIECE_BYTES
        body = parse_inference(data, large)
        assert body.choices == 2
        assert text.startswith(body.members["prompt"][:MEGABYTE])
        assert splice(body, {"x": b'"x":1'}) == data[:-1] + b',"x":1}'


class SmallPieces:
    """Makes pieces a few bytes long, so that small bodies count as large."""

    def __enter__(self) -> None:
        self.patch = pytest.MonkeyPatch()
        sizes = {"PIECE_BYTES": 64, "SHORTENED_BYTES": 100, "KEPT_PIECES": 1, "FEW_VALUES": 0}
        sizes |= {"_HIDDEN_AT_ONCE": 100, "_SEARCHED_BYTES": 14, "LONG_TEXT_BYTES": 40}
        for name, size in sizes.items():
            self.patch.setattr(large_body, name, size)

    def __exit__(self, *_: object) -> None:
        self.patch.undo()


ALPHABET = ("a", " ", '"', "\\", "\n", "é", "中", "😀", "{", "[", ",", '"request_id"', ":", "\ud83d")


def make_members(seed: int) -> dict[str, Any]:
    """Make members with various texts; the same seed makes the same members."""
    chance = random.Random(seed)

    def make_text() -> str:
        letters = ALPHABET[: chance.choice([3, 8, 14])]
        return "".join(chance.choice(letters) for _ in range(chance.choice([0, 3, 300, 1000])))

    names = ("a", "b", "cache_salt", "prompt", "messages")
    members: dict[str, Any] = {}
    for _ in range(chance.randint(0, 5)):
        members[chance.choice(names)] = chance.choice(
            [make_text(), [make_text(), {"x": make_text(), "request_id": 1}], 7, list(range(chance.randint(0, 200)))]
        )
        if chance.random() < 0.3:
            members["request_id"] = chance.choice(["theirs", None])
    return members


@given(st.integers(0, 1_000_000), st.booleans(), st.sampled_from([None, 2]))
def test_splicing_a_shortened_body_gives_the_same_bytes(seed: int, is_ascii: bool, indent: int | None) -> None:
    members = make_members(seed)
    try:
        data = json.dumps(members, ensure_ascii=is_ascii, indent=indent).encode()
    except UnicodeEncodeError:
        data = json.dumps(members, indent=indent).encode()
    with SmallPieces():
        large = scan(data)
        body = parse_inference(data, large)
        added = {name: encode_member(name, "ours") for name in ("request_id", "cache_salt")}
        assert splice(body, added) == splice(parse_inference(data), added)
        assert body.members.keys() == members.keys()
        assert all(body.members[name] == value for name, value in members.items() if value and is_numbers(value))


def is_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, int) for each in value)


def test_a_million_token_ids_are_shortened_and_still_parsed() -> None:
    data = FINE_ENOUGH["a million token ids"]
    large = scan(data)
    assert len(large.shorten()) < PIECE_BYTES
    body = parse_inference(data, large)
    assert (body.members["prompt_token_ids"], body.prompt_tokens) == (list(range(1_000_000)), 1_000_000)


@pytest.mark.parametrize(
    "prompt", [b"[1,2,%s3,]", b"[1,,2,%s3]", b'["a]",%s3]', b"[1,[2,%s3]]", b"[,%s3]", b"[%s3", b'[%s{"a":[]}]']
)
def test_a_prompt_that_is_no_list_of_numbers_is_not_shortened(prompt: bytes) -> None:
    data = b'{"prompt": %s}' % (prompt % (b"1234," * 50))
    with SmallPieces():
        large = scan(data)
        assert large.shorten() == data


def test_a_large_body_arrives_with_only_its_request_id_moved(make_router: MakeRouter, stand_in: MakeStandIn) -> None:
    instance = stand_in()
    router = make_router(instance)
    data = b'{"request_id":"r1" ,"messages":[{"role":"user","content":"' + b"w\\u00e9rd " * MEGABYTE + b'"}], "n":1.0}'
    assert router.client.post("/v1/chat/completions", content=data).status_code == 200
    expected = data.replace(b'"request_id":"r1" ,', b" " * 19)[:-1] + b',"request_id":"r1"}'
    assert instance.received[0].body == expected


def test_a_body_with_too_many_values_is_answered_with_400(make_router: MakeRouter) -> None:
    client = make_router().client
    answer = client.post("/v1/completions", content=TOO_FINE["strings"])
    assert answer.status_code == 400
    assert "too many values" in answer.json()["error"]["message"]


def test_the_control_plane_has_a_lower_limit_for_bodies() -> None:
    with pytest.raises(BadBody, match="this path accepts at most 1048576"):
        parse_object(b'{"a":"' + b"x" * 9 * MEGABYTE + b'"}')


@pytest.mark.parametrize("is_chat", [True, False])
def test_the_first_chunks_of_a_long_prompt_have_the_hashes_of_a_short_one(is_chat: bool) -> None:
    def hash_chunks(text: str) -> list[int]:
        members = {"messages": [{"role": "user", "content": text}]} if is_chat else {"prompt": text}
        data = json.dumps(members).encode()
        body = parse_inference(data, scan(data))
        return list(request_features(body.members, body.prompt_tokens).chunks)

    text = "".join(f"word {number} " for number in range(800_000))
    whole, beginning = hash_chunks(text), hash_chunks(text[:6000])
    assert 8190 <= len(whole) <= 8192
    assert len(beginning) == 11
    assert whole[:11] == beginning
    assert hash_chunks("another " + text)[0] != whole[0]
