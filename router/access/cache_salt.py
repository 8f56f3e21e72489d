"""CacheSalts: a ``cache_salt`` for each client, so that no client can find out another client's prompts by timing.

A salt is a hash of the client's name, keyed with a secret that is derived from the client's API key. Without the key it
cannot be guessed. It is equal in all processes and after each start with the same file, and no other secret has to be
stored. A client with a new key begins with an empty cache. A salt that the client sends is mixed in, not refused: a
client that serves several users can continue to separate them, and cannot reach another client's cache.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

__all__ = ["CacheSalts"]

_SALT_BYTES = 16


class CacheSalts:
    """Derives the salts of clients."""

    def __init__(self, keys: Mapping[str, str]) -> None:
        """
        Args:
            keys: the API keys, by client name.
        """
        self._secrets: dict[str, bytes] = {}
        self.update(keys)

    def update(self, keys: Mapping[str, str]) -> None:
        """Use these keys from now on. A client without a key may still have running requests."""
        self._secrets |= {
            name: hashlib.blake2b(key.encode(), person=b"cache_salt").digest() for name, key in keys.items()
        }

    def derive(self, client: str, own: str = "") -> str:
        """Return the salt of a request.

        Args:
            own: the salt that the client sent; ``""`` if it sent none.
        """
        # The length of the name is part of the hash input, so that name and salt cannot be confused with each other.
        name = client.encode()
        text = b"%d:%s:%s" % (len(name), name, own.encode(errors="surrogatepass"))
        return hashlib.blake2b(text, key=self._secrets[client], digest_size=_SALT_BYTES).hexdigest()
