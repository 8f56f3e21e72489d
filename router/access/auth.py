"""Auth: the API keys of clients, the admin token of operators, and the registration token of instances.

All these secrets are sent as ``Authorization: Bearer ...``. Auth stores only a keyed hash of each secret. So neither
the time of a look-up nor a memory dump reveals a secret. The files with the secrets are read again when they change.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import logging
import secrets
from pathlib import Path

from router.access.cache_salt import CacheSalts
from router.access.routes import Access
from router.http import ApiError, Headers, Refused
from router.settings import (
    PRIORITIES,
    ApiKey,
    RouterSettings,
    SettingsError,
    parse_priority,
    read_keys,
    read_token,
    stamp_file,
)

__all__ = ["Auth"]

_log = logging.getLogger("router.access.auth")

CHECK_SECONDS = 1.0
_SCHEME = b"bearer "


class Auth:
    """Checks the API keys and tokens that are sent with requests. The settings name the files of the valid secrets."""

    def __init__(self, settings: RouterSettings) -> None:
        """
        Raises:
            SettingsError: a file cannot be read, or contains no usable entry.
        """
        self._settings = settings
        self._salt = secrets.token_bytes(32)
        self._clients: dict[bytes, str] = {}
        self._priorities: dict[str, int] = {}
        self.token_rates: dict[str, float] = {}
        """Limits of tokens per second, of clients that have their own limit. A changed file changes this dictionary."""
        self.cache_salts = CacheSalts({}) if settings.cache_salt_per_key else None
        """Cache salts of the clients; None if the clients' caches are not separated."""
        self.tags: dict[str, str] = {}
        """For each client, a suffix of its request ids at engines, so that two clients' ids are never equal."""
        self._admin: bytes | None = None
        self._registration: bytes | None = None
        self._stamp = self._stamp_files()
        self._read_files()
        self.danger = ""
        """One sentence that warns of unprotected access from the network; ``""`` if access is protected."""
        if self._admin is None and not _is_loopback(settings.host):
            misuse = "drain instances and list their addresses"
            if self._registration is None:
                misuse = "register an instance and read the requests sent to it"
            self.danger = (
                f"any client that reaches {settings.host} can {misuse}; set --admin-token-file, or --host 127.0.0.1"
            )

    async def keep_current(self, *, is_logged: bool = True) -> None:
        """Read the files again whenever one of them changes, until this task is cancelled.

        If a changed file cannot be used, the secrets that were read before stay valid.

        Args:
            is_logged: whether to log changes. If there are several processes, only one of them needs to.
        """
        seen = self._stamp
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            stamp = self._stamp_files()
            if stamp == seen != self._stamp:  # no change since the last check, so the files are completely written
                self._stamp = stamp
                level, text = self._read_again()
                if is_logged:
                    _log.log(level, "%s", text)
            seen = stamp

    @property
    def has_admin_token(self) -> bool:
        """Whether an admin token is configured. If not, every client may change the instances."""
        return self._admin is not None

    def identify_client(self, headers: Headers) -> str:
        """Return the name of the client whose API key was sent; ``""`` if no API keys are configured.

        Raises:
            Refused: status 401: no key was sent, or the key is unknown.
        """
        if not self._clients:
            return ""
        sent = _find_bearer_token(headers)
        if sent is None:
            message = "this router requires an API key; send it as 'Authorization: Bearer KEY'"
            raise Refused(ApiError(401, message, "missing_api_key"))
        name = self._clients.get(self._hash_secret(sent))
        if name is None:
            raise Refused(ApiError(401, "the API key is not one that this router accepts", "invalid_api_key"))
        return name

    def check_access(self, access: Access, headers: Headers) -> None:
        """Check that the sender of these headers has the access that a path requires.

        Raises:
            Refused: status 401: the required key or token was not sent.
        """
        if access is Access.CLIENT:
            self.identify_client(headers)
        elif access is Access.CLIENT_OR_ADMIN:
            self.find_scope(headers)
        elif access is Access.INSTANCE or (access is Access.INSTANCE_IF_ADMIN and self.has_admin_token):
            self.check_registration(headers)
        elif access is not Access.OPEN:
            self.check_admin(headers)

    def find_scope(self, headers: Headers) -> str:
        """Return the tag (see ``tags``) of the sender, which is a client that may list and abort only its own requests.

        Return ``""`` for the admin, and if no API keys are configured. The sender may then list and abort all requests.

        Raises:
            Refused: status 401: neither an API key nor the admin token was sent.
        """
        if not self._clients or self.is_admin(headers):
            return ""
        return self.tags[self.identify_client(headers)]

    def find_priority(self, client: str, headers: Headers) -> int:
        """Return the priority of a request: the client's priority, or a lower one from the header ``X-Priority``.

        If no API keys are configured, the header alone decides.

        Raises:
            Refused: status 400: the header has no valid priority.
        """
        own = self._priorities.get(client)
        for name, value in headers:
            if name == b"x-priority":
                asked = parse_priority(value.decode("latin-1"))
                if asked is None:
                    message = f"the header X-Priority must be a whole number from {PRIORITIES[0]} to {PRIORITIES[-1]}"
                    raise Refused(ApiError(400, message, "invalid_header", "X-Priority"))
                return asked if own is None else min(asked, own)
        return own or 0

    def is_admin(self, headers: Headers) -> bool:
        """Return whether the admin token was sent; False if no admin token is configured."""
        sent = _find_bearer_token(headers) if self._admin is not None else None
        return sent is not None and secrets.compare_digest(self._hash_secret(sent), self._admin or b"")

    def check_admin(self, headers: Headers) -> None:
        """Check that the admin token was sent. Do nothing if no admin token is configured.

        Raises:
            Refused: status 401: the token was not sent, or is wrong.
        """
        if self._admin is None:
            return
        sent = _find_bearer_token(headers)
        if sent is None:
            message = "this path requires the router's admin token; send it as 'Authorization: Bearer TOKEN'"
            raise Refused(ApiError(401, message, "missing_admin_token"))
        if not secrets.compare_digest(self._hash_secret(sent), self._admin):
            raise Refused(ApiError(401, "the token is not the router's admin token", "invalid_admin_token"))

    def check_registration(self, headers: Headers) -> None:
        """Check that the sender may register an instance: that it sent the admin token or the registration token.

        Do nothing if neither token is configured.

        Raises:
            Refused: status 401: neither token was sent.
        """
        if self._registration is None:
            self.check_admin(headers)
            return
        sent = _find_bearer_token(headers)
        if sent is None:
            message = "this path requires the router's registration token; send it as 'Authorization: Bearer TOKEN'"
            raise Refused(ApiError(401, message, "missing_register_token"))
        digest = self._hash_secret(sent)
        if not any(token and secrets.compare_digest(digest, token) for token in (self._registration, self._admin)):
            message = "the token is neither the router's registration token nor its admin token"
            raise Refused(ApiError(401, message, "invalid_register_token"))

    def _read_files(self) -> None:
        """Read all files. If one of them cannot be used, nothing changes."""
        settings = self._settings
        keys: dict[str, ApiKey] = {}
        if settings.api_keys_file:
            keys = read_keys(Path(settings.api_keys_file), "server.api-keys-file")
        admin = self._read_token(settings.admin_token_file, "server.admin-token-file")
        registration = self._read_token(settings.register_token_file, "server.register-token-file")
        self._admin, self._registration = admin, registration
        self._clients = {self._hash_secret(entry.key.encode()): name for name, entry in keys.items()}
        self._priorities = {name: entry.priority for name, entry in keys.items()}
        rates = {name: entry.tokens_per_sec for name, entry in keys.items() if entry.tokens_per_sec is not None}
        self.token_rates.clear()
        self.token_rates.update(rates)
        if self.cache_salts is not None:
            self.cache_salts.update({name: entry.key for name, entry in keys.items()})
        self.tags = {name: _tag_client(name) for name in keys}

    def _read_again(self) -> tuple[int, str]:
        """Read changed files again. Return the level and the text of a log message about the result."""
        try:
            self._read_files()
        except SettingsError as exc:
            return (
                logging.ERROR,
                f"a changed file of keys or tokens cannot be used; the previous keys and tokens stay valid: {exc}",
            )
        return logging.INFO, f"the files of keys and tokens were read again; {len(self._clients)} API keys are valid"

    def _stamp_files(self) -> list[tuple[int, int] | None]:
        settings = self._settings
        names = (settings.api_keys_file, settings.admin_token_file, settings.register_token_file)
        return [stamp_file(Path(name)) for name in names if name]

    def _read_token(self, path: str, setting: str) -> bytes | None:
        """Return the hash of the token in a file; None if ``path`` is empty."""
        return self._hash_secret(read_token(Path(path), setting).encode()) if path else None

    def _hash_secret(self, secret: bytes) -> bytes:
        return hashlib.blake2b(secret, key=self._salt, digest_size=32).digest()


def _find_bearer_token(headers: Headers) -> bytes | None:
    for name, value in headers:
        if name == b"authorization" and value[:7].lower() == _SCHEME:
            return value[7:].strip()
    return None


def _tag_client(name: str) -> str:
    """Return the tag of a client: the digest of its name that ends its request ids at engines."""
    return "-k" + hashlib.blake2b(name.encode(), person=b"request_id", digest_size=6).hexdigest()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
