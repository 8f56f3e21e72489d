"""A certificate that is renewed while the router runs, seen by TLS clients."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import socket
import ssl
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import httpx
import pytest

from router.settings import ServedCertificate, served_certificate
from tests.support.certificates import Certificate, make_certificate
from tests.support.processes import child
from tests.support.waiting import wait_until


@pytest.fixture
def first(tmp_path: Path) -> Certificate:
    """The certificate in the files of the router."""
    return make_certificate(_make_folder(tmp_path, "served"))


@pytest.fixture
def renewed(tmp_path: Path) -> Certificate:
    return make_certificate(_make_folder(tmp_path, "renewed"))


def _make_folder(parent: Path, name: str) -> Path:
    (parent / name).mkdir()
    return parent / name


def replace(files: Certificate, by: Certificate) -> None:
    """Replace the two files in turn, as a renewal does."""
    shutil.copy(by.certfile, files.certfile)
    shutil.copy(by.keyfile, files.keyfile)


@contextlib.asynccontextmanager
async def serving(files: Certificate) -> AsyncIterator[Callable[[ssl.SSLContext], Awaitable[bool]]]:
    """Serve a port that checks for a renewed certificate. Yield a function that tests if a client trusts it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    served = ServedCertificate(context, str(files.certfile), str(files.keyfile))
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]
    keeping = asyncio.ensure_future(served.keep_current())
    try:
        yield lambda trust: asyncio.to_thread(_is_trusted, port, trust)
    finally:
        keeping.cancel()
        server.close()


def _is_trusted(port: int, trust: ssl.SSLContext) -> bool:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as plain:
        try:
            trust.wrap_socket(plain, server_hostname="127.0.0.1").close()
        except ssl.SSLCertVerificationError:
            return False
    return True


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    deadline = time.monotonic() + 20
    while not await condition():
        assert time.monotonic() < deadline, "the condition is still false"
        await asyncio.sleep(0.01)


def test_new_connections_get_the_renewed_certificate(
    first: Certificate, renewed: Certificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_certificate, "CHECK_SECONDS", 0.01)
    old, new = first.trust(), renewed.trust()

    async def run() -> None:
        async with serving(first) as is_trusted:
            assert await is_trusted(old)
            replace(first, renewed)
            await until(lambda: is_trusted(new))
            assert not await is_trusted(old)

    asyncio.run(run())


def test_an_unusable_certificate_is_logged_and_the_previous_one_stays_in_use(
    first: Certificate, renewed: Certificate, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(served_certificate, "CHECK_SECONDS", 0.01)
    old, new = first.trust(), renewed.trust()

    async def is_logged() -> bool:
        return (
            "the renewed certificate cannot be used, so the previous certificate stays in use: the key in"
            in caplog.text
        )

    async def run() -> None:
        async with serving(first) as is_trusted:
            shutil.copy(renewed.certfile, first.certfile)  # but not its key
            await until(is_logged)
            assert await is_trusted(old)
            replace(first, renewed)
            await until(lambda: is_trusted(new))

    asyncio.run(run())


def test_a_temporarily_missing_file_has_no_effect(
    first: Certificate, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(served_certificate, "CHECK_SECONDS", 0.01)
    old = first.trust()

    async def is_logged() -> bool:
        return "No such file or directory" in caplog.text

    async def run() -> None:
        async with serving(first) as is_trusted:
            first.keyfile.rename(first.keyfile.with_suffix(".away"))
            await until(is_logged)
            assert await is_trusted(old)

    asyncio.run(run())


def test_all_processes_use_the_renewed_certificate(first: Certificate, renewed: Certificate, tmp_path: Path) -> None:
    old, new = first.trust(), renewed.trust()
    argv = [sys.executable, "-m", "router.launch", "--host", "127.0.0.1", "--port", "0", "--workers", "2"]
    argv += ["--ssl-certfile", str(first.certfile), "--ssl-keyfile", str(first.keyfile)]
    with child(argv, tmp_path / "router.log") as process:
        process.wait_for(lambda: "router listens at" in process.output, "its start")
        found = re.search(r"router listens at (https://\S+:\d+)", process.output)
        assert found, process.output
        assert httpx.get(f"{found[1]}/health", verify=old, trust_env=False).status_code == 200
        replace(first, renewed)
        wait_until(lambda: process.output.count("was renewed") == 2, "both processes to use it")
        for _ in range(4):
            assert httpx.get(f"{found[1]}/health", verify=new, trust_env=False).status_code == 200
