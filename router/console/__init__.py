"""kvrouter: the router, or a program that an operator runs beside it and that asks it over HTTP, as any client does.

commands.py  main: starts the router, or the program of a command
client.py    RouterClient: a router's account of itself and its instances, and the orders it takes
dashboard/   kvrouter dashboard: the router, its instances and the pool at work, as a page for a browser
drain.py     kvrouter drain: no new requests for an instance, and wait until it has none
top.py       kvrouter top: the router and its instances at work, in a terminal
"""

from router.console.commands import COMMANDS, main

__all__ = ["COMMANDS", "main"]
