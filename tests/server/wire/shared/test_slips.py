"""Names of parameters that are ours but for a slip."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from xlaserve.telemetry import request_context
from xlaserve.telemetry.tracing import Endpoint
from xlaserve.wire.http.forms import Form
from xlaserve.wire.shared.inference import NAMES, check_parameters
from xlaserve.wire.shared.slips import MAX_NAMES, slip_in


@pytest.mark.parametrize(
    ("name", "ours"),
    [("time_out", "timeout"), ("Mode", "mode"), ("prioirty", "priority"), ("pixelRange", "pixel_range")],
)
def test_a_slip_is_named_with_what_it_is_close_to(name: str, ours: str) -> None:
    assert slip_in([name], NAMES) == f"'{name}' is no parameter and was ignored; {ours} is one"


@pytest.mark.parametrize(
    "names", [[], ["model"], ["user"], ["top_p"], ["x" * 10_000], [*map(str, range(MAX_NAMES)), "modes"]]
)
def test_what_others_add_is_no_slip(names: Iterable[str]) -> None:
    assert not slip_in(names, NAMES)


def test_a_warning_is_ascii_on_one_line() -> None:
    said = slip_in(["mode\n\xe9"], NAMES)
    assert said.isascii()
    assert said.isprintable()


async def test_the_answer_warns_of_a_slip_beside_other_warnings() -> None:
    context = request_context.begin(Endpoint("Classify", {}), ())
    context.warn("grey of 16 bits")
    form = Form(options={"topk": "3", "trace": "x"})
    form.count("top_k")
    form.text("mode")
    form.warn_of_slips()
    assert context.warning == "grey of 16 bits; 'topk' is no parameter and was ignored; top_k is one"


async def test_parameters_of_a_request_are_looked_at_each_time() -> None:
    parameters = check_parameters([("gateway", "x"), ("timeouts", 3), ("other", 1)])
    for _ in range(2):
        context = request_context.begin(Endpoint("ModelInfer", {}), ())
        parameters.check_unknown(is_strict=False)
        assert "'timeouts'" in context.warning
