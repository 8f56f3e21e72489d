"""What tests of every room need: free ports, waiting with a deadline, children ended by pid, a real pool."""
