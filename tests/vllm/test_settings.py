"""``kv_connector_extra_config`` and ``kv_transfer_params``: what they may say."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.vllm.errors import EngineRefused
from octavo.vllm.params import BadParams, RequestParams
from octavo.vllm.settings import ConnectorSettings


def test_nothing_need_be_said() -> None:
    assert ConnectorSettings.parse({}) == ConnectorSettings()


def test_lists_of_json_become_tuples() -> None:
    settings = ConnectorSettings.parse({"namespaces": ["b", "a"], "tp_sizes": [1, 2]})
    assert settings.all_namespaces == ("default", "b", "a")
    assert settings.tp_sizes == (1, 2)


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"adress": "unix:/x"}, "unknown adress"),
        ({"namespace": 3}, "namespace is 3"),
        ({"weights_epoch": True}, "weights_epoch is True"),
        ({"weights_epoch": -1}, "weights_epoch is -1"),
        ({"load": "later"}, "load is 'later'"),
        ({"load_policy": "never"}, "load_policy is 'never'"),
        ({"match_timeout_s": 0}, "match_timeout_s is 0"),
        ({"pending_timeout_s": -1.0}, "pending_timeout_s is -1.0"),
        ({"staging_bytes": 10}, "staging_bytes is 10"),
        ({"tp_sizes": ["2"]}, "tp_sizes"),
        ({"tp_sizes": [0]}, "tp_sizes"),
        ({"profile": "tiny"}, "profile"),
    ],
)
def test_a_wrong_setting_stops_the_start_and_is_named(extra: dict[str, Any], named: str) -> None:
    with pytest.raises(EngineRefused, match=named):
        ConnectorSettings.parse(extra)


def test_a_request_may_say_nothing_or_something_of_another_connector() -> None:
    assert RequestParams.parse(None, ("default",)) == RequestParams()
    assert RequestParams.parse({"do_remote_prefill": True}, ("default",)) == RequestParams()


def test_a_request_chooses_among_the_namespaces_of_the_engine_only() -> None:
    stated = {"octavo": {"namespace": "b", "store": False, "tokens": 64}}
    assert RequestParams.parse(stated, ("a", "b")) == RequestParams("b", store=False, tokens=64)
    with pytest.raises(BadParams, match="namespace 'b' is none of a"):
        RequestParams.parse(stated, ("a",))


@pytest.mark.parametrize("stated", ["x", {"ttl": 3}, {"store": 1}, {"tokens": True}])
def test_what_a_request_says_wrongly_is_named(stated: Any) -> None:
    with pytest.raises(BadParams):
        RequestParams.parse({"octavo": stated}, ("default",))
