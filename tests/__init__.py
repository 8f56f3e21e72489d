"""The tests are a package so that they share ``tests.support``."""
