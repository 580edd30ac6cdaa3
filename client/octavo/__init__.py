"""Octavo's client."""
