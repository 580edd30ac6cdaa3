"""Matches off the scheduler's thread: keys are computed and the node is asked on threads."""

from __future__ import annotations

import logging
import threading
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import Final

from octavo.chain import Chain
from octavo.client import Client
from octavo.errors import ClientClosed, InvalidRequest, OctavoError
from octavo.results import Hold, Match
from octavo.status import Status
from octavo.vllm.params import Retention
from octavo.wishes import SessionHint

THREADS: Final = 2
"""Each match is mostly waiting for the node; more threads would only share the GIL."""

HOLDS_MAX: Final = 48
"""Holds at once; a node allows a session 64. Further matches do without: what they found may be
evicted before it is loaded, and is then recomputed."""

PIECE_PAGES: Final = 256
"""Hashed at a time, in about half a millisecond. In one go, the 8,192 pages of a long prompt
would keep the interpreter from the scheduler for several switch intervals of 5 ms."""

PIECE_PAUSE_S: Final = 50e-6

logger = logging.getLogger("octavo.vllm")


class Lookup:
    """One match in progress. Made and read by the scheduler's thread, ended by another."""

    def __init__(
        self,
        chain: Chain,
        first_token: int,
        tokens: Sequence[int],
        extras: Mapping[int, tuple[bytes, ...]],
        *,
        hold: bool,
        hint: SessionHint | None = None,
    ) -> None:
        """``tokens``, which begin at ``first_token``, are appended to the chain first, with
        ``extras``."""
        self.chain: Final = chain
        self.first_token: Final = first_token
        self.tokens: Final = tokens
        self.extras: Final = extras
        self.wants_hold: Final = hold
        self.hint: Final = hint
        self.asked_at_s: float | None = None
        """When the scheduler first wanted to know."""
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._abandoned = False
        self._match = Match()
        self.token_array: array[int] = array("I")
        """The tokens, once done."""
        self.done_at_s = 0.0

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    @property
    def is_abandoned(self) -> bool:
        return self._abandoned

    @property
    def match(self) -> Match:
        """What was found; a miss unless done."""
        return self._match if self.is_done and not self._abandoned else Match()

    def wait(self, timeout_s: float) -> bool:
        """Whether it is done, now or within ``timeout_s``."""
        return self._done.wait(timeout_s)

    def finish(self, match: Match) -> Hold | None:
        """The answer. If the lookup was abandoned meanwhile, the hold to release."""
        with self._lock:
            self._match, self.done_at_s = match, time.monotonic()
            self._done.set()
            return match.hold if self._abandoned else None

    def abandon(self) -> Hold | None:
        """Nobody will ask any more. The hold that has to be released, if there is one."""
        with self._lock:
            self._abandoned = True
            return self._match.hold


class Matcher:
    """Runs lookups. ``submit`` and ``release`` return at once."""

    def __init__(self, client: Client, count: Callable[[str, int], None]) -> None:
        """``count`` is told what was to no avail: ``match_refused``, ``unpinned_pages``,
        ``hints_lost``."""
        self._client: Final = client
        self._count = count
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._holds = 0
        self._holds_lock = threading.Lock()
        self._complaint = ""
        self._threads = [
            threading.Thread(target=self._run, name=f"octavo-match-{place}", daemon=True)
            for place in range(THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def connect(self) -> None:
        """Opens the session ahead of the first match."""
        self._jobs.put(self._connect)

    def submit(self, lookup: Lookup, timeout_s: float) -> None:
        """Begins a lookup; the node gets ``timeout_s`` from when its turn comes."""
        self._jobs.put(lambda: self._look_up(lookup, timeout_s))

    def abandon(self, lookup: Lookup) -> None:
        """Ends a lookup and its hold."""
        hold = lookup.abandon()
        if hold is not None:
            self._jobs.put(lambda: self._release(hold))

    def retain(self, chain: Chain, retention: Retention, page_count: int) -> None:
        """Lets the chain's pages, of which ``page_count`` were found, stay for so long."""
        self._jobs.put(lambda: self._retain(chain, retention, page_count))

    def tell(self, hint: SessionHint, chain: Chain | None, namespace: str) -> None:
        """Tells the node what becomes of a session; ``chain`` is what it has of pages so far."""
        self._jobs.put(lambda: self._tell(hint, chain, namespace))

    def close(self) -> None:
        """Ends the threads and the client; lookups in progress end as misses."""
        for _thread in self._threads:
            self._jobs.put(None)
        self._client.close()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:  # whatever it was: other requests wait for the thread
                logger.exception("octavo: a look-up, wish or hint failed")

    def _connect(self) -> None:
        try:
            node = self._client.connect()
        except ClientClosed:
            return  # the engine ended before it had begun
        except OctavoError as error:
            logger.warning("octavo: no session yet, every look-up misses until then: %s", error)
        else:
            logger.info("octavo: node %s at %s", node.node_id, node.address)

    def _look_up(self, lookup: Lookup, timeout_s: float) -> None:
        match, hold = Match(), False
        try:
            lookup.token_array = token_array(lookup.tokens)
            # Two lookups of a request may overtake each other; its tokens must not.
            in_order = lookup.chain.token_count == lookup.first_token
            if in_order:
                self._extend(lookup.chain, lookup.token_array, lookup.extras)
            if in_order and not lookup.is_abandoned:
                hold = lookup.wants_hold and self._take_hold()
                match = self._client.match(
                    lookup.chain, hold=hold, hint=lookup.hint, timeout_s=timeout_s
                )
        except ClientClosed:
            pass  # the engine has ended, or was reset
        except OctavoError as error:
            # Refused: a request must not suffer from it. Said once for each reason.
            self._count("match_refused", 1)
            self._complain("look-ups fail", error)
        finally:  # also after a fault of ours: a request waits for the answer
            if hold and match.hold is None:
                self._give_hold()
            unwanted = lookup.finish(match)
            if unwanted is not None:
                self._release(unwanted)

    def _retain(self, chain: Chain, retention: Retention, page_count: int) -> None:
        unpinned = page_count
        try:
            statuses = self._client.retain(chain, ttl_s=retention.ttl_s, pin_s=retention.pin_s)
            unpinned = statuses.count(Status.QUOTA_EXCEEDED)
        except ClientClosed:
            pass  # the engine has ended, or was reset
        except OctavoError as error:
            self._complain("pages are not retained", error)
        finally:
            if retention.pin_s is not None:
                self._count("unpinned_pages", unpinned)

    def _tell(self, hint: SessionHint, chain: Chain | None, namespace: str) -> None:
        heard = False
        try:
            heard = self._client.hint(hint, chain, namespace=namespace)
        except ClientClosed:
            pass  # the engine has ended, or was reset
        except OctavoError as error:
            self._complain("hints are refused", error)
        finally:
            if not heard:
                self._count("hints_lost", 1)

    def _complain(self, what: str, error: OctavoError) -> None:
        """Says it once for each reason."""
        if str(error) != self._complaint:
            self._complaint = str(error)
            logger.error("octavo: %s: %s", what, error)

    def _extend(
        self, chain: Chain, tokens: array[int], extras: Mapping[int, tuple[bytes, ...]]
    ) -> None:
        """Appends tokens and computes their keys, letting other threads in between."""
        piece_tokens = PIECE_PAGES * chain.page_tokens
        for begin in range(0, len(tokens), piece_tokens):
            chain.extend(tokens[begin : begin + piece_tokens], extras if begin == 0 else {})
            if len(tokens) > piece_tokens and self._client.node is not None:
                _ = chain.keys
                time.sleep(PIECE_PAUSE_S)

    def _release(self, hold: Hold) -> None:
        hold.release()
        self._give_hold()

    def _take_hold(self) -> bool:
        with self._holds_lock:
            if self._holds >= HOLDS_MAX:
                return False
            self._holds += 1
            return True

    def _give_hold(self) -> None:
        with self._holds_lock:
            self._holds -= 1


def token_array(tokens: Sequence[int]) -> array[int]:
    """Tokens as unsigned 32-bit integers.

    Raises:
        InvalidRequest: they are not.
    """
    try:
        return array("I", tokens)
    except (OverflowError, TypeError) as error:
        raise InvalidRequest(f"token ids must be integers from 0 to 2^32-1: {error}") from None
