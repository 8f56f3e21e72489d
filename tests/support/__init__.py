"""Helpers of many tests: free ports, waits with a deadline, child processes, a real pool, simulated engines."""
