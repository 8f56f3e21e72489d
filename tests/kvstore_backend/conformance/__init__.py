"""The contract of stores, wrappers and stacks: written once in ``suite.py``, joined by one small class each."""
