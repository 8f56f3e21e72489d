"""Sharing: several worker processes, and several routers, share their state.

hub.py           Hub: forwards messages between workers and routers, and stores records; lists all messages
channels.py      MessageChannel: carries messages between a supervisor and a worker; passes clients' connections, too
shared_state.py  SharedState: carries messages between several routers, over Redis
link.py          Link: a process's connection to its peers
records.py       the record of one instance, and which of two records is later
fleet_sync.py    FleetSync: keeps the same instances in all processes
load_sync.py     LoadSync: counts each instance's requests over all processes
prefix_sync.py   PrefixSync: keeps the same index of prefixes in all processes
admission_server.py  AdmissionServer: applies the limits to all workers together
supervisor.py    Supervisor: starts workers, replaces dead ones, assigns connections to them
silence.py       Silence: finds out whether a silent worker hangs, or only waits for a CPU
"""

from router.sharing.channels import receive_connections
from router.sharing.fleet_sync import FleetSync
from router.sharing.link import Link
from router.sharing.load_sync import LoadSync
from router.sharing.prefix_sync import PrefixSync
from router.sharing.supervisor import LEAVING, Supervisor, WorkerTask, start_forkserver

__all__ = [
    "LEAVING",
    "FleetSync",
    "Link",
    "LoadSync",
    "PrefixSync",
    "Supervisor",
    "WorkerTask",
    "receive_connections",
    "start_forkserver",
]
