"""The body of a request: the router parses it once and extends it without changing a byte of the client."""

from __future__ import annotations

import json
import tracemalloc
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.http.body import (
    _members,
    _members_of_long,
    encode_member,
    estimate_tokens,
    find_model,
    parse_inference,
    parse_object,
    rename_model,
    splice,
    whole_number,
)
from router.http.large_body import BadBody
from tests.router.instructions import count_instructions

ADDED = {"request_id": "r-1", "disaggregate_info": {"prefill_ip": "10.0.0.1", "decode_rdma_ports": ["7100"]}}
ENCODED = {name: encode_member(name, value) for name, value in ADDED.items()}

_json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
_names = st.text() | st.sampled_from(["request_id", "disaggregate_info", "messages", 'a"b', "a\\", "{", "}", ","])
_space = st.sampled_from(["", " ", "\n", "\t ", "\r\n"])


@st.composite
def _draw_object(draw: st.DrawFn) -> tuple[bytes, list[tuple[str, str]]]:
    """Draw the bytes of an object that a client might write, and the text of each member; names may repeat."""
    members = []
    for name in draw(st.lists(_names, max_size=6)):
        value = draw(_json_values if name != "request_id" else st.text("abc-é"))
        ascii_only = draw(st.booleans())
        member = f"{json.dumps(name, ensure_ascii=ascii_only)}{draw(_space)}:{draw(_space)}"
        member += json.dumps(value, ensure_ascii=ascii_only, indent=draw(st.sampled_from([None, 2])))
        members.append((name, member))
    separator = f"{draw(_space)},{draw(_space)}"
    text = draw(_space) + "{" + draw(_space) + separator.join(w for _, w in members) + draw(_space) + "}" + draw(_space)
    return text.encode("utf-8", "surrogatepass"), members


@given(_draw_object())
def test_splicing_sets_the_added_members_once_and_does_not_move_a_byte_of_the_others(
    data_and_members: tuple[bytes, list[tuple[str, str]]],
) -> None:
    data, members = data_and_members
    spliced = splice(parse_inference(data), ENCODED)
    pairs = json.loads(spliced.decode("utf-8", "surrogatepass"), object_pairs_hook=list)
    assert [[name for name, _ in pairs].count(name) for name in ADDED] == [1, 1]
    assert json.loads(spliced.decode("utf-8", "surrogatepass")) == {
        **json.loads(data.decode("utf-8", "surrogatepass")),
        **ADDED,
    }
    position = 0
    for name, text in members:
        if name not in ADDED:
            position = spliced.index(text.encode("utf-8", "surrogatepass"), position)
    end = data.rindex(b"}")
    for ours, theirs in zip(spliced[:end], data[:end], strict=True):
        assert ours == theirs or (ours == 0x20 and theirs not in b"\r\n")
    assert list(_members_of_long(data)) == list(_members(data))


@given(st.lists(st.sampled_from([b"\\\\", rb"\"", rb"\n", rb"\u005c", b"{", b"]", b",", b"a", "é".encode()])))
def test_splicing_reads_escapes_as_json_does(characters: list[bytes]) -> None:
    text = b'"%s"' % b"".join(characters)
    spliced = splice(parse_inference(b'{"x":%s, %s: [%s], "request_id": "theirs"}' % (text, text, text)), ENCODED)
    assert spliced.startswith(b'{"x":%s, %s: [%s] ' % (text, text, text))
    assert json.loads(spliced) == {"x": json.loads(text), json.loads(text): [json.loads(text)], **ADDED}


@pytest.mark.parametrize("escape", [rb"\n", rb"\"", rb"\\"])
def test_escapes_cost_no_memory_beyond_copies_of_the_body(escape: bytes) -> None:
    body = parse_inference(b'{"request_id": "theirs", "prompt": "%s"}' % (escape * 500_000))
    tracemalloc.start()
    try:
        splice(body, ENCODED)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 5 * len(body.data)


@pytest.mark.parametrize(
    "value",
    [
        "1.0",
        "1e2",
        "-0",
        "123456789012345678901234567890",
        "0.1000",
        r'"\u00e9\/"',
        '"é"',
        "[ 1 , 2 ]",
        "NaN",
        r'"\ud83d"',
    ],
)
def test_unusual_notations_of_a_value_are_not_changed(value: str) -> None:
    data = f'{{"odd": {value}}}'.encode()
    assert splice(parse_inference(data), ENCODED).startswith(f'{{"odd": {value},'.encode())


def test_a_name_with_escapes_is_the_same_name() -> None:
    data = rb'{"request\u005fid": "theirs", "a": 1.0}'
    spliced = splice(parse_inference(data), {"request_id": encode_member("request_id", "ours")})
    assert spliced.replace(b" ", b"") == b'{"a":1.0,"request_id":"ours"}'


def test_an_empty_object_is_extended() -> None:
    assert json.loads(splice(parse_inference(b" { } "), ENCODED)) == ADDED


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b'{"a": 1,}', "not valid JSON"),
        (b"\xff\xfe{\x00}\x00", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[1]", "a JSON array"),
        (b'"text"', "a JSON string"),
        (b"1", "a JSON number"),
        (b"true", "a JSON boolean"),
        (b"null", "a JSON null"),
    ],
)
def test_a_body_that_is_no_object_is_refused_in_one_sentence(data: bytes, message: str) -> None:
    with pytest.raises(BadBody, match=message):
        parse_object(data)


@pytest.mark.parametrize(
    ("data", "where"),
    [
        (b'{"a": 1,}', "line 1 column"),
        (b'{\n"a": 1\n"b": 2}', r"line 3 column 1 \(char 9\)"),
        (b'{"a": NaN, "b": }', r"line 1 column 17 \(char 16\)"),  # NaN is allowed
        ('{"ä": }'.encode(), r"line 1 column 7 \(char 6\)"),
        (b'{"a":\n "\xff"}', r"it is not UTF-8: line 2 byte 3 \(byte 8\) is 0xff"),
        (b"", "line 1 column 1"),
        (b'{"a":' + b"[" * 100_000, "line 1 column"),
    ],
)
def test_a_syntax_error_is_reported_with_its_position(data: bytes, where: str) -> None:
    with pytest.raises(BadBody, match=where):
        parse_object(data)


@pytest.mark.parametrize("value", [b"5", rb'"a\nb"', rb'"\ud800"', b"[]"])
def test_a_request_id_that_is_no_printable_string_is_refused(value: bytes) -> None:
    with pytest.raises(BadBody, match="it must be a string of printable characters") as refused:
        parse_inference(b'{"request_id": %s}' % value)
    assert refused.value.param == "request_id"


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (10, 10),
        (10.0, 10),
        ("10", 10),
        ("10.0", 10),
        (10.5, None),
        ("ten", None),
        ("", None),
        (float("inf"), None),
        ("1" * 5000, None),
        (1e30, None),
        (None, None),
        ([10], None),
    ],
)
def test_a_whole_number_is_parsed_like_in_engines(value: Any, number: int | None) -> None:
    assert whole_number(value) == number


@pytest.mark.parametrize("n", [b"2", b"2.0", b'"2"'])
def test_choices_are_counted_in_every_notation_of_their_number(n: bytes) -> None:
    assert parse_inference(b'{"n": %s}' % n).choices == 2


def test_the_number_of_choices_has_an_upper_limit() -> None:
    assert parse_inference(b'{"n": 1000000000000}').choices < 10_000


@pytest.mark.parametrize("data", [b'{"request_id": null}', b'{"request_id": ""}', b"{}"])
def test_an_empty_request_id_counts_as_none(data: bytes) -> None:
    assert parse_inference(data).request_id is None


@pytest.mark.parametrize("name", [b"prompt", b"prompt_token_ids"])
@pytest.mark.parametrize(("prompts", "count"), [(b"[[1, 2], [3]]", 2), (b"[[1, 2]]", 1), (b"[1, 2]", 1)])
def test_choices_count_the_prompts_of_a_list(name: bytes, prompts: bytes, count: int) -> None:
    body = parse_inference(b'{"%s": %s, "n": 3}' % (name, prompts))
    assert body.choices == 3 * count
    assert body.prompt_tokens > 1


@pytest.mark.parametrize(
    "body", [b'{"prompt": ["a", "b"], "prompt_token_ids": [1]}', b'{"prompt": "a", "prompt_token_ids": [[1], [2]]}']
)
def test_choices_are_the_most_that_an_engine_makes_of_two_names_for_prompts(body: bytes) -> None:
    assert parse_inference(body).choices == 2


def test_prompt_tokens_are_exact_if_the_client_sends_token_ids() -> None:
    assert parse_inference(b'{"prompt_token_ids": [1, 2, 3]}').prompt_tokens == 3


def test_prompt_tokens_count_the_whole_conversation() -> None:
    short = json.dumps({"messages": [{"role": "user", "content": "x"}]}).encode()
    long = json.dumps({"messages": [{"role": "user", "content": "x"}] * 100}).encode()
    assert parse_inference(long).prompt_tokens > 50 * parse_inference(short).prompt_tokens


@pytest.mark.parametrize("unit", [b"[[]],", b'{"a":[1]},', b'"a, word",'])
def test_splicing_a_body_of_more_values_takes_no_more_instructions(unit: bytes) -> None:
    def count(units: int) -> int:
        body = parse_inference(b'{"request_id":"theirs","messages":[%s7]}' % (unit * units))
        return count_instructions(lambda: splice(body, ENCODED))

    assert count(9000) <= count(3000)


@pytest.mark.parametrize("names", [b'"k%d":1', b'"request_id":"r%d"'])
def test_a_body_with_too_many_members_is_refused(names: bytes) -> None:
    data = b"{%s}" % b",".join(names % number for number in range(1001))
    with pytest.raises(BadBody, match="the body has 1001 members; at most 1000 are allowed"):
        splice(parse_inference(data), ENCODED)
    whole = b"{%s}" % b",".join(names % number for number in range(1000))
    assert json.loads(splice(parse_inference(whole), ENCODED)) == {**json.loads(whole), **ADDED}


def test_the_error_about_an_invalid_request_id_is_short() -> None:
    with pytest.raises(BadBody) as refused:
        parse_inference(b'{"request_id":[%s]}' % b",".join([b"1"] * 1000))
    assert len(str(refused.value)) < 200


FORM = b'--x\r\ncontent-disposition: form-data; name="model"\r\n\r\nwhisper\r\n--x\r\n'
LONG = b'"input":"' + b"x" * 20_000 + b'"'


@pytest.mark.parametrize(
    ("data", "model"),
    [
        (b'{"model":"m"}', "m"),
        (b'{"nested":{"model":"n"},"model":"m"}', "m"),
        (b'{"model":"\\u00e4"}', "\u00e4"),
        (b'{"model":5}', ""),
        (b'{"input":"\\"model\\":\\"n\\""}', ""),
        (b'{"model": "m",' + LONG + b"}", "m"),
        (b"{" + LONG + b', "model" : "m"}', "m"),
        (b'{"input":"' + b'\\"model\\":\\"n\\"' * 2000 + b'"}', ""),
        (FORM, "whisper"),
        (FORM.replace(b"\r\n\r\n", b"\r\ncontent-type: text/plain\r\n\r\n"), "whisper"),
        (b"--x\r\n" + b"\0" * 50_000 + FORM, "whisper"),
        (b'--x\r\ncontent-disposition: form-data; name="file"; filename="model"\r\n\r\nw\r\n' + FORM, "whisper"),
        (FORM[:-5], "whisper"),
        (FORM[:-7], ""),
        (FORM.replace(b"--x", b"--" + b"x" * 70), "whisper"),
        (FORM.replace(b"--x", b"--" + b"x" * 71), ""),
        (FORM.replace(b'"model"', b"model"), "whisper"),
        (FORM.replace(b"whisper", b"\xff"), ""),
        (b"{", ""),
        (b"[1]", ""),
        (b"", ""),
        (b"\xff", ""),
    ],
)
def test_the_model_is_found_in_a_body_that_is_not_parsed(data: bytes, model: str) -> None:
    assert find_model(data) == model


@pytest.mark.parametrize(
    ("data", "renamed"),
    [
        (b'{"nested":{"model":"n"},"model":"m"}', b'{"nested":{"model":"n"},"model":"whisper"}'),
        (b'{"model": "m",' + LONG + b"}", b'{"model": "whisper",' + LONG + b"}"),
        (FORM.replace(b"whisper", b"w"), FORM),
    ],
)
def test_a_model_is_renamed_in_a_body_that_is_not_parsed(data: bytes, renamed: bytes) -> None:
    changed = rename_model(data, "whisper")
    assert find_model(changed) == "whisper"
    if data.startswith(b"{"):
        assert json.loads(changed) == json.loads(renamed)
    else:
        assert changed == renamed


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,%s"}},
        {"type": "input_audio", "input_audio": {"data": "%s", "format": "wav"}},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "%s"}},
        {"type": "input_file", "file_data": "data:application/pdf;base64,%s"},
        {"type": "image_embeds", "image_embeds": "%s"},
    ],
)
def test_media_in_a_body_are_not_counted_as_text(part: dict[str, Any]) -> None:
    def body(media: str, count: int) -> bytes:
        filled = json.loads(json.dumps(part).replace("%s", media))
        content = [{"type": "text", "text": "word " * 1000}, *[filled] * count]
        return json.dumps({"messages": [{"role": "user", "content": content}]}).encode()

    text = estimate_tokens(body("", 3))
    assert estimate_tokens(body("QUJD" * 100_000, 3)) == text
    assert parse_inference(body("QUJD" * 1000, 3)).prompt_tokens == text


def test_the_smallest_media_are_found_at_any_place_in_a_body() -> None:
    for before in range(512):
        data = b'{"a": "' + b" " * before + b'", "data": "' + b"QUJD" * 256 + b" " * 600 + b'"}'
        assert estimate_tokens(data) == (len(data) - 1024 - 600) // 4


def test_text_that_looks_like_media_is_counted() -> None:
    for text in ('";base64," is how it begins: ', "data:text/plain;base64, " + "and so on " * 30, '"data": '):
        data = json.dumps({"data": "some of the text " * 1000, "prompt": text * 1000}).encode()
        assert estimate_tokens(data) == len(data) // 4


def test_a_file_in_a_form_is_not_counted_as_text() -> None:
    form = b'--x\r\ncontent-disposition: form-data; name="file"\r\n\r\n' + bytes(100_000) + b"\r\n--x--\r\n"
    assert estimate_tokens(form) == 0


def test_many_media_in_a_large_body_are_counted_by_samples() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "QUJD" * 1000}}
    text = {"type": "text", "text": "word " * 800}
    data = json.dumps({"messages": [{"role": "user", "content": [image, text] * 500}]}).encode()
    assert estimate_tokens(data) == pytest.approx(500 * 4000 // 4, rel=0.2)


def test_the_cost_of_a_large_body_does_not_depend_on_its_members_or_markers() -> None:
    for unit in (b'"data":"",', b'";base64,",', b'"",', b'\\"', b"word "):
        small, large = (b'{"prompt":["' + unit * (size // len(unit)) + b'"]}' for size in (300_000, 6_000_000))
        assert count_instructions(partial(estimate_tokens, large)) < 1.2 * count_instructions(
            partial(estimate_tokens, small)
        )


def test_a_body_of_media_markers_only_is_estimated_in_few_instructions() -> None:
    """Each marker costs Python code, and a client can put one into every six bytes."""
    body = b'{"messages": ["data"' + b'"data"' * 16_000 + b"]}"
    assert count_instructions(lambda: estimate_tokens(body)) < 300_000
    assert estimate_tokens(body) > len(body) // 5
