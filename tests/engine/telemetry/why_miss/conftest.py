"""An instance that explains misses, in this process."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from engine.args import parse_args
from engine.serving.endpoints import create_app
from engine.serving.instance import Instance
from engine.serving.surroundings import find_surroundings
from tests.support.ports import free_ports


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
