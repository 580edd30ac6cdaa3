"""``octavo doctor``: what about this machine is in Octavo's way, and what to do about it."""
