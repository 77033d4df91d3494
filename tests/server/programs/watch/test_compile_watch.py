from __future__ import annotations

import logging
import threading
from collections.abc import Iterable

import pytest
from tests.fakes import Clock

from xlaserve.programs.watch.compile_watch import KNOWN, REMEMBERED, CompileWatch
from xlaserve.programs.watch.xla_log import XlaCompilation

LANE, OTHER = 7, 8


class Watched:
    """A watch in which thread LANE runs batches; compilations come as XLA logs them."""

    def __init__(self) -> None:
        self.clock = Clock(1000.0)
        self.told: list[tuple[XlaCompilation, bool]] = []
        self.watch = CompileWatch(lambda *told: self.told.append(told), lambda thread: thread == LANE, self.clock)

    def compile(self, *, at_s: float, seconds: float = 1.0, thread: int = OTHER, from_cache: bool = False) -> bool:
        """Has XLA compile, and returns whether that was expected."""
        prefix = f"I0000 00:00:{at_s:.6f} {thread}"
        self.watch.read(f"{prefix} xla_compiler.cc:1] XlaCompiler::CompileFunction forward_1[]")
        self.watch.read(f"{prefix} xla_compiler.cc:1] XLA arg 0 shape: u8[3,4] name:  TF arg 0 node name: ")
        if from_cache:
            self.watch.read(f"{prefix} device_executable_persistor.h:1] Loading cached entry for: forward_1[]")
        time = f"Compilation of XLA executable time: x ({seconds * 1e6:.0f} us)"
        self.watch.read(f"{prefix} device_compiler.h:1] {time}")
        return bool(self.told) and self.told[-1][1]


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_what_is_compiled_while_that_is_expected_is_expected(watched: Watched) -> None:
    with watched.watch.expecting():
        watched.clock.now = 1005.0
        assert watched.compile(at_s=1004.0)


def test_lines_may_arrive_after_the_compilation_that_they_tell_of(watched: Watched) -> None:
    with watched.watch.expecting():
        watched.clock.now = 1005.0
    watched.clock.now = 1100.0
    assert watched.compile(at_s=1004.0)
    assert watched.compile(at_s=1005.5, seconds=2.0), "it began while it was expected"
    assert not watched.compile(at_s=1007.0)


def test_what_began_before_it_was_expected_was_not(watched: Watched) -> None:
    with watched.watch.expecting():
        assert not watched.compile(at_s=1001.0, seconds=2.0)


def test_nested_expectations_end_each_for_itself(watched: Watched) -> None:
    with watched.watch.expecting():
        with watched.watch.expecting():
            pass
        watched.clock.now = 1010.0
        assert watched.compile(at_s=1009.0)


def test_an_error_ends_an_expectation(watched: Watched) -> None:
    with pytest.raises(RuntimeError), watched.watch.expecting():
        raise RuntimeError
    watched.clock.now = 1010.0
    assert not watched.compile(at_s=1009.0)


def test_a_thread_that_runs_batches_may_never_compile(watched: Watched) -> None:
    with watched.watch.expecting():
        assert not watched.compile(at_s=1000.0, thread=LANE)


def test_the_unexpected_is_an_error_with_what_caused_it(watched: Watched, caplog: pytest.LogCaptureFixture) -> None:
    watched.compile(at_s=2000.0, seconds=0.25)
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.getMessage() == "XLA compiled while serving, for 250 ms: forward_1 of (u8[3,4]) -> unknown"
    assert record.__dict__["arguments"] == ("u8[3,4]",)
    assert [each.function for each in watched.watch.unexpected] == ["forward_1"]


def test_the_expected_is_no_error(watched: Watched, caplog: pytest.LogCaptureFixture) -> None:
    with watched.watch.expecting():
        watched.compile(at_s=1001.0)
    assert not caplog.records
    assert not watched.watch.unexpected


def test_a_cached_program_counts_only_if_a_request_waited_for_it(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    with watched.watch.expecting():
        watched.compile(at_s=1001.0, from_cache=True)
    assert watched.told == []
    watched.compile(at_s=2001.0, from_cache=True)
    assert [is_expected for _, is_expected in watched.told] == [False]
    assert "XLA loaded from its cache while serving" in caplog.text


def test_what_is_remembered_is_bounded(watched: Watched) -> None:
    for _ in range(2 * REMEMBERED):
        watched.compile(at_s=2000.0)
    assert len(watched.watch.unexpected) == REMEMBERED


def test_expectations_may_overlap_on_several_threads(watched: Watched) -> None:
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with watched.watch.expecting():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with watched.watch.expecting():
        thread.start()
        assert inside.wait(10)
    watched.clock.now = 1010.0
    assert watched.compile(at_s=1009.0)
    leave.set()
    thread.join()


def known(*, text: str = "Compilation of XLA executable time", argument: str = "f32[3]") -> list[str]:
    """The lines that XLA logs of KNOWN, or would in another version."""
    prefix = f"I0000 00:00:1000.500000 {OTHER}"
    return [
        f"{prefix} xla_compiler.cc:1] XlaCompiler::CompileFunction __inference_{KNOWN.function}_9[config_proto=1]",
        f"{prefix} xla_compiler.cc:1]   XLA arg 0 shape: {argument} name:  TF arg 0 node name: ",
        f"{prefix} xla_compiler.cc:1] XLA output shape: f32[3]{{0}}",
        f"{prefix} device_compiler.h:1] {text}: 199 ms (198696 us) (cumulative: 199 ms, max: 199 ms, #called: 1)",
    ]


def read_all(watched: Watched, lines: Iterable[str]) -> None:
    for line in lines:
        watched.watch.read(line)


def test_a_watch_that_sees_the_known_compilation_does_not_count_it(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    assert watched.watch.is_blind is None, "nobody has looked"
    watched.watch.check(lambda: read_all(watched, known()))
    assert watched.watch.is_blind is False
    assert not watched.told
    assert not caplog.records


@pytest.mark.parametrize(
    "lines",
    [[], known(text="XLA executable compiled in"), known(argument="float[3]"), known()[1:], known()[3:]],
    ids=["silence", "other words", "another way to write shapes", "no name", "only the end"],
)
def test_a_watch_that_misses_the_known_compilation_says_that_it_is_blind(
    lines: list[str], watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    watched.watch.check(lambda: read_all(watched, lines), patience_s=0)
    assert watched.watch.is_blind is True
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "XLA's events are not understood" in record.getMessage()


def test_a_function_that_cannot_be_compiled_leaves_the_watch_blind(watched: Watched) -> None:
    def fail() -> None:
        raise ValueError

    watched.watch.check(fail)
    assert watched.watch.is_blind is True
