"""Errors that are shown to the user as a message, never as a traceback."""

__all__ = ["UserError"]


class UserError(Exception):
    """A mistake in what the user gave: the message names the value, the rule and the legal values; exit code 2."""
