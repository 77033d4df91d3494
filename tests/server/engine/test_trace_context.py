from __future__ import annotations

import pickle

import pytest

from xlaserve.engine.trace_context import MAX_STATE_LENGTH, TraceContext, parse

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
VALID = f"00-{TRACE}-{SPAN}-01"


def test_a_clients_span_is_read_and_written_as_it_came() -> None:
    context = parse(VALID, "vendor=1,other=2")
    assert context == TraceContext(TRACE, SPAN, True, "vendor=1,other=2")
    assert context.traceparent == VALID
    assert pickle.loads(pickle.dumps(context)) == context


@pytest.mark.parametrize(("flags", "is_sampled"), [("00", False), ("01", True), ("03", True), ("fe", False)])
def test_the_first_flag_says_whether_the_trace_is_recorded(flags: str, is_sampled: bool) -> None:
    context = parse(f"00-{TRACE}-{SPAN}-{flags}")
    assert context is not None
    assert context.is_sampled is is_sampled
    assert context.traceparent.endswith("-01" if is_sampled else "-00")


def test_of_a_later_version_what_this_one_has_is_read() -> None:
    assert parse(f"01-{TRACE}-{SPAN}-01-more") == parse(f"01-{TRACE}-{SPAN}-01") == parse(VALID)


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "x",
        VALID.upper(),
        f"{VALID}-more",
        f"{VALID}0",
        f" {VALID}",
        f"{VALID}\n",
        f"ff-{TRACE}-{SPAN}-01",
        f"01-{TRACE}-{SPAN}-01more",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[1:]}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}-{SPAN}",
        f"00_{TRACE}_{SPAN}_01",
        f"00-{TRACE[:-1]}g-{SPAN}-01",
        f"00-{TRACE[:-1]}٣-{SPAN}-01",
    ],
)
def test_what_is_not_as_the_standard_has_it_is_ignored(wrong: str) -> None:
    assert parse(wrong, "vendor=1") is None


@pytest.mark.parametrize("state", ["a=1\n", "a=\x00", "a=é", "a=" + "x" * (MAX_STATE_LENGTH - 1)])
def test_an_invalid_trace_state_is_dropped_and_the_span_is_kept(state: str) -> None:
    assert parse(VALID, state) == TraceContext(TRACE, SPAN, True, "")
