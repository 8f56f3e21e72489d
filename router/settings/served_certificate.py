"""ServedCertificate: the router's certificate for clients, loaded again whenever its files have changed."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path

from router.settings.router_settings import SettingsError
from router.settings.secret_file import stamp_file
from router.settings.tls_files import load_certificate

__all__ = ["ServedCertificate"]

_log = logging.getLogger("router.settings.served_certificate")

LOOK_SECONDS = 2.0

# For each file: modification time and inode; None if it does not exist.
_Stamp = list[tuple[int, int] | None]


class ServedCertificate:
    """The certificate of one port."""

    def __init__(self, context: ssl.SSLContext, certfile: str, keyfile: str) -> None:
        """
        Args:
            context: the TLS context of the port, into which the certificate is loaded.
            certfile, keyfile: as in ``load_certificate``.

        Raises:
            SettingsError: the certificate or its key cannot be used.
        """
        self._context = context
        self._certfile, self._keyfile = certfile, keyfile
        self._loaded = self._stamp_files()
        load_certificate(context, certfile, keyfile)

    def __repr__(self) -> str:
        return f"<ServedCertificate {self._certfile}>"

    async def keep_current(self) -> None:
        """Load each renewed certificate for new connections, until cancelled.

        If one cannot be used, this is logged, and the previous one stays.
        """
        seen = self._loaded
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            stamp = self._stamp_files()
            if stamp == seen != self._loaded:  # both files are written: the second may change shortly after the first
                self._loaded = stamp
                self._load_again()
            seen = stamp

    def _load_again(self) -> None:
        try:
            # Tried with another context first: a context with half of a pair could not serve any client.
            for context in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), self._context):
                load_certificate(context, self._certfile, self._keyfile)
        except SettingsError as exc:
            _log.error("the renewed certificate is not taken, and the one before it stays: %s", exc)
        else:
            _log.info("the certificate in %s was renewed", self._certfile)

    def _stamp_files(self) -> _Stamp:
        return [stamp_file(Path(name)) for name in (self._certfile, self._keyfile) if name]
