"""A process ends although a call of its store never returns."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from tests.faults.hanging import CALLS
from tests.support.processes import child
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
# These send HTTP requests with timeouts, and never call a store.
JOINED_AT_THE_END = {
    "kvstore_backend/cli/certify/instances.py: ThreadPoolExecutor",  # only HTTP requests
    "kvstore_backend/stores/mooncake_admin.py: ThreadPoolExecutor",
}


@pytest.mark.parametrize("call", CALLS)
def test_a_process_ends_while_a_call_hangs(tmp_path: Path, call: str) -> None:
    with child([sys.executable, "-m", "tests.faults.hanging", call], tmp_path / "log", cwd=ROOT) as process:
        wait_until(lambda: process.exit_code is not None, f"the end of a process in which {call} hangs", 30)
        assert process.output.splitlines()[-1:] == ["to the end"]
        assert process.exit_code == 0


def test_the_end_of_a_process_does_not_wait_for_threads_that_call_a_store() -> None:
    """``ThreadPoolExecutor`` joins its threads at the end of a process; ``DaemonThreads`` does not."""
    found = set()
    for path in (ROOT / "kvstore_backend").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                is_daemon = any(each.arg == "daemon" and ast.unparse(each.value) == "True" for each in node.keywords)
                if name.endswith("ThreadPoolExecutor") or (name == "threading.Thread" and not is_daemon):
                    found.add(f"{path.relative_to(ROOT)}: {name}")
    assert found <= JOINED_AT_THE_END
