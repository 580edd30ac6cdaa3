"""Which node holds which page: the prefix index of a cluster.

Start with ``prefix_index.py``: what an index promises. ``local_index.py`` is one in this
process, ``redis_index.py`` is the one on Redis. ``publisher.py`` keeps a holder's entries true,
``heartbeat.py`` keeps its lease, ``sweeper.py`` clears up behind the dead.
"""
