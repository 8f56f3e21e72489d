"""Debian's Prometheus: a server for a test, and promtool."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support import plain_http
from tests.support.ports import free_port
from tests.support.processes import Child, child

__all__ = ["Prometheus", "Sample", "needs_prometheus", "prometheus", "run_promtool"]

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="Prometheus is not on this machine: apt-get install prometheus",
)


class Sample(NamedTuple):
    """The value of a series."""

    labels: dict[str, str]
    value: float


class Prometheus:
    """A running Prometheus."""

    def __init__(self, process: Child, port: int) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{port}"

    def ask(self, query: str) -> list[Sample]:
        """Return the present values of an expression."""
        found = self._get("/api/v1/query", query=query)
        assert found["resultType"] == "vector", (query, found)
        return [Sample(each["metric"], float(each["value"][1])) for each in found["result"]]

    def list_alerts(self) -> list[dict[str, Any]]:
        """Return the pending and firing alerts, each with its labels, annotations and state."""
        alerts: list[dict[str, Any]] = self._get("/api/v1/alerts")["alerts"]
        return alerts

    def list_targets(self) -> list[dict[str, Any]]:
        """Return all targets."""
        targets: list[dict[str, Any]] = self._get("/api/v1/targets")["activeTargets"]
        return targets

    def _get(self, path: str, **params: str) -> Any:
        answer = plain_http.get(f"{self.url}{path}", params=params, timeout=30)
        body = answer.json()
        assert answer.status_code == 200, (params, body)
        return body["data"]


@contextlib.contextmanager
def prometheus(folder: Path, config: Path) -> Iterator[Prometheus]:
    """Run Prometheus with this configuration, on loopback, with its data in ``folder``."""
    port = free_port()
    argv = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    argv += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    with child(argv, folder / "prometheus.log") as process:
        process.wait_for(lambda: plain_http.answers_ok(f"http://127.0.0.1:{port}/-/ready"), "its start")
        yield Prometheus(process, port)


def run_promtool(*arguments: str | Path) -> str:
    """Return the output of promtool, which must succeed."""
    done = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
