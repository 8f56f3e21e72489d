"""Preloaded into the process from which workers are forked (the fork server), and nowhere else.

A signal to the router's process group (from systemd, docker, Ctrl-C) is meant for the supervisor, which stops the other
processes. If this process ended by itself, the supervisor could not distinguish a live worker from a dead one.
"""

from __future__ import annotations

import signal

import router.launch.worker  # noqa: F401  # workers are forked with all modules that they need

__all__: list[str] = []

signal.signal(signal.SIGTERM, signal.SIG_IGN)
