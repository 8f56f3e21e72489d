"""Measure the cost of the endpoint picker: kvrouter, and Envoy with kvrouter epp, with the same mock instances.

    python benchmarks/epp_overhead.py [--seconds 5] [--rounds 3]

CPU per request is the user and system time of all threads, from /proc: of the router or picker (one worker), and of
Envoy (one thread). "Envoy" alone has no ext_proc filter. Figures are medians. The program has the
requirements of router_overhead.py for our router, and needs the extras epp and dev.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from router_overhead import (
    CASES,
    READY_S,
    Bench,
    Case,
    System,
    cpu_seconds,
    free_port,
    heartbeats,
    post,
    running_process,
)

from tests.support.envoy import find_envoy, make_config

LOADS = (Case("small", 1), Case("small", 32), Case("large", 32, prompt_bytes=128_000), Case("burst", 32, events=256))
BUFFERED: dict[str, Any] = {"processing_mode": {"request_body_mode": "BUFFERED"}}
SYSTEMS = ("kvrouter", "Envoy", "Envoy + picker", "Envoy + picker, buffered")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all figures and print one table."""
    parser = argparse.ArgumentParser(description="Measure the cost of the endpoint picker and of the router.")
    parser.add_argument("--seconds", type=float, default=5.0, help="length of one measurement (default 5)")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each case and system (default 3)")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        bench = EppBench(Path(folder), SYSTEMS, Path(folder))
        print(f"{'case':<46}{'system':<26}{'req/s':>9}{'router us/req':>15}{'Envoy us/req':>14}{'p50 ms':>9}")
        with bench._workers("mixed") as workers:
            for case in LOADS:
                for name in SYSTEMS:
                    with bench.system(name, workers.ports) as (system, envoy_pid):
                        rounds = [bench.measure(case, system, envoy_pid, args.seconds) for _ in range(args.rounds)]
                    per_s, router, envoy, p50 = (statistics.median(each) for each in zip(*rounds, strict=True))
                    print(
                        f"{case.title:<46}{name:<26}{per_s:>9,.0f}{router:>15.1f}{envoy:>14.1f}{p50:>9.2f}", flush=True
                    )
    return 0


class EppBench(Bench):
    """A ``Bench`` that also starts Envoy and the picker."""

    def measure(self, case: Case, system: System, envoy_pid: int, seconds: float) -> tuple[float, float, float, float]:
        """Return requests per second, microseconds of CPU per request of router and Envoy, and p50 in ms."""
        self._run_load(case, system, 0.5)
        before = cpu_seconds(system.pid), cpu_seconds(envoy_pid)
        figures = self._run_load(case, system, seconds)
        after = cpu_seconds(system.pid), cpu_seconds(envoy_pid)
        router, envoy = (1e6 * (late - early) / figures["answers"] for early, late in zip(before, after, strict=True))
        return figures["per_s"], router, envoy, figures["latency_p50_us"] / 1e3

    @contextlib.contextmanager
    def system(self, name: str, workers: Sequence[int]) -> Iterator[tuple[System, int]]:
        """Start one system; yield its port with the router's process id, and Envoy's process id (0 without Envoy)."""
        with contextlib.ExitStack() as running, (self.folder / "log").open("w") as log:
            router_port, envoy_port, picker_port, router_pid, envoy_pid = free_port(), free_port(), free_port(), 0, 0
            flags = ["--host", "127.0.0.1", "--port", str(router_port), "--workers", "1", "--access-log", "off"]
            if name != "Envoy":
                if "picker" in name:
                    flags += ["--epp-port", str(picker_port)]
                command = [sys.executable, "-m", "router.launch", *flags]
                router_pid = running.enter_context(running_process(command, log)).pid
                running.enter_context(heartbeats(router_port, "mixed", workers))
            if "Envoy" in name:
                config = make_config(envoy_port, picker_port, list(workers), **(BUFFERED if "buffered" in name else {}))
                path = self.folder / "envoy.yaml"
                path.write_text(config if "picker" in name else _without_picker(config))
                command = [str(find_envoy()), "-c", str(path), "--concurrency", "1", "--log-level", "error"]
                command += ["--base-id", str(envoy_port)]
                envoy_pid = running.enter_context(running_process(command, log)).pid
            port = envoy_port if envoy_pid else router_port
            deadline = time.monotonic() + READY_S
            while post(port, "/v1/chat/completions", CASES[0].body()) != 200:
                if time.monotonic() > deadline:
                    sys.exit(f"{name} does not answer: {(self.folder / 'log').read_text()[-500:]}")
                time.sleep(0.2)
            yield System([port], router_pid), envoy_pid


def _without_picker(config: str) -> str:
    parsed: dict[str, Any] = yaml.safe_load(config)
    (listener,) = parsed["static_resources"]["listeners"]
    del listener["filter_chains"][0]["filters"][0]["typed_config"]["http_filters"][0]
    return yaml.safe_dump(parsed)


if __name__ == "__main__":
    sys.exit(main())
