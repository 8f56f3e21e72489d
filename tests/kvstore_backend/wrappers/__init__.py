"""Tests of each wrapper alone."""
