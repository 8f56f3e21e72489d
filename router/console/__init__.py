"""kvrouter: the router, or an operator program. Those next to a router query it over HTTP like any client.

commands.py  main: starts the router, or the program of a command
client.py    RouterClient: reads the state of a router and its instances, and sends operator commands
dashboard/   kvrouter dashboard: the state of the router, its instances and the pool, as a web page
drain.py     kvrouter drain: sends an instance no new requests, and waits until it has none
replay.py    kvrouter replay: shows what a flight recorder has written, as a timeline
simulate.py  kvrouter simulate: a trace of requests over simulated instances, to compare policies
top.py       kvrouter top: the state of the router and its instances, in a terminal
"""

from router.console.commands import COMMANDS, main

__all__ = ["COMMANDS", "main"]
