"""Tests of ``kvstore_backend``, a file each, beside the contract that all its stores pass (``tests/conformance``)."""
