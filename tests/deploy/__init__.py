"""Tests of deploy/: whatever an operator takes from there as it is."""
