"""``docs/why_miss.md``: each command prints what the page says, and each reason is explained there."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from engine.model.model_runner import load_tokenizer
from kvstore_backend import BlockPool, extend_block_hashes, root_hash
from kvstore_backend.cli import main
from kvstore_backend.manifest import Manifest
from kvstore_backend.manifest_keeper import write_manifest
from kvstore_backend.stores.file import FileStore
from kvstore_backend.why_miss import REASONS
from tests.engine.telemetry.why_miss.test_explainer import SETUPS
from tests.engine.telemetry.why_miss.test_paths import SYSTEM, chat
from tests.support.memory import Memory
from tests.support.waiting import wait_until

PAGE = (Path(__file__).parents[4] / "docs/why_miss.md").read_text()
SHOWN = re.findall(r"```bash\n(kvstore why-miss .*?)\n```\n\n```text\n(.*?)\n```", PAGE, re.DOTALL)
TODAY, YESTERDAY = (SYSTEM.replace("2026-11-22", day) for day in ("2026-11-22", "2026-11-21"))


def normalize(text: str) -> str:
    """Times of day are those of the run."""
    return re.sub(r"\d\d:\d\d:\d\dZ", "15:04:05Z", text)


def talk(system: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": system}, {"role": "user", "content": "tell me about the river"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, few_words: Path) -> Path:
    """Where the commands run: a pool, with yesterday's prompt of one of two set-ups, and the prompts' files."""
    folder = tmp_path_factory.mktemp("page")
    for name, text in (("today", TODAY), ("yesterday", YESTERDAY)):
        (folder / f"{name}.txt").write_text(text)
        (folder / f"{name}.json").write_text(json.dumps({"messages": talk(text)}))
    (folder / "words").symlink_to(few_words)
    store = FileStore(folder / "kvpool", 16 << 20)
    for name in ("plain", "half"):
        namespace, facts = SETUPS[name]
        assert write_manifest(store, Manifest(namespace.fields, facts))
    namespace = SETUPS["plain"][0]
    tokens = load_tokenizer(str(few_words))(YESTERDAY)["input_ids"]
    hashes = extend_block_hashes([], tokens, namespace.block_size, root_hash())
    with BlockPool(store, namespace) as pool:
        memory = Memory(bytes(64))
        assert all(pool.save(hashes, [memory.value] * len(hashes)))
    return folder


@pytest.fixture(scope="module")
def asked(client: TestClient) -> TestClient:
    """An instance that has answered two requests."""
    wait_until(lambda: client.get("/kvcache").json()["pool"]["ready"], "the pool")
    chat(client, SYSTEM.replace("2026-11-22", "2026-11-20"), "first")
    chat(client, YESTERDAY, "second")
    saved = {"messages": talk(YESTERDAY)}
    wait_until(lambda: client.post("/kvcache/why_miss", json=saved).json()["reason"] == "hit", "the blocks in the pool")
    return client


@pytest.fixture
def at_an_instance(asked: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the one at every address."""

    def request(method: str, url: str, **more: Any) -> Any:
        more.pop("trust_env")
        more.pop("timeout")
        return asked.request(method, httpx.URL(url).raw_path.decode(), **more)

    monkeypatch.setattr(httpx, "request", request)


@pytest.mark.usefixtures("at_an_instance")
@pytest.mark.parametrize(("command", "said"), SHOWN, ids=[command[:60] for command, _ in SHOWN])
def test_a_command_prints_what_the_page_says(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, said: str
) -> None:
    monkeypatch.chdir(folder)
    words = shlex.split(command.replace("/dev/shm/kvpool", f"{folder}/kvpool?size=16MiB"))
    assert main(words[1:]) == 0
    assert normalize(capsys.readouterr().out).strip() == normalize(said)


def test_the_page_shows_a_command_for_each_question() -> None:
    assert len(SHOWN) == 4


def test_each_reason_is_explained() -> None:
    table = PAGE.partition("## The reasons")[2].partition("## What")[0]
    assert set(re.findall(r"`(\w+)`", "".join(line.split("|")[1] for line in table.splitlines() if "`" in line))) == {
        *REASONS
    }
