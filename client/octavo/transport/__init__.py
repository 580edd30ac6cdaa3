"""Ways to move pages between a node and this process, behind one interface."""
