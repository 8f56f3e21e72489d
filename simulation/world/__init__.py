"""The simulator's core: one OS thread, virtual time, one seed.

scheduler.py  Scheduler: virtual time, timers, simulated threads (greenlets), the seed's random streams
threads.py    Thread, Lock, Condition, Queue, ...: those of ``threading`` and ``queue``, over the scheduler
process.py    Process: a clock, random numbers, threads; it can pause and crash
patches.py    patched: time, threading, queue, random, os.urandom, ... act on the process that runs
loop.py       SimulatedLoop: asyncio in virtual time, on the network in memory
network.py    Network: connections, listening ports, names; links that are slow, cut or half-open
transport.py  SimTransport: asyncio's transport over a connection of it
plan.py       Plan, Event: all that will happen, as plain data; drawn before the run, so that it can be shrunk
trace.py      Trace: what happened, as text
world.py      World: the frame of a world; its docstring tells how one is written
"""

from simulation.world.network import Network
from simulation.world.plan import Event, Plan
from simulation.world.process import Clock, Process
from simulation.world.scheduler import SECOND, Livelock, Scheduler, SimThread, current
from simulation.world.trace import Trace
from simulation.world.world import Failure, Outcome, World, run_world

__all__ = [
    "SECOND",
    "Clock",
    "Event",
    "Failure",
    "Livelock",
    "Network",
    "Outcome",
    "Plan",
    "Process",
    "Scheduler",
    "SimThread",
    "Trace",
    "World",
    "current",
    "run_world",
]
