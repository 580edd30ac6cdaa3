"""Where page bytes lie: the arena in shared memory and the NVMe store."""
