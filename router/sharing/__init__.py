"""Sharing: several processes, and several routers, with the knowledge of one.

link.py         Link: a worker's tie to the other processes
wire.py         Wire: messages between two processes over a socket
hub.py          Hub: the supervisor's part, which passes messages on and keeps records for newcomers
shared_state.py  SharedState: several routers, over Redis
supervisor.py   Supervisor: starts workers, replaces those that die, gives them connections
silence.py      Silence: whether a worker that says nothing hangs, or gets no CPU
hand_over.py    a client's connection, from the process that accepted it to the one that serves it
records.py      what processes tell each other of an instance, and which of two records counts
fleet_sync.py   FleetSync: one fleet for all processes
kept_figures.py  KeptFigures: counts that outlive their worker
gate.py         Gate: limits that count over all workers
load_sync.py    LoadSync: one count of each instance's requests
prefix_sync.py  PrefixSync: one knowledge of prefixes
"""

from router.sharing.fleet_sync import FleetSync
from router.sharing.hand_over import receive_connections
from router.sharing.link import NO_LINK, Link, WorkerLink
from router.sharing.load_sync import LoadSync
from router.sharing.prefix_sync import PrefixSync
from router.sharing.supervisor import LEAVING, Supervisor, WorkerTask, start_nursery

__all__ = [
    "LEAVING",
    "NO_LINK",
    "FleetSync",
    "Link",
    "LoadSync",
    "PrefixSync",
    "Supervisor",
    "WorkerLink",
    "WorkerTask",
    "receive_connections",
    "start_nursery",
]
