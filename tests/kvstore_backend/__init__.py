"""Tests of ``kvstore_backend``, a file each; the contract that all stores pass is in ``conformance``."""
