"""From the values that were read to runs of live holders."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo_server.index.entries import Holding, decode_holdings
from octavo_server.index.found import Answer, Found, Run
from octavo_server.index.holders import HolderView
from octavo_server.index.probing import ABSENT, ChainProbe


@dataclass(slots=True)
class Reader:
    """Gives each distinct set of live holders a code, for one match.

    A chain has many pages and few distinct values, so each value is decoded once.
    """

    view: HolderView
    now_s: float
    strangers: set[int] = field(default_factory=set[int])
    """Ids met that the view does not know: retired, or registered after it was taken."""
    _codes: dict[bytes, int] = field(default_factory=dict[bytes, int])
    _sets: list[tuple[Holding, ...]] = field(default_factory=lambda: [()])
    _numbers: dict[tuple[Holding, ...], int] = field(default_factory=lambda: {(): ABSENT})

    def code(self, value: bytes) -> int:
        """What stands for the live holders in ``value``; 0 for none."""
        known = self._codes.get(value)
        if known is None:
            known = self._codes[value] = self._new_code(value)
        return known

    def found(self, probe: ChainProbe, answer: Answer) -> Found:
        """The answer to the match."""
        runs = tuple(Run(begin, end, self._sets[code]) for begin, end, code in probe.runs())
        named = {each.holder_id for run in runs for each in run.holdings}
        return Found(runs, {each: self.view.holders[each] for each in named}, answer)

    def _new_code(self, value: bytes) -> int:
        holdings = decode_holdings(value)
        self.strangers.update(
            each.holder_id for each in holdings if not self.view.knows(each.holder_id)
        )
        live = tuple(each for each in holdings if self._is_named(each.holder_id))
        code = self._numbers.setdefault(live, len(self._sets))
        if code == len(self._sets):
            self._sets.append(live)
        return code

    def _is_named(self, holder_id: int) -> bool:
        return self.view.knows(holder_id) and self.view.is_live(holder_id, self.now_s)
