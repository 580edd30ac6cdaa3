"""Page bytes over plain TCP, for workers that cannot map the node's memory."""
