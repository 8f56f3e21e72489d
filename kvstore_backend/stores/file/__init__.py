"""A pool in a folder that several processes share."""

from kvstore_backend.stores.file.store import FileStore

__all__ = ["FileStore"]
