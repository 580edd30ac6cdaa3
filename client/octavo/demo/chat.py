"""A conversation as token ids.

Turns are appended as tokens and never rendered again: an answer's ids go back into the next
prompt exactly as they were generated, so that pages of generated tokens match as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

_ANSWER: Final = "ANSWER"


class ChatFormat:
    """A tokenizer's chat template, cut at the end of an answer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.end_token: Final[int] = int(tokenizer.eos_token_id)

    def opening(self, system: str, question: str) -> list[int]:
        """Tokens of a conversation's beginning, up to where the first answer starts."""
        return self._encode(self._render([_message("system", system), _message("user", question)]))

    def turn(self, question: str) -> list[int]:
        """Tokens between the end-of-turn token of an answer and the start of the next answer."""
        text = self._render(
            [
                _message("user", "?"),
                _message("assistant", _ANSWER),
                _message("user", question),
            ]
        )
        end = f"{_ANSWER}{self._tokenizer.eos_token}"
        _, found, rest = text.partition(end)
        if not found:
            raise ValueError("the chat template does not end an answer with the end-of-turn token")
        return self._encode(rest)

    def close(self, answer: Sequence[int]) -> list[int]:
        """An answer with its end-of-turn token, which one that was cut short lacks."""
        closed = list(answer)
        return closed if closed[-1:] == [self.end_token] else [*closed, self.end_token]

    def text(self, tokens: Sequence[int]) -> str:
        """Tokens as text, without special ones."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def _render(self, messages: list[dict[str, str]]) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        )

    def _encode(self, text: str) -> list[int]:
        return [int(t) for t in self._tokenizer(text, add_special_tokens=False)["input_ids"]]


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
