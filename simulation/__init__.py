"""Deterministic simulation: runs the packages' own code in virtual time, on a network in memory, with faults.

A seed determines everything. ``docs/simulation.md`` says which parts are real. ``world/`` is the core. Each module
``*_world.py`` has a world: programs that run together, their faults, and the rules that must hold.
"""
