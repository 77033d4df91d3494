from __future__ import annotations

import json
import logging
import os
import re
import warnings
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from xlaserve.admission.audit import audited
from xlaserve.telemetry import logs

LOGGER = logging.getLogger("xlaserve.engine.batching.batcher")


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    root, ours, audit = logging.getLogger(), logging.getLogger("xlaserve"), logging.getLogger(logs.AUDIT)
    format_warning = warnings.formatwarning
    handlers, levels = root.handlers[:], (root.level, ours.level)
    root.handlers = []  # or pytest's own would be closed
    yield
    logging.captureWarnings(False)
    warnings.formatwarning = format_warning
    logging.getLogger("PIL").setLevel(logging.NOTSET)
    root.handlers = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])
    audit.setLevel(logging.NOTSET)
    logging.getLogger(logs.OUTPUT).setLevel(logging.NOTSET)


def written(capsys: pytest.CaptureFixture[str]) -> str:
    out, err = capsys.readouterr()
    assert out == ""
    return err


def json_lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in written(capsys).splitlines()]


def test_a_line_for_people_is_time_level_and_message(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info", "human")
    LOGGER.info("model %s: ready", "digits")
    LOGGER.warning("model digits: random weights")
    first, second = written(capsys).splitlines()
    assert re.fullmatch(r"\d\d:\d\d:\d\d INFO  model digits: ready", first)
    assert re.fullmatch(r"\d\d:\d\d:\d\d WARN  model digits: random weights", second)


def test_a_line_for_machines_is_an_object_with_the_extra_fields(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info", "json")
    before = datetime.now(UTC)
    LOGGER.info("answered %d", 3, extra={"model": "digits", "total_s": 0.25, "buckets": [1, 2]})
    (line,) = json_lines(capsys)
    time = datetime.fromisoformat(line.pop("time"))
    assert abs((time - before).total_seconds()) < 60
    assert time.utcoffset() is not None
    assert line == {
        "level": "info",
        "logger": "xlaserve.engine.batching.batcher",
        "message": "answered 3",
        "model": "digits",
        "total_s": 0.25,
        "buckets": [1, 2],
    }


def test_extra_fields_never_replace_ours_and_are_always_json(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info", "json")
    LOGGER.info("odd", extra={"level": "forged", "error": OSError("gone"), "score": float("nan"), "by": {(1, 2): 3}})
    (line,) = json_lines(capsys)
    assert line["level"] == "info"
    assert (line["error"], line["score"], line["by"]) == ("gone", "nan", "{(1, 2): 3}")


@pytest.mark.parametrize("format", ["human", "json"])
def test_a_client_can_neither_forge_a_line_nor_move_the_cursor(format: str, capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info", format)  # type: ignore[arg-type]
    hostile = "x\n12:00:00 INFO  model bank: paid\r\x1b[2J\x00\x7f\x85\u2028\u202e\ud800"
    LOGGER.info("no model %s", hostile, extra={"model": hostile})
    text = written(capsys)
    assert text.endswith("\n")
    assert text[:-1].isprintable()
    if format == "json":
        assert json.loads(text)["model"] == hostile
    else:
        assert "x\\n12:00:00 INFO  model bank: paid\\r\\x1b[2J\\x00\\x7f\\x85\\u2028\\u202e\\ud800" in text


def test_words_of_any_language_stay_readable(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info", "human")
    LOGGER.info("Straße 東京 🐈")
    assert written(capsys).endswith("Straße 東京 🐈\n")


def test_a_traceback_is_indented_so_that_its_lines_are_no_records(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info", "human")
    try:
        raise ValueError("bad\n12:00:00 INFO  all is well\x1b[2J")
    except ValueError:
        LOGGER.exception("batch failed")
    first, *others = written(capsys).splitlines()
    assert first.endswith("ERROR batch failed")
    assert "    Traceback (most recent call last):" in others
    assert all(line.startswith("    ") and line.isprintable() for line in others)


def test_a_traceback_is_a_field_for_machines(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info", "json")
    try:
        raise ValueError("bad")
    except ValueError:
        LOGGER.exception("batch failed")
    (line,) = json_lines(capsys)
    assert line["exception"].endswith("ValueError: bad")
    assert line["level"] == "error"


def test_the_level_is_ours_and_other_libraries_speak_from_warnings_on(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("debug", "human")
    LOGGER.debug("ours, debug")
    logging.getLogger("PIL").info("theirs, info")
    logging.getLogger("keras").warning("theirs, warning")
    logs.configure("error", "human")
    LOGGER.warning("ours, warning")
    logging.getLogger("keras").warning("theirs, again")
    assert [line[15:] for line in written(capsys).splitlines()] == ["ours, debug", "theirs, warning"]


def test_configuring_again_replaces_the_handler(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info", "human")
    logs.configure("info", "json")
    LOGGER.info("once")
    assert [line["message"] for line in json_lines(capsys)] == ["once"]


@pytest.mark.filterwarnings("always")
def test_warnings_become_records(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info", "json")
    warnings.warn("old", DeprecationWarning, stacklevel=1)
    (line,) = json_lines(capsys)
    assert (line["level"], line["logger"]) == ("warning", "py.warnings")
    assert line["message"] == "DeprecationWarning: old"


def test_what_pillow_says_of_an_image_that_a_client_sent_is_not_logged(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        logs.configure("info", "human")
        registry: dict[Any, Any] = {}
        warnings.warn_explicit(
            "Truncated File Read", UserWarning, "/lib/PIL/TiffImagePlugin.py", 968, "PIL.TiffImagePlugin", registry
        )
        logging.getLogger("PIL.Image").error("theirs")
        assert [key for key in registry if key != "version"] == [], "nothing is remembered of what clients send"
    assert written(capsys) == ""


def test_tensorflow_is_quiet_unless_the_environment_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "0")
    logs.quiet_tensorflow()
    assert os.environ["TF_CPP_MIN_LOG_LEVEL"] == "0"
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL")
    logs.quiet_tensorflow()
    assert os.environ["TF_CPP_MIN_LOG_LEVEL"] == "2"


def test_lines_of_the_audit_are_written_at_any_level(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("error", "human")
    with audited("load", "digits"):
        LOGGER.warning("model digits: random weights")
    assert re.fullmatch(r"[\d:]{8} INFO  audit: load digits by anybody: OK\n", written(capsys))


@pytest.mark.parametrize("format", ["human", "json"])
def test_lines_of_several_processes_have_their_role_and_are_records(
    format: logs.Format, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.configure("debug", format, role="front 2")
    LOGGER.info("ready")
    LOGGER.warning("odd\nin two lines")
    try:
        raise ValueError("wrong\x1b[31m")
    except ValueError:
        LOGGER.exception("it failed")
    LOGGER.critical("the end")
    lines = written(capsys).splitlines()
    assert all(logs.is_record(line) for line in lines)
    if format == "json":
        assert {json.loads(line)["role"] for line in lines} == {"front 2"}
    else:
        assert re.fullmatch(r"\d\d:\d\d:\d\d INFO  \[front 2\] ready", lines[0])


@pytest.mark.parametrize(
    "line",
    ["", "terminate called", '{"time": "', "12:34:56 NOTE  a", "12:34:56 INFO  \x1b[31m", "F0000 12:34:56 a.cc:1] b"],
)
def test_what_others_write_is_no_record(line: str) -> None:
    assert not logs.is_record(line)
