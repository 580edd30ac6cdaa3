"""The gRPC services, sessions, and the broker of shared memory."""
