"""Sharing: several worker processes, and several routers, share their state.

hub.py           Hub: forwards all messages between workers and between routers, and stores records; lists the messages
channels.py      MessageChannel: the transport between a supervisor and its workers; clients' connections pass, too
shared_state.py  SharedState: the transport between several routers, over Redis
link.py          Link: a process's connection to its peers
records.py       the messages about one instance, and which of two records is valid
fleet_sync.py    FleetSync: one fleet for all processes
load_sync.py     LoadSync: one count of each instance's requests
prefix_sync.py   PrefixSync: one index of prefixes
admission_server.py  AdmissionServer: limits for all workers together
supervisor.py    Supervisor: starts workers, replaces dead ones, assigns connections to them
silence.py       Silence: whether a silent worker hangs, or only gets no CPU
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
