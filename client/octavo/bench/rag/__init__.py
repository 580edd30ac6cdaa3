"""A chat about retrieved documents: what an engine computes again, and what it has to compute.

``workload.py`` makes the sessions, ``loop.py`` says who asks next, ``converse.py`` asks an engine,
``rates.py`` says what had to be computed. None of these knows vLLM; ``vllm_rows.py`` does.
"""

from octavo.bench.rag.command import run

__all__ = ["run"]
