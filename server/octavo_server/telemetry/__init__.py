"""What a node says about itself: a snapshot, metrics, health, logs."""
