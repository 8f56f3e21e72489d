"""run_router_ha.sh: a Redis, two routers and two pairs. A router is killed during a stream."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.examples.script import complaint, running

PORTS = (15001, 15002, 15003, 16379, 52400, 52401, 52500, 52501, 52600, 52700, 52800)


@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("redis-server") is None, reason="redis-server is not installed")
def test_a_conversation_continues_after_one_of_two_routers_is_killed(
    require_ports: Callable[[Sequence[int]], None], few_words: Path
) -> None:
    require_ports(PORTS)
    with running("run_router_ha.sh", ENGINE="kvstore", MODEL_NAME=str(few_words)) as script:
        assert script.end(400) == 0, script.output
    rows = re.findall(r"^(\d)  +(\d)  +(200|200, cut)  .*  (yes|the part is right)$", script.output, re.MULTILINE)
    assert rows == [
        ("1", "1", "200", "yes"),
        ("2", "2", "200, cut", "the part is right"),
        ("2", "1", "200", "yes"),
        ("3", "1", "200", "yes"),
        ("4", "2", "200", "yes"),
    ]
    assert "verified: every turn got the same answer as without pool and cache" in script.output
    assert "started programs have ended, with all their processes." in script.output
    assert script.left_behind() == []


def test_without_redis_one_sentence_says_how_to_install_it(tmp_path: Path) -> None:
    for name in ("bash", "dirname", "basename", "sh", "python3"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    (tmp_path / "id").write_text("#!/bin/sh\necho 1000\n")
    (tmp_path / "id").chmod(0o755)
    said = complaint("run_router_ha.sh", PATH=str(tmp_path), ENGINE="kvstore")
    remedy = "please install it first, on Debian with: sudo apt-get install redis-server"
    assert said == f"run_router_ha.sh: redis-server is not installed: {remedy}\n"


def test_a_router_without_shared_state_is_refused() -> None:
    said = complaint("run_router_ha.sh", ROUTER="fastdeploy")
    assert said.startswith("run_router_ha.sh: ROUTER=fastdeploy cannot share its state with another router; ")
    assert said.count("\n") == 1
