"""Writes the best plan for a launcher."""
