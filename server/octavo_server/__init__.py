"""Octavo's node."""
