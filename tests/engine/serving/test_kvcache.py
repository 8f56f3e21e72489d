"""``/kvcache`` of a real instance in this process, and the commands of ``docs/why_miss.md`` with their output."""

from __future__ import annotations

import json
import re
import shlex
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from engine.args import parse_args
from engine.serving.endpoints import create_app
from engine.serving.instance import Instance
from engine.serving.surroundings import find_surroundings
from kvstore_backend import Namespace
from kvstore_backend.cli import main
from kvstore_backend.manifest import Manifest, parse_manifest
from kvstore_backend.manifest_keeper import write_manifest
from kvstore_backend.stores.file import FileStore
from kvstore_backend.why_miss import REASONS
from tests.support.ports import free_ports

PAGE = (Path(__file__).parents[3] / "docs/why_miss.md").read_text()
SHOWN = re.findall(r"```bash\n(kvstore why-miss .*?)\n```\n\n```text\n(.*?)\n```", PAGE, re.DOTALL)
SYSTEM = "you are a good friend, and answer with few words. it is 2026-11-22 15:04:05 now."
TODAY, YESTERDAY = (SYSTEM.replace("2026-11-22", day) for day in ("2026-11-22", "2026-11-21"))
PLAIN = Namespace("a" * 32, "float32", 16, 2, 2, 8, "layer,kv,head,token,dim")
FACTS = {"name": "qwen", "architecture": "1", "block_hashes": "kvstore"}


@pytest.fixture(scope="module")
def client(few_words: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    port, metrics = free_ports(2)
    pool = f"file://{tmp_path_factory.mktemp('pool')}/pool?size=64MiB"
    flags = ["--model", str(few_words), "--port", str(port), "--metrics-port", str(metrics), "--block-size", "16"]
    args = parse_args([*flags, "--max-model-len", "512", "--kvcache-storage-backend", pool])
    with socket.socket() as connector:
        connector.bind(("127.0.0.1", 0))
        instance = Instance(args, find_surroundings(args), connector)
        with TestClient(create_app(instance)) as found:
            yield found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, few_words: Path) -> Path:
    """The folder of the commands: a pool with the manifests of two configurations, and files of prompts."""
    folder = tmp_path_factory.mktemp("page")
    for name, text in (("today", TODAY), ("yesterday", YESTERDAY)):
        messages = [{"role": "system", "content": text}, {"role": "user", "content": "tell me about the river"}]
        (folder / f"{name}.txt").write_text(text)
        (folder / f"{name}.json").write_text(json.dumps({"messages": messages}))
    (folder / "words").symlink_to(few_words)
    store = FileStore(folder / "kvpool", 16 << 20)
    for namespace in (PLAIN, replace(PLAIN, kv_dtype="bfloat16")):
        assert write_manifest(store, Manifest(namespace.fields, FACTS))
    store.close()
    return folder


@pytest.fixture
def send_to_instance(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send the requests for all addresses to the instance."""

    def request(method: str, url: str, **more: Any) -> Any:
        more.pop("trust_env")
        more.pop("timeout")
        return client.request(method, httpx.URL(url).raw_path.decode(), **more)

    monkeypatch.setattr(httpx, "request", request)


def test_an_instance_describes_its_blocks(client: TestClient) -> None:
    description = client.get("/kvcache").json()
    manifest = parse_manifest(description["manifest"])
    assert (manifest.digest, manifest.block_size, manifest.facts["block_hashes"]) == (
        description["digest"],
        16,
        "kvstore",
    )
    assert set(description["pool"]) == {"ready", "detail", "url"}
    assert description["pool"]["url"].startswith("file:///")
    assert isinstance(description["cached_blocks"], int)


@pytest.mark.usefixtures("send_to_instance")
@pytest.mark.parametrize(("command", "output"), SHOWN, ids=[command[:60] for command, _ in SHOWN])
def test_a_command_prints_the_output_of_the_page(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, output: str
) -> None:
    monkeypatch.chdir(folder)
    words = shlex.split(command.replace("/dev/shm/kvpool", f"{folder}/kvpool?size=16MiB"))
    assert main(words[1:]) == 0
    assert capsys.readouterr().out.strip() == output


def test_the_page_has_three_commands() -> None:
    assert len(SHOWN) == 3


def test_the_page_explains_each_reason() -> None:
    rows = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `")]
    assert set(re.findall(r"`(\w+)`", "".join(rows))) == {*REASONS}
