"""Loaded into the fork server, the process from which workers are forked; not imported by other modules.

A signal to the router's process group (from systemd, docker or Ctrl-C) also reaches the fork server, which ignores it:
the supervisor stops all other processes. If the fork server ended by itself, the supervisor could not detect which
workers have died.
"""

from __future__ import annotations

import signal

import router.launch.worker  # noqa: F401  # so that workers have all modules when they are forked

__all__: list[str] = []

for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
