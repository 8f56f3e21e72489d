"""Tests of ``kvstore_backend``, one file for each module; ``conformance`` has the contract of all stores."""
