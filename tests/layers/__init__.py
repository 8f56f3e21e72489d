"""Each layer alone."""
