"""Sharing: several worker processes, and several routers, share their state.

link.py         Link: a worker's connection to the other processes
wire.py         Wire: messages between two processes over a socket
hub.py          Hub: the supervisor's part, which forwards messages and stores records for new workers
shared_state.py SharedState: several routers, over Redis
supervisor.py   Supervisor: starts workers, replaces dead ones, assigns connections to them
silence.py      Silence: whether a silent worker hangs, or only gets no CPU
hand_over.py    a client's connection, passed from the process that accepted it to the one that serves it
records.py      the messages about one instance, and which of two records is valid
fleet_sync.py   FleetSync: one fleet for all processes
kept_figures.py KeptFigures: counters of ended workers
gate.py         Gate: limits for all workers together
load_sync.py    LoadSync: one count of each instance's requests
prefix_sync.py  PrefixSync: one index of prefixes
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
