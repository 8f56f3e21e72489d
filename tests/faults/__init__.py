"""Faults, injected and real: no wrong byte, no exception, no stall beyond a deadline."""
