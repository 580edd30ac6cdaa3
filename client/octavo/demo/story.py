"""The conversation of the demo: a crew member asks about a handbook, turn after turn.

The answers of so small a model are not always right. They were chosen for something else:
no token of the last two is a near tie, so rounding cannot change them.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Final

PAGE_TOKENS: Final = 16

SYSTEM: Final = (
    "You are the assistant of an observatory's crew. Answer questions about the handbook that "
    "the user gives you. Quote its facts and figures, and keep to what it says."
)

QUESTIONS: Final = (
    "Which two cameras does the Lantern have, and what does each of them do?",
    "Which grease is used for the wheels of the dome, and how often are they greased?",
    "Explain how the dome can be closed when the power fails during a night.",
    "Describe how the mirror of the Lantern is washed on the first day.",
    "What is the name of the lifeboat, and when is it tested?",
    "How is Old Maren started? Give the steps in order.",
)
"""Turns 1 to 6, which worker A answers."""

QUESTION_FROM_MEMORY: Final = "What does each of the three alarms mean?"
"""Turn 7: worker B goes on from the node's memory."""

QUESTION_FROM_NVME: Final = (
    "What is written into the green logbook, and where are the logbooks kept?"
)
"""Turn 8: worker C goes on from what the node found on NVMe after its restart."""


def first_question(question: str) -> str:
    """The first turn brings the retrieved document along."""
    document = files("octavo.demo").joinpath("handbook.md").read_text(encoding="utf-8")
    return f"Document:\n\n{document}\n\n{question}"
