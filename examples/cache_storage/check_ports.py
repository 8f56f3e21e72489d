"""``check_ports.py NAME=PORT...``: exits 0 once every port can be listened on, 1 with a sentence if one is taken.

The scripts' ports are FastDeploy's, and lie where Linux also takes the client ends of connections from. Such an end
keeps its port for a minute after it was closed, so a port that nobody serves is waited for.
"""

from __future__ import annotations

import socket
import sys
import time

CLOSED_CONNECTION = 70.0  # seconds: TCP's TIME-WAIT, and some


def can_be_bound(port: int) -> bool:
    """Whether a server could take this port now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            return False
        return True


def is_served(port: int) -> bool:
    """Whether somebody accepts connections there."""
    with socket.socket() as probe:
        probe.settimeout(2.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def become_free(name: str, port: int) -> bool:
    """Whether the port can be had, if need be after waiting for the end of a connection."""
    give_up = time.monotonic() + CLOSED_CONNECTION
    said = False
    while not can_be_bound(port):
        if is_served(port) or time.monotonic() > give_up:
            return False
        if not said:
            print(f"waiting for port {port}, wanted for {name}: a closed connection still holds it", flush=True)
            said = True
        time.sleep(0.5)
    return True


def main() -> None:
    """Check the ports in the order given."""
    for entry in sys.argv[1:]:
        name, _, port = entry.rpartition("=")
        if not become_free(name, int(port)):
            sys.exit(f"port {port}, wanted for {name}, is in use; ss -tanp shows by what")


if __name__ == "__main__":
    main()
