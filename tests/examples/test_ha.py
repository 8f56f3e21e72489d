"""run_ha.sh: an etcd and three masters. The leader is killed during a conversation."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

import pytest

from tests.examples.script import ROOT, running
from tests.support.waiting import port_answers

PORTS = (12379, 12380, 8081, 8082, 8083, 9091, 9092, 9093, 52700, 52800)


@pytest.fixture(autouse=True)
def free_ports() -> None:
    """Skip the test if another process uses a port of the script."""
    for port in PORTS:
        if port_answers(port):
            pytest.skip(f"port {port}, which run_ha.sh needs, is in use on this machine")


@pytest.mark.timeout(600)
def test_a_new_prompt_is_shared_through_the_new_leader(few_words: Path) -> None:
    with running("run_ha.sh", MODEL_NAME=str(few_words)) as script:
        status = script.end(400)
    if "etcd is not installed" in script.output:
        assert not shutil.which("etcd")
        assert not Path(ROOT, ".cache", "etcd", "usr", "bin", "etcd").exists()
        pytest.skip("etcd cannot be had on this machine")
    assert status == 0, script.output
    assert "is killed during the answer" in script.output
    assert "through the new leader." in script.output
    assert script.left_behind() == []


@pytest.mark.timeout(120)
def test_a_used_port_of_etcd_is_named() -> None:
    with socket.create_server(("127.0.0.1", 12379)), running("run_ha.sh") as script:
        assert script.end(60) == 1
    assert f"port 12379, wanted for etcd, is in use by process {os.getpid()} (" in script.output
    assert script.left_behind() == []
