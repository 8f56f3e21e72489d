"""Seeds of the simulated worlds: those that found defects, and new ones on request."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# How long to run new seeds in each world: ``SIMULATE_SECONDS=15 scripts/test tests/simulation``.
SECONDS = float(os.environ.get("SIMULATE_SECONDS", "0"))


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "simulation.run", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_seeds_that_found_defects_now_pass() -> None:
    found = simulate("--regressions")
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.skipif(not SECONDS, reason="new seeds can find unknown defects: SIMULATE_SECONDS=15 runs them")
@pytest.mark.parametrize("world", ["router", "fleet", "pool", "pair"])
def test_new_seeds_pass(world: str) -> None:
    found = simulate("--world", world, "--minutes", str(SECONDS / 60), "--jobs", "1")
    assert found.returncode == 0, found.stdout + found.stderr


def test_a_seed_has_the_same_timeline_with_different_hashes_of_strings() -> None:
    """Strings have different hashes in Python 3.10 and 3.11, so a set of them has a different order."""
    signs = {"router": "ends: right 200", "fleet": "ends: right 200", "pool": "save answered", "pair": "'length'}"}
    program = f"""
import sys
from simulation.run import *
for world in {list(signs)}:
    print(run_forked(find_world(world), 2).trace, end=chr(0), flush=True)
"""
    one, other = (
        subprocess.run(
            [sys.executable, "-c", program],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split("\0")[:-1]
        for seed in ("0", "7")
    )
    assert one == other
    for sign, trace in zip(signs.values(), one, strict=True):
        assert sign in trace
    assert simulate("--world", "router", "--seed", "2", "--trace").stdout == one[0]


def test_shrink_removes_the_events_that_a_failure_does_not_need(tmp_path: Path) -> None:
    program = tmp_path / "shrinks.py"
    program.write_text(
        """
import random
from simulation.run import run_forked, shrink
from simulation.world import Event, Plan, World


class Small(World):
    name = "small"

    def draw_plan(self, draw: random.Random) -> Plan:
        return Plan({}, [Event(at, "one" if at % 7 else "seven") for at in range(30)])

    def build(self) -> None:
        self.seen: list[float] = []

    def perform(self, event: Event) -> None:
        self.seen.append(event.at)
        if {7, 21} <= set(self.seen):
            self.fail("both", "7 and 21 have come together")


if __name__ == "__main__":
    print(*(event.at for event in shrink(Small, run_forked(Small, 1)).plan.events))
"""
    )
    command = [sys.executable, str(program)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["7", "21"]


def test_a_failed_seed_is_printed_with_the_command_that_repeats_it(tmp_path: Path) -> None:
    program = tmp_path / "fails.py"
    program.write_text(
        """
import random
import sys
from simulation import run
from simulation.world import Plan, World


class Failing(World):
    name = "router"

    def draw_plan(self, draw: random.Random) -> Plan:
        return Plan({}, [])

    def build(self) -> None:
        if self.seed == 8:
            self.fail("rule", "it is eight")


if __name__ == "__main__":
    run.find_world = lambda name: Failing
    sys.exit(run.main(["--first", "7", "--seeds", "3", "--jobs", "1"]))
"""
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "0"}
    found = subprocess.run([sys.executable, str(program)], env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 1
    failure, command, _ = found.stdout.splitlines()
    assert failure.startswith("router 8: rule: it is eight")
    assert command.strip() == "scripts/simulate-faults --world router --seed 8 --trace"
