"""kvrouter: the router, or what an operator runs beside it, which speaks to it as any client does, over HTTP.

commands.py  main: starts the router, or the program of a command
client.py    RouterClient: what a router says of itself and its instances, and the orders it takes
dashboard/   kvrouter dashboard: what the router, its instances and the pool do, as a page for a browser
drain.py     kvrouter drain: no new requests for an instance, and wait until it has none
"""

from router.console.commands import COMMANDS, main

__all__ = ["COMMANDS", "main"]
