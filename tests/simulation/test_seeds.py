"""Seeds of the simulated worlds: those that found defects, and some new ones each time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Seconds of new seeds for each world: ``SIMULATE_SECONDS=15 scripts/test tests/simulation``.
SECONDS = float(os.environ.get("SIMULATE_SECONDS", "0"))


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "simulation.run", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_seeds_that_found_defects_find_none() -> None:
    found = simulate("--regressions")
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.skipif(not SECONDS, reason="new seeds can find what nobody knows yet: SIMULATE_SECONDS=15 runs them")
@pytest.mark.parametrize("world", ["router", "fleet", "pool", "pair"])
def test_new_seeds_find_nothing(world: str) -> None:
    found = simulate("--world", world, "--minutes", str(SECONDS / 60), "--jobs", "1")
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize("world", ["router", "fleet"])
def test_a_seed_is_one_timeline_whatever_the_hashes_of_texts(world: str) -> None:
    """Texts have other hashes in Python 3.10 than in 3.11, so a set of them has another order there."""
    one = simulate("--world", world, "--seed", "2", "--trace").stdout
    program = f"from simulation.run import *; print(run_forked(find_world({world!r}), 2).trace, end='')"
    other = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert one == other
    assert "ends: right 200" in one


def test_a_failure_is_shrunk_to_what_it_needs(tmp_path: Path) -> None:
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
