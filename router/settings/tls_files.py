"""Files with certificates and keys for TLS. An error in a file is reported in one sentence."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import NoReturn

from router.settings.router_settings import SettingsError

__all__ = ["CERTIFICATE_REMEDY", "is_certificate_refused", "load_certificate", "read_authorities"]

CERTIFICATE_REMEDY = "has a certificate of an unknown authority; give the authority's certificate with --ca-file FILE"
"""Advice for an operator, used if ``is_certificate_refused`` returns True."""

_CERTIFICATE, _KEY = "-----BEGIN CERTIFICATE-----", "PRIVATE KEY-----"
# OpenSSL's error codes for a key that belongs to another certificate; the last two: its algorithm is different.
_MISMATCHES = ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH", "NO_CERTIFICATE_ASSIGNED")


def load_certificate(context: ssl.SSLContext, certfile: str, keyfile: str) -> None:
    """Load the certificate and the key of a server into its TLS context.

    Args:
        context: the TLS context of the server.
        certfile: the file with the certificate, and with intermediate certificates if there are any.
        keyfile: the file with the key; ``""`` if ``certfile`` contains the key.

    Raises:
        SettingsError: a file cannot be read or used, or key and certificate do not belong together.
    """
    certificate = f"server.ssl-certfile {certfile}"
    key = f"server.ssl-keyfile {keyfile}" if keyfile else certificate
    text = _read_text(Path(certfile), certificate)
    if _CERTIFICATE not in text:
        raise SettingsError(f"{certificate} has no certificate in it, which would begin with '{_CERTIFICATE}'")
    if _KEY not in (_read_text(Path(keyfile), key) if keyfile else text):
        hint = "" if keyfile else "; name its file with server.ssl-keyfile"
        raise SettingsError(f"{key} has no private key in it, which would begin with '-----BEGIN {_KEY}'{hint}")

    def refuse_password() -> NoReturn:
        raise SettingsError(f"the key in {key} has a password; write it without: openssl pkey -in KEY -out NEW_KEY")

    try:
        context.load_cert_chain(certfile, keyfile or None, refuse_password)
    except ssl.SSLError as exc:
        if exc.reason in _MISMATCHES:
            raise SettingsError(f"the key in {key} is not the key of the certificate in {certificate}") from exc
        if exc.reason not in (None, "PEM_LIB"):
            reason = str(exc.reason).replace("_", " ").lower()
            raise SettingsError(f"{certificate} and its key cannot be used: {reason}") from exc
        damaged = f"the key in {key}" if _is_readable(text) else f"the certificate in {certificate}"
        raise SettingsError(f"{damaged} is damaged") from exc


def read_authorities(path: str, setting: str) -> ssl.SSLContext:
    """Return a TLS context for a client that trusts only the certificate authorities in a file.

    Args:
        path: the file.
        setting: name of the setting with the path, for messages.

    Raises:
        SettingsError: the file cannot be read, or contains no usable certificate.
    """
    where = f"{setting} {path}"
    if _CERTIFICATE not in _read_text(Path(path), where):
        raise SettingsError(f"{where} has no certificate in it, which would begin with '{_CERTIFICATE}'")
    try:
        return ssl.create_default_context(cafile=path)
    except ssl.SSLError as exc:
        raise SettingsError(f"a certificate in {where} is damaged") from exc


def is_certificate_refused(exc: Exception) -> bool:
    """Return whether a connection failed because the peer's certificate was issued by an unknown authority.

    A retry does not help in this case.
    """
    reason = str(exc).lower()
    unknown = (
        "self-signed certificate",
        "self signed certificate",
        "unable to get local issuer",
        "unable to get issuer",
    )
    return "certificate verify failed" in reason and any(each in reason for each in unknown)


def _read_text(path: Path, where: str) -> str:
    try:
        return path.read_text(encoding="latin-1")  # any text may be in front of a certificate
    except OSError as exc:
        raise SettingsError(f"{where}: {exc.strerror}") from exc


def _is_readable(certificates: str) -> bool:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(
            cadata="".join(certificates.partition(_CERTIFICATE)[1:])
        )
    except (ssl.SSLError, ValueError):
        return False
    return True
