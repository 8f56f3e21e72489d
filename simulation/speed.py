"""Measure how fast the world ``fleet`` runs: virtual seconds for each second of CPU time, on one core.

    python -m simulation.speed [--runs N]

The fleet has two routers with two workers each, eight instances and 64 requests; seeds 1 to 3 draw the settings and
faults. Other work on the machine makes a run slower, so the best of several runs counts. ``docs/simulation.md`` has the
figure.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from typing import ClassVar

from simulation.fleet_world import FleetWorld
from simulation.run import run_forked

__all__ = ["main"]

SEEDS = (1, 2, 3)


class LargeFleet(FleetWorld):
    """The world ``fleet`` with eight instances and 64 requests."""

    num_requests: ClassVar[tuple[int, int]] = (64, 64)

    def draw_roles(self, draw: random.Random, *, splitwise: bool) -> list[str]:
        return [*(4 * ("prefill",)), *(4 * ("decode",))] if splitwise else 8 * ["mixed"]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the speed of each seed and the mean of all; return 1 if a seed failed."""
    parser = argparse.ArgumentParser(prog="python -m simulation.speed", description=main.__doc__)
    parser.add_argument("--runs", type=int, default=5, help="runs of each seed, of which the fastest counts")
    arguments = parser.parse_args(argv)
    virtual = real = 0.0
    has_failed = False
    for seed in SEEDS:
        outcomes = [run_forked(LargeFleet, seed) for _ in range(arguments.runs)]
        has_failed |= any(outcome.failures for outcome in outcomes)
        seconds = min(outcome.real_seconds for outcome in outcomes)
        virtual, real = virtual + outcomes[0].virtual_seconds, real + seconds
        print(f"seed {seed}: {outcomes[0].virtual_seconds:.0f} virtual seconds in {seconds:.2f} s of CPU time")
    print(f"{virtual / real:.1f} virtual seconds for each second of CPU time")
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
