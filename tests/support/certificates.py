"""Certificates for a test, made with Debian's ``openssl``."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

__all__ = ["Certificate", "make_certificate", "make_key"]


class Certificate(NamedTuple):
    """A self-signed certificate, and its key."""

    certfile: Path
    keyfile: Path

    def serve(self) -> ssl.SSLContext:
        """Return the context of a server with this certificate."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certfile, self.keyfile)
        return context

    def trust(self) -> ssl.SSLContext:
        """Return the context of a client that trusts only this certificate."""
        return ssl.create_default_context(cafile=self.certfile)


def make_certificate(folder: Path, *names: str) -> Certificate:
    """Make a certificate for ``names``, by default those of loopback, that is valid for a day."""
    made = Certificate(folder / "cert.pem", folder / "key.pem")
    stated = ",".join(names or ("DNS:localhost", "IP:127.0.0.1"))
    _run_openssl(
        *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "1"),
        *("-subj", "/CN=router", "-addext", f"subjectAltName={stated}"),
        *("-addext", "keyUsage=critical,digitalSignature,keyCertSign"),
        *("-keyout", str(made.keyfile), "-out", str(made.certfile)),
    )
    return made


def make_key(path: Path, algorithm: str = "EC", *, password: str = "") -> None:
    """Make a key that belongs to no certificate: of the certificates' algorithm, or of another, such as ED25519."""
    curve = ("-pkeyopt", "ec_paramgen_curve:P-256") if algorithm == "EC" else ()
    encryption = ("-aes-256-cbc", "-pass", f"pass:{password}") if password else ()
    _run_openssl("genpkey", "-algorithm", algorithm, *curve, *encryption, "-out", str(path))


def _run_openssl(*arguments: str) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which makes the certificates, is not on this machine: apt-get install openssl")
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)
