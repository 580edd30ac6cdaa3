"""The demo: a real model whose chat outlives its worker, and then its node."""
