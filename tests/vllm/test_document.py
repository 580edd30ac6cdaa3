"""docs/engines/vllm.md names what exists, all of it, and its examples are accepted."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import fields
from typing import Any

import pytest
from tests.repo.test_documents import table_names
from tests.repo.tree import ROOT

from octavo.vllm.counting import COUNTERS
from octavo.vllm.engine import check_policy
from octavo.vllm.params import REQUEST_KEYS
from octavo.vllm.settings import ConnectorSettings, Role

DOCUMENT = "engines/vllm.md"
TEXT = (ROOT / "docs" / DOCUMENT).read_text()
EXAMPLES = [json.loads(each) for each in re.findall(r"```json\n(.+?)```", TEXT, re.DOTALL)]


def test_every_setting_is_explained_and_no_other() -> None:
    assert table_names("| setting |", DOCUMENT) == {
        field.name for field in fields(ConnectorSettings)
    }


def test_every_key_of_a_request_is_explained_and_no_other() -> None:
    assert table_names("| key |", DOCUMENT) == set(REQUEST_KEYS)


def test_every_counter_is_explained_and_no_other() -> None:
    assert table_names("| counter |", DOCUMENT) == set(COUNTERS)


def test_every_example_is_one_that_a_test_runs() -> None:
    """tests/engines/test_document.py runs one of each; what it does not know, nobody does."""
    fences = re.findall(r"^```(.*)$", TEXT, re.MULTILINE)
    assert sorted(fences[::2]) == ["json", "json", "python"]
    assert set(fences[1::2]) == {""}


@pytest.mark.parametrize("example", [each for each in EXAMPLES if "kv_role" in each])
def test_the_configuration_is_one_that_the_connector_accepts(example: dict[str, Any]) -> None:
    class Transfer:
        kv_load_failure_policy = example["kv_load_failure_policy"]

    check_policy(Transfer)
    Role(example["kv_role"])
    module = __import__(example["kv_connector_module_path"], fromlist=["_"])
    assert example["kv_connector"] in module.__all__


@pytest.mark.parametrize("example", [each for each in EXAMPLES if "kv_role" not in each])
def test_the_settings_are_ones_that_the_connector_accepts(example: dict[str, Any]) -> None:
    ConnectorSettings.parse(example)


def test_the_python_example_says_the_same_as_the_json_one() -> None:
    code = re.search(r"```python\n(.+?)```", TEXT, re.DOTALL)
    assert code is not None
    call = next(
        node
        for node in ast.walk(ast.parse(code[1]))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict"
    )
    stated = {each.arg: ast.literal_eval(each.value) for each in call.keywords}
    assert stated in EXAMPLES
