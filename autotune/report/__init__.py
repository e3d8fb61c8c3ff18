"""Draws schedules and prints tables."""
