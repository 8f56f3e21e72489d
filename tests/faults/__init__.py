"""Injected and real faults: they cause no wrong byte, no exception, and no wait beyond a deadline."""
