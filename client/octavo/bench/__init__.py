"""Benchmarks: each measures Octavo beside a ceiling taken in the same run.

``octavo bench NAME --json`` prints what ``octavo.bench.NAME.run`` returns.
"""
