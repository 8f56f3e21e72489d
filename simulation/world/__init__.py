"""The core of the simulator: runs a world in one thread of the operating system, in virtual time, from one seed.

scheduler.py  Scheduler: virtual time, timers, simulated threads (greenlets), random numbers
threads.py    the classes of ``threading`` and ``queue`` for simulated threads
process.py    Process: a simulated process with its own clock, random numbers and threads
patches.py    replaces names of the standard library (time, threading, random, ...) while a world runs
loop.py       SimulatedLoop: asyncio's event loop in virtual time
network.py    Network: simulates TCP connections, ports and host names, and faults of the network
transport.py  SimTransport: asyncio's transport over a simulated connection
plan.py       Plan, Event: the requests and faults of a run; drawn before the run
trace.py      Trace: the timeline of a run, as text
world.py      World: base class of worlds
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
