"""``python -m engine.api_server``: runs one instance, with OpenAI's endpoints and FastDeploy's flags."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Sequence
from socket import socket
from typing import TYPE_CHECKING

from engine.args import EngineArgs, parse_args
from engine.serving.ports import bind_socket, start_listening
from engine.serving.surroundings import Surroundings, find_surroundings
from engine.telemetry import logs
from kvcommon.output import run_program
from kvstore_backend import KVStoreError

if TYPE_CHECKING:
    from engine.serving.instance import Instance

__all__ = ["main"]

log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run an instance until SIGTERM or SIGINT.

    Returns:
        The exit status: 0 after a normal stop, 1 if the server could not start, 2 if the arguments cannot be used, 130
        if SIGINT arrives before the server starts.
    """
    with contextlib.ExitStack() as sockets:
        try:
            args = parse_args(argv)
            bound = {
                flag: sockets.enter_context(bind_socket(args.host, port, flag))
                for flag, port in _list_ports(args).items()
            }
            logs.set_up(args.log_dir, args.splitwise_role, args.port, args.log_level)
            for remark in args.remarks:
                log.info("%s", remark)
            instance = _load_instance(args, find_surroundings(args), bound["--pd-comm-port"])
            for flag, listener in bound.items():
                start_listening(listener, flag)
            del bound["--pd-comm-port"]  # the instance binds this port itself
        except KeyboardInterrupt:
            return 130
        except (KVStoreError, OSError) as exc:
            print(f"engine.api_server: {exc}", file=sys.stderr)
            return 2
        return _serve(instance, list(bound.values()))


def _list_ports(args: EngineArgs) -> dict[str, int]:
    """Return the ports to bind, each by the name of its flag."""
    ports = {"--port": args.port, "--pd-comm-port": args.pd_comm_port}
    if args.metrics_port and args.metrics_port != args.port:
        ports["--metrics-port"] = args.metrics_port
    return ports


def _load_instance(args: EngineArgs, around: Surroundings, connector: socket) -> Instance:
    """Create the instance and load its model.

    ``around`` has the router, the pool and the checkpoint; ``connector`` is the bound socket of the connector port.
    Only this function imports ``engine.serving.instance``: that module loads torch and transformers, which takes
    seconds.
    """
    from engine.serving.instance import Instance

    return Instance(args, around, connector)


def _serve(instance: Instance, listeners: list[socket]) -> int:
    from engine.serving.server import InstanceServer

    server = InstanceServer(instance)
    # uvicorn handles SIGTERM while it serves, and sends it again to this process at the end. Without this handler, the
    # signal would then end the process as if it had failed.
    signal.signal(signal.SIGTERM, server.handle_exit)
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=listeners)
    return 0 if server.started else 1


if __name__ == "__main__":
    code = run_program("engine.api_server", main)
    logging.shutdown()
    # os._exit instead of sys.exit: a thread in a native call, such as one that waits for a dead master, must not delay
    # the end of the process.
    os._exit(code)
