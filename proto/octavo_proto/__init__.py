"""What both sides of Octavo agree on: the protocol, page identity, layouts and limits."""
