"""Deterministic simulation: the packages' own code in virtual time, on a network in memory, with faults; a seed
determines everything. ``docs/simulation.md`` says what is real; ``world/`` is the core, the rest are the worlds.
"""
