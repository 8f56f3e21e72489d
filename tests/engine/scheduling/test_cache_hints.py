"""What a request says of how long its prompt is worth keeping."""

from __future__ import annotations

from typing import Any

import pytest

from engine.scheduling.cache_hints import CacheControl, CacheHint, CacheMark, count_common, find_marks, seconds_kept


@pytest.mark.parametrize(("ttl", "seconds"), [("90s", 90), ("5m", 300), ("1h", 3600), ("24h", 86400)])
def test_a_time_is_read_as_anthropics_clients_write_it(ttl: str, seconds: float) -> None:
    assert CacheControl(type="ephemeral", ttl=ttl).seconds == seconds
    assert CacheControl(type="ephemeral").seconds == 300


@pytest.mark.parametrize(
    ("control", "sentence"),
    [
        ({"type": "ephemeral", "ttl": "25h"}, "messages.1.cache_control.ttl: Input should be a time such as 5m or 1h"),
        ({"type": "ephemeral", "ttl": "0s"}, "messages.1.cache_control.ttl: Input should be a time"),
        ({"type": "forever"}, "messages.1.cache_control.type: Input should be 'ephemeral'"),
        ("yes", "messages.1.cache_control: Input should be a valid dictionary"),
    ],
)
def test_what_is_no_hint_is_refused_with_its_place(control: Any, sentence: str) -> None:
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "b", "cache_control": control}]
    with pytest.raises(ValueError, match=sentence[:40]) as caught:
        list(find_marks(messages))
    assert str(caught.value).startswith(sentence)


def test_marks_stand_at_parts_and_at_messages() -> None:
    hour = {"type": "ephemeral", "ttl": "1h"}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": [{"type": "text", "text": "a", "cache_control": hour}]},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "b"},
                {"type": "text", "text": "c", "cache_control": {"type": "ephemeral"}},
                {"type": "text", "text": "d"},
            ],
        },
        {"role": "user", "content": "e", "cache_control": hour},
    ]
    assert list(find_marks(messages)) == [CacheMark(0, "a", 3600), CacheMark(1, "bc", 300), CacheMark(2, None, 3600)]


def test_tokens_are_kept_as_long_as_the_longest_hint_on_them_says() -> None:
    hints = [CacheHint(8, 3600), CacheHint(20, 300)]
    assert [seconds_kept(hints, end) for end in (4, 8, 12, 20, 24)] == [3600, 3600, 300, 300, 0]


def test_a_shared_beginning_is_counted() -> None:
    assert count_common([1, 2, 3, 4], [1, 2, 9]) == 2
    assert count_common([1, 2, 3, 4], [1, 2]) == 2
    assert count_common([1, 2], [1, 2]) == 2
