"""The contract of stores, wrappers and assembled stacks: written once in ``suite.py``, joined by one small class each."""
