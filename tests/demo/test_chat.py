"""A chat appended as tokens is the chat that the template would render."""

from __future__ import annotations

from tests.demo.toy import make_tokenizer

from octavo.demo.chat import ChatFormat


def test_turns_joined_equal_the_rendered_conversation() -> None:
    tokenizer = make_tokenizer()
    chat = ChatFormat(tokenizer)
    answer = tokenizer("Marigold and Heron.", add_special_tokens=False)["input_ids"]
    joined = [
        *chat.opening("Be brief.", "Which cameras?"),
        *chat.close(answer),
        *chat.turn("Which of them is cooled?"),
    ]
    rendered = tokenizer.apply_chat_template(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Which cameras?"},
            {"role": "assistant", "content": "Marigold and Heron."},
            {"role": "user", "content": "Which of them is cooled?"},
        ],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert joined == tokenizer(rendered, add_special_tokens=False)["input_ids"]


def test_an_answer_is_closed_once() -> None:
    chat = ChatFormat(make_tokenizer())
    assert chat.close([5, 6]) == [5, 6, chat.end_token]
    assert chat.close([5, chat.end_token]) == [5, chat.end_token]


def test_text_leaves_special_tokens_out() -> None:
    tokenizer = make_tokenizer()
    chat = ChatFormat(tokenizer)
    ids = tokenizer("Heron", add_special_tokens=False)["input_ids"]
    assert chat.text([*ids, chat.end_token]) == "Heron"
