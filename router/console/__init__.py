"""kvrouter: the router, or an operator program, which queries a router over HTTP like any client.

commands.py  main: starts the router, or the program of a command
client.py    RouterClient: reads the state of a router and its instances, and sends operator commands
dashboard/   kvrouter dashboard: shows the state of the router, its instances and the pool, as a web page
drain.py     kvrouter drain: stops new requests to instances, and waits until they have no requests
epp.py       kvrouter epp: the router, with a port at which gateways ask for an instance
replay.py    kvrouter replay: shows the entries of a flight recorder, as a timeline
simulate.py  kvrouter simulate: replays a trace of requests at simulated instances, to compare policies
top.py       kvrouter top: shows the state of the router and its instances, in a terminal
"""

from router.console.commands import COMMANDS, main

__all__ = ["COMMANDS", "main"]
