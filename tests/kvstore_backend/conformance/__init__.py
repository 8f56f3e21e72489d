"""What every store and every layer must do: written once in ``suite.py``, joined by one small class each."""
