"""Pipeline schedules: passes, generators, checks and simulation. Imports no torch."""
