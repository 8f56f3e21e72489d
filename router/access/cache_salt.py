"""CacheSalts: computes a ``cache_salt`` for each client, which separates the cached blocks of different clients.

Without salts, a client could find out by timing whether another client's prompt is cached.

A salt is a hash of the client's name, with a secret key that is derived from the client's API key. Nobody can guess the
salt without the API key. The salt is equal in all processes and after each start with the same file of keys, so no
further secret has to be stored. A client that gets a new API key begins with an empty cache.

If a client sends its own ``cache_salt``, the hash includes it. So a client can still separate its users, and cannot
reach another client's cache.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

__all__ = ["CacheSalts"]

_SALT_BYTES = 16


class CacheSalts:
    """Computes the ``cache_salt`` of each client from its API key."""

    def __init__(self, keys: Mapping[str, str]) -> None:
        """
        Args:
            keys: the API keys, by client name.
        """
        self._secrets: dict[str, bytes] = {}
        self.update(keys)

    def update(self, keys: Mapping[str, str]) -> None:
        """Set the API keys. Clients that are not in ``keys`` keep their salts, because their requests may still run."""
        self._secrets |= {
            name: hashlib.blake2b(key.encode(), person=b"cache_salt").digest() for name, key in keys.items()
        }

    def derive(self, client: str, own: str = "") -> str:
        """Return the ``cache_salt`` for a request of ``client``.

        Args:
            client: name of the client.
            own: the ``cache_salt`` that the client sent; ``""`` if it sent none.
        """
        # The hash includes the length of the name, so that no other pair of name and salt gives the same input.
        name = client.encode()
        text = b"%d:%s:%s" % (len(name), name, own.encode(errors="surrogatepass"))
        return hashlib.blake2b(text, key=self._secrets[client], digest_size=_SALT_BYTES).hexdigest()
