"""Pool in a folder that several processes share.

store.py   FileStore: keys to files, and bytes between files and memory
ledger.py  Ledger: permissions to write, evictions, and the clean-up after writers that were killed
folder.py  the files in a folder, and which folder may be a pool's
"""

from kvstore_backend.stores.file.store import FileStore

__all__ = ["FileStore"]
