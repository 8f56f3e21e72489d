"""A mock of a Kubernetes API server: lists and watches of pods. The tests have no real cluster.

It is as strict as a real server about paths, parameters, tokens, pages and resource versions, of which it stores only
the last ones. It refuses an unknown parameter with status 400, so that a test finds a wrong parameter.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.support.certificates import Certificate
from tests.support.threaded_http import QuietHandler, ThreadedServer

__all__ = ["KubernetesApi", "make_pod"]

TOKEN = "service-account-token"


def make_pod(name: str, ip: str = "127.0.0.1", **changes: Any) -> dict[str, Any]:
    """Return a ready pod, as the API server represents it.

    Args:
        changes: ``labels``, ``annotations``, ``ready``, ``port`` (None for no port), ``restarts``, ``terminating``.
    """
    port = changes.get("port", 8000)
    metadata: dict[str, Any] = {
        "name": name,
        "namespace": "ns",
        "uid": f"uid-{name}",
        "labels": {"app": "kv", **changes.get("labels", {})},
        "annotations": changes.get("annotations", {}),
    }
    if changes.get("terminating"):
        metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    ports = [{"name": "http", "containerPort": port}] if port else []
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {"containers": [{"name": "engine", "ports": ports}]},
        "status": {
            "phase": "Running",
            "podIP": ip,
            "conditions": [{"type": "Ready", "status": "True" if changes.get("ready", True) else "False"}],
            "containerStatuses": [{"name": "engine", "restartCount": changes.get("restarts", 0)}],
        },
    }


class KubernetesApi:
    """The API server of a cluster with one namespace, ``ns``."""

    def __init__(self, folder: Path, certificate: Certificate | None = None, page: int = 1000) -> None:
        """
        Args:
            folder: for the files of a service account, which a pod has.
            certificate: the server's certificate for HTTPS; None for plain HTTP, as from ``kubectl proxy``.
            page: maximum number of pods in a page of a list.
        """
        self.account = folder
        self.token = TOKEN
        self.lists = self.watches = 0
        self.refuses = 0
        """The status of all responses; 0 for the usual responses."""
        self._page = page
        self._lock = threading.Lock()
        self._version = 100
        self._oldest = 100
        self._pods: dict[str, dict[str, Any]] = {}
        self._events: list[tuple[int, dict[str, Any]]] = []
        self._watchers: list[queue.Queue[dict[str, Any] | None]] = []
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "token").write_text(TOKEN)
        (folder / "namespace").write_text("ns")
        if certificate is not None:
            (folder / "ca.crt").write_bytes(certificate.certfile.read_bytes())
        self._certificate = certificate
        self._server: ThreadedServer | None = None
        self._port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"{'https' if self._certificate else 'http'}://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start the server, at its earlier port if it had one."""
        api = self

        class Handler(QuietHandler):
            def do_GET(self) -> None:
                api._answer(self)

        self._server = ThreadedServer(Handler, self._port)
        if self._certificate is not None:
            self._server.socket = self._certificate.serve().wrap_socket(self._server.socket, server_side=True)
        self._port = self._server.server_address[1]
        self._server.start()

    def stop(self) -> None:
        """Stop the server, and end all watches."""
        if self._server is not None:
            self._server.stop()
            self._server = None
        self.end_watches()

    def put(self, pod: dict[str, Any]) -> None:
        """Add or change a pod."""
        with self._lock:
            name = pod["metadata"]["name"]
            self._note("MODIFIED" if name in self._pods else "ADDED", pod)
            self._pods[name] = pod

    def delete(self, name: str) -> None:
        """Delete a pod."""
        with self._lock:
            self._note("DELETED", self._pods.pop(name))

    def send_bookmark(self) -> None:
        """Send a bookmark: the version from which the watchers may continue."""
        with self._lock:
            self._version += 1
            event = {"type": "BOOKMARK", "object": {"kind": "Pod", "metadata": {"resourceVersion": str(self._version)}}}
            for watcher in self._watchers:
                watcher.put(event)

    def forget_history(self) -> None:
        """Forget all earlier versions. The response to a watch from an earlier version is then 410 Gone."""
        with self._lock:
            self._version += 1
            self._oldest = self._version
            self._events.clear()

    def end_watches(self, last: dict[str, Any] | None = None) -> None:
        """End all watches, as their timeout does, after the event ``last``."""
        with self._lock:
            watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            if last is not None:
                watcher.put(last)
            watcher.put(None)

    @property
    def num_watchers(self) -> int:
        return len(self._watchers)

    def _note(self, kind: str, pod: dict[str, Any]) -> None:
        self._version += 1
        pod["metadata"]["resourceVersion"] = str(self._version)
        event = {"type": kind, "object": pod}
        self._events.append((self._version, event))
        for watcher in self._watchers:
            watcher.put(event)

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        target = urlsplit(request.path)
        query = {name: values[-1] for name, values in parse_qs(target.query, strict_parsing=True).items()}
        if self.refuses:
            self._fail(request, self.refuses, "the API server is told to refuse")
        elif self._certificate and request.headers["authorization"] != f"Bearer {self.token}":
            self._fail(request, 401, "Unauthorized")
        elif target.path not in ("/api/v1/namespaces/ns/pods", "/api/v1/pods"):
            self._fail(request, 403, f"pods is forbidden: cannot list {target.path}")
        elif query.pop("labelSelector", None) != "app=kv":
            self._fail(request, 400, "this mock knows the selector app=kv alone")
        elif query.pop("watch", None) == "true":
            self._watch(request, query)
        else:
            self._list(request, query)

    def _list(self, request: BaseHTTPRequestHandler, query: dict[str, str]) -> None:
        start, limit = int(query.pop("continue", 0)), min(self._page, int(query.pop("limit", self._page)))
        if query:
            self._fail(request, 400, f"unknown parameters: {query}")
            return
        with self._lock:
            self.lists += 1
            pods = sorted(self._pods.values(), key=lambda pod: str(pod["metadata"]["name"]))
            metadata = {"resourceVersion": str(self._version)}
        if start + limit < len(pods):
            metadata["continue"] = str(start + limit)
        self._send(request, 200, {"kind": "PodList", "metadata": metadata, "items": pods[start : start + limit]})

    def _watch(self, request: BaseHTTPRequestHandler, query: dict[str, str]) -> None:
        version = int(query.pop("resourceVersion"))
        if query.pop("allowWatchBookmarks") != "true" or int(query.pop("timeoutSeconds")) < 1 or query:
            self._fail(request, 400, f"unknown parameters: {query}")
            return
        events: queue.Queue[dict[str, Any] | None] = queue.Queue()
        with self._lock:
            self.watches += 1
            is_gone = version < self._oldest
            for number, event in self._events:
                if number > version:
                    events.put(event)
            if not is_gone:
                self._watchers.append(events)
        request.send_response(200)
        request.send_header("content-type", "application/json")
        request.send_header("transfer-encoding", "chunked")
        request.end_headers()
        if is_gone:  # a real server, too, reports this in the stream
            status = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
            self._write_events(request, iter([{"type": "ERROR", "object": status}]))
        else:
            self._write_events(request, iter(events.get, None))

    def _write_events(self, request: BaseHTTPRequestHandler, events: Iterator[dict[str, Any] | None]) -> None:
        for event in events:
            data = json.dumps(event).encode() + b"\n"
            half = len(data) // 2  # an event may arrive in pieces
            for piece in (data[:half], data[half:]):
                request.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                request.wfile.flush()
        request.wfile.write(b"0\r\n\r\n")

    def _fail(self, request: BaseHTTPRequestHandler, code: int, message: str) -> None:
        self._send(request, code, {"kind": "Status", "status": "Failure", "code": code, "message": message})

    def _send(self, request: BaseHTTPRequestHandler, status: int, document: dict[str, Any]) -> None:
        body = json.dumps(document).encode()
        request.send_response(status)
        request.send_header("content-length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)
