"""Loaded into the process that workers are forked from, and nowhere else.

A signal to the router as a group of processes (by systemd, docker, Ctrl-C) is meant for the supervisor: the others
obey it. Were this process to end by itself, the supervisor could not tell a worker that serves from one that died.
"""

from __future__ import annotations

import signal

import router.launch.worker  # noqa: F401  # workers are forked with all that they need

__all__: list[str] = []

signal.signal(signal.SIGTERM, signal.SIG_IGN)
