from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from xlaserve.errors import InvalidArgument
from xlaserve.models.version import State
from xlaserve.wire.shared import tensorflow_serving_models
from xlaserve.wire.shared.models import Models


def models(*versions: tuple[str, State, str]) -> Models:
    found = [
        SimpleNamespace(settings=SimpleNamespace(version=number), state=state, reason=reason)
        for number, state, reason in versions
    ]
    return cast(Models, SimpleNamespace(versions=lambda name, version: found))


def test_every_state_has_a_counterpart() -> None:
    assert tensorflow_serving_models.STATES.keys() == set(State)


def test_a_failed_version_says_why() -> None:
    status = tensorflow_serving_models.status(
        models(("1", State.FAILED, "no such file"), ("2", State.COMPILING, "")), "m", ""
    )
    first, second = cast(list[dict[str, Any]], status["model_version_status"])
    assert first["state"] == "END"
    assert first["status"] == {"error_code": "FAILED_PRECONDITION", "error_message": "no such file"}
    assert second == {"version": "2", "state": "LOADING", "status": {"error_code": "OK", "error_message": ""}}


@pytest.mark.parametrize(
    ("check", "wrong"),
    [(tensorflow_serving_models.check_label, "12"), (tensorflow_serving_models.check_signature, "other")],
)
def test_numbers_as_labels_and_other_signatures_are_refused(check: Any, wrong: str) -> None:
    check("")
    with pytest.raises(InvalidArgument, match=wrong):
        check(wrong)
