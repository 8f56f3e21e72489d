"""The contract of stores, wrappers and stacks: ``suite.py`` has the tests, and each backend has a small class."""
