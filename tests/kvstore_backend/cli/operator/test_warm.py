"""kvstore warm, with a stand-in for a server: which requests it gets, and what is noted."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kvstore_backend.cli.operator.pools import Commands
from tests.support.json_http import Asked, JsonServer


class Server(JsonServer):
    """Answers with a usage, or as it is told to; remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any], str | None]] = []
        self.status = 200
        self.usage: dict[str, Any] = {"prompt_tokens": 8, "prompt_tokens_details": {"cached_tokens": 4}}
        super().__init__(self._answer)
        self.url = f"http://{self.address}"

    def _answer(self, request: Asked) -> tuple[int, object]:
        self.asked.append((request.path, request.body, request.headers["X-Priority"]))
        if self.status != 200:
            return self.status, {"error": {"message": "no room"}}
        return 200, {"usage": self.usage}


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as opened:
        yield opened


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    lines = ["text", [1, 2, 3], {"messages": [{"role": "user", "content": "hi"}], "stream": True, "min_tokens": 9}]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n\n".join(json.dumps(line) for line in lines))
    return file


def test_each_prompt_is_asked_for_one_token_at_low_priority_and_only_once(
    server: Server, prompts: Path, kvstore: Commands
) -> None:
    assert kvstore("warm", prompts, "--to", server.url, "--dry-run").output == "3 of 3 prompts would be sent\n"
    assert not server.asked
    told = kvstore("warm", prompts, "--to", server.url, "--model", "m", "--json").told
    assert (told["warmed"], told["failed"], told["prompt_tokens"], told["cached_tokens"]) == (3, 0, 24, 12)
    asked = sorted(server.asked, key=lambda each: (each[0], str(each[1].get("prompt"))))
    common = {"model": "m", "max_tokens": 1, "stream": False, "n": 1}
    assert asked == [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], **common}, "-10"),
        ("/v1/completions", {"prompt": [1, 2, 3], **common}, "-10"),
        ("/v1/completions", {"prompt": "text", **common}, "-10"),
    ]
    again = kvstore("warm", prompts, "--to", server.url, "--model", "m", "--json").told
    assert (again["warmed"], again["skipped"], len(server.asked)) == (0, 3, 3)
    assert kvstore("warm", prompts, "--to", server.url, "--model", "m", "--again", "--json").told["warmed"] == 3


def test_people_are_told_how_many_were_warmed_and_how_many_before(
    server: Server, prompts: Path, kvstore: Commands
) -> None:
    warm = ["warm", prompts, "--to", server.url]
    told = re.sub(r"\d+\.\d s", "N s", kvstore(*warm).output)
    assert told == "3 of 3 prompts were warmed in N s: 24 tokens, of which 12 were cached already\n"
    told = re.sub(r"\d+\.\d s", "N s", kvstore(*warm).output)
    assert told == (
        "0 of 3 prompts were warmed in N s: 0 tokens, of which 0 were cached already; 3 were warmed before, or come "
        "twice\n"
    )


def test_a_server_that_counts_no_tokens_warms_all_the_same(
    server: Server, prompts: Path, kvstore: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "usage", {"prompt_tokens": None, "prompt_tokens_details": None})
    told = kvstore("warm", prompts, "--to", server.url, "--json").told
    assert (told["warmed"], told["prompt_tokens"], told["cached_tokens"], told["waiting"]) == (3, 0, 0, 0)


def test_a_run_that_was_cut_short_goes_on_where_it_ended(server: Server, prompts: Path, kvstore: Commands) -> None:
    server.status = 503
    ended = kvstore("warm", prompts, "--to", server.url)
    assert "3 of the prompts were not warmed; the last trouble: line " in ended.sentence
    assert ended.sentence.endswith("status 503: no room")
    server.status = 200
    notes = prompts.with_name("prompts.jsonl.warmed")
    notes.write_text('{"sha256": "cut sh')
    assert kvstore("warm", prompts, "--to", server.url, "--json").told["warmed"] == 3
    assert kvstore("warm", prompts, "--to", server.url, "--json").told["skipped"] == 3


def test_what_cannot_be_sent_gets_one_sentence(
    server: Server, tmp_path: Path, prompts: Path, kvstore: Commands
) -> None:
    (tmp_path / "odd").write_text('"fine"\n{"prompt": "a", "messages": [1]}')
    (tmp_path / "torn").write_text('"fine"\n{')
    (tmp_path / "empty").write_text("\n")
    for arguments, sentence in (
        (["/nowhere"], "the file of prompts '/nowhere' cannot be read: No such file"),
        ([tmp_path / "odd"], "line 2 of"),
        ([tmp_path / "torn"], "is not JSON"),
        ([tmp_path / "empty"], "has none"),
        ([prompts, "--parallel", "0"], "--parallel must be at least 1"),
        ([prompts, "--timeout", "0"], "--timeout more than 0"),
        ([prompts, "--api-key", "/nowhere"], "--api-key names '/nowhere'"),
    ):
        assert sentence in kvstore("warm", *arguments, "--to", server.url).sentence
    assert not server.asked
    server.stop()
    assert "no answer from http://127.0.0.1" in kvstore("warm", prompts, "--to", server.url).sentence
