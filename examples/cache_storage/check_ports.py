"""``check_ports.py NAME=PORT...``: exits 0 when a server can listen on every port, or 1 with a line for each used port.

The scripts use FastDeploy's port numbers. Linux may give the same numbers to the client ends of connections. A client
end keeps its port for a minute after it was closed. If no server listens on a port that is in use, this program thus
waits until the port is free.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

CLOSED_CONNECTION = 70.0  # seconds: a little longer than TCP's TIME-WAIT


def can_be_bound(port: int) -> bool:
    """Return whether a server can listen on this port now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            return False
        return True


def is_served(port: int) -> bool:
    """Return whether a server accepts connections on this port."""
    with socket.socket() as probe:
        probe.settimeout(2.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def become_free(name: str, port: int) -> bool:
    """Wait until the port is free; return False if a server listens on it, or if it is still in use at the deadline."""
    give_up = time.monotonic() + CLOSED_CONNECTION
    printed = False
    while not can_be_bound(port):
        if is_served(port) or time.monotonic() > give_up:
            return False
        if not printed:
            print(f"waiting for port {port}, wanted for {name}: a closed connection still uses it", flush=True)
            printed = True
        time.sleep(0.5)
    return True


def describe_user(pid: int | None) -> str:
    """Describe the process that listens on a port, as far as /proc shows it. Often it is another run of a script."""
    if pid is None:
        return "; ss -tanp shows the process"
    command = read_command(pid)
    process = f" by process {pid} ({command[:120]})" if command else f" by process {pid}"
    for parent in list_parents(pid):
        if (script := re.search(r"run\w*\.sh", read_command(parent))) is not None:
            return f"{process}, of {script[0]} (process {parent}): end that first, with Ctrl-C or kill {parent}"
    if is_left_over(pid):
        return f"{process}, which a killed script has probably left: end that first, with kill {pid}"
    return f"{process}: end that first, or take other ports"


def is_left_over(pid: int) -> bool:
    """Return whether a script has probably started the process: in this folder, in a session of its own."""
    with contextlib.suppress(OSError):
        return (
            Path(f"/proc/{pid}/cwd").resolve(strict=True) == Path(__file__).resolve().parent and os.getsid(pid) == pid
        )
    return False


def find_listener(port: int) -> int | None:
    """Return the process that listens on the port; None if there is none, or if it belongs to another user."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:  # LISTEN
                    inodes.add(f"socket:[{fields[9]}]")
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if inodes and any(os.readlink(each) in inodes for each in (folder / "fd").iterdir()):
                return int(folder.name)
    return None


def read_command(pid: int) -> str:
    """Return the command line of a process; empty if it cannot be read."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    text = " ".join(word.decode(errors="replace") for word in words).strip()
    return "".join(each if each.isprintable() else "?" for each in text)


def list_parents(pid: int) -> Iterator[int]:
    """Yield the ids of the parent process, of its parent, and so on."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        while pid > 1:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            yield pid


def main() -> None:
    """Check all ports, and describe those in use in the order of the command line."""
    used = []
    for entry in sys.argv[1:]:
        name, _, port = entry.rpartition("=")
        if not become_free(name, int(port)):
            used.append(f"port {port}, wanted for {name}, is in use{describe_user(find_listener(int(port)))}")
    if used:
        sys.exit("\n".join(used))


if __name__ == "__main__":
    main()
