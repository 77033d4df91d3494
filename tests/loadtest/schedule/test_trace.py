from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import numpy as np
import pytest

from xlaserve_loadtest.schedule import trace
from xlaserve_loadtest.schedule.arrivals import ArrivalsError, OpenLoop, schedule
from xlaserve_loadtest.schedule.mix import Kind, Mix, Size, draw_kinds, parse_counts
from xlaserve_loadtest.schedule.trace import MAX_KINDS, PartialKind, Trace


def written(tmp_path: Path, *lines: object) -> Trace:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return trace.read(path)


def test_a_line_is_seconds_or_says_what_its_request_is(tmp_path: Path) -> None:
    (tmp_path / "cats").mkdir()
    (tmp_path / "cats" / "one.jpg").write_bytes(b"")
    full = {"at_s": 1.5, "model": "resnet", "images": 4, "size": "224x320", "file": "cats/one.jpg"}
    read = written(
        tmp_path, "# a comment", "0.5", "", full, {"at_s": 2, "user": "x", "images": None}, full | {"at_s": 3}
    )
    assert read.due_ns.tolist() == [500_000_000, 1_500_000_000, 2_000_000_000, 3_000_000_000]
    assert [read.kinds[place] for place in read.places] == [
        PartialKind(),
        own := PartialKind("resnet", 4, (224, 320), str(tmp_path / "cats" / "one.jpg")),
        PartialKind(),
        own,
    ]
    assert read.models == (None, "resnet")
    assert read.has_files


def test_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"at_s": 0.5}\r\n1\r\n')
    assert trace.read(path).due_ns.tolist() == [500_000_000, 1_000_000_000]


def test_a_trace_that_can_not_be_written_is_named() -> None:
    with pytest.raises(OSError, match="'/dev/full'"):
        trace.write(Path("/dev/full"), np.arange(3, dtype=np.int64), [Kind(0, 1, None, None)], ["m"])


def test_the_hash_is_that_of_the_file(tmp_path: Path) -> None:
    read = written(tmp_path, "0.5")
    assert read.sha256 == hashlib.sha256(b"0.5\n").hexdigest()


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (("1", "-1"), "line 2: at_s: expected seconds after the start, from 0 to 4,000,000, got -1"),
        (("NaN",), "line 1: at_s: expected seconds after the start, from 0 to 4,000,000, got NaN"),
        (("1700000000",), "line 1: at_s: expected seconds after the start, from 0 to 4,000,000, got 1700000000"),
        (("2", "", "1.5"), "line 3: at_s: expected 2.0 or later, as in the line before, got 1.5"),
        (("x",), 'line 1: expected seconds, or a JSON object such as {"at_s": 0.25, "images": 4}, got x'),
        (
            ('{"when": 1}',),
            'line 1: expected seconds, or a JSON object such as {"at_s": 0.25, "images": 4}, got {"when"',
        ),
        (({"at_s": True},), "line 1: at_s: expected seconds after the start, from 0 to 4,000,000, got true"),
        (({"at_s": "1"},), 'line 1: at_s: expected seconds after the start, from 0 to 4,000,000, got "1"'),
        (
            ({"at_s": 1, "images": 1}, {"at_s": 1, "images": True}),
            "line 2: images: expected a number from 1 on, got true",
        ),
        (({"at_s": 1, "images": 0},), "line 1: images: expected a number from 1 on, got 0"),
        (({"at_s": 1, "images": 2.0},), "line 1: images: expected a number from 1 on, got 2.0"),
        (({"at_s": 1, "size": "224"},), 'line 1: size: expected HEIGHTxWIDTH such as 224x224, got "224"'),
        (({"at_s": 1, "size": [8, 8]},), "line 1: size: expected HEIGHTxWIDTH such as 224x224, got [8, 8]"),
        (({"at_s": 1, "model": ""},), 'line 1: model: expected a name, got ""'),
        (({"at_s": 1, "file": "../x.jpg"},), 'line 1: file: expected a path in the trace\'s folder, got "../x.jpg"'),
        (
            ({"at_s": 1, "file": "/etc/passwd"},),
            'line 1: file: expected a path in the trace\'s folder, got "/etc/passwd"',
        ),
        (({"at_s": 1, "file": "nowhere.jpg"},), "line 1: file: there is no file "),
        (('[{"at_s": 1},', '{"at_s": 2}]'), "line 1: expected a request on each line, got a JSON list; `jq -c"),
        (("# nothing",), "no request; expected seconds, or a JSON object"),
    ],
)
def test_a_wrong_trace_is_refused_with_its_line(tmp_path: Path, lines: tuple[object, ...], reason: str) -> None:
    with pytest.raises(ArrivalsError, match=re.escape(f"trace.jsonl: {reason}")):
        written(tmp_path, *lines)


def test_a_trace_that_is_no_text_or_not_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "trace.gz").write_bytes(b"\x1f\x8b\xff")
    with pytest.raises(ArrivalsError, match=r"trace\.gz: expected text in UTF-8"):
        trace.read(tmp_path / "trace.gz")
    with pytest.raises(ArrivalsError, match="nowhere: expected a file that can be read: No such file"):
        trace.read(tmp_path / "nowhere")


def test_a_trace_of_too_many_kinds_is_refused_where_they_are_too_many(tmp_path: Path) -> None:
    lines = [{"at_s": number, "images": number + 1} for number in range(MAX_KINDS + 1)]
    assert len(written(tmp_path, *lines[:-1]).kinds) == MAX_KINDS
    with pytest.raises(ArrivalsError, match=f"line {MAX_KINDS + 1}: expected up to 4,096 kinds of requests"):
        written(tmp_path, *lines)


def test_a_trace_may_have_too_many_kinds_through_the_shares_of_the_run(tmp_path: Path) -> None:
    read = written(tmp_path, *({"at_s": turn, "images": number + 1} for turn in range(2) for number in range(3001)))
    sizes: Mix[Size | None] = Mix({(8, 8): 0.5, (4, 4): 0.5})
    drawn = draw_kinds(Mix({0: 1.0}), Mix({1: 1.0}), sizes, None, 0)
    with pytest.raises(ArrivalsError, match=r"got \d,\d+ at least, with what --mix"):
        read.replay(("",), drawn)


def test_what_a_line_leaves_out_is_that_of_the_run(tmp_path: Path) -> None:
    read = written(tmp_path, *({"at_s": number, "model": "b"} if number % 2 else number for number in range(80)))
    drawn = draw_kinds(Mix({0: 1.0}), parse_counts("1:0.75,8:0.25"), Mix({None: 1.0}), None, 0)
    replay = read.replay(("a", "b"), drawn)
    sent = replay.sequence()
    assert [kind.model for kind in sent] == [0, 1] * 40
    assert [kind.images for kind in sent] == [kind.images for kind in drawn] * 2
    assert len(replay.kinds) == 4


def test_a_trace_is_cut_at_the_duration(tmp_path: Path) -> None:
    read = written(tmp_path, "1", "2", {"at_s": 3, "model": "late"})
    assert read.models == (None, "late")
    assert read.until(3).models == (None,)
    assert read.until(2.5).due_ns.tolist() == [10**9, 2 * 10**9]
    assert read.until(2).due_ns.tolist() == [10**9]
    assert read.until(2.5).replay(("late",), [Kind()]).duration_s() == 2.5
    assert read.until(60).replay(("late",), [Kind()]).duration_s() == 4
    with pytest.raises(ArrivalsError, match="its first request is due after 1 s, and --duration is shorter"):
        read.until(1)


@pytest.mark.parametrize(
    ("lines", "duration_s"),
    [
        (("0", "0.25", "0.5", "1"), 4 / 3),
        (("0", "0", "1", "1"), 2),
        (("0.5", "0.5"), 1.5),
        (("0",), 1),
        (("3", "5"), 7),
    ],
)
def test_the_last_request_of_a_trace_has_as_long_as_the_others(
    tmp_path: Path, lines: tuple[str, ...], duration_s: float
) -> None:
    assert written(tmp_path, *lines).replay(("a",), [Kind()]).duration_s() == pytest.approx(duration_s)


def test_what_was_saved_is_replayed_to_the_nanosecond_and_the_kind(tmp_path: Path) -> None:
    due_ns = np.sort(np.append(schedule(OpenLoop(1000), 3, (1,)), [3_999_999_999_999_999]))
    (tmp_path / "cat.jpg").write_bytes(b"")
    sizes: Mix[Size | None] = Mix({(8, 8): 0.5, (40, 30): 0.3, None: 0.2})
    kinds = draw_kinds(Mix({0: 0.7, 1: 0.3}), parse_counts("1:0.5,3:0.5"), sizes, None, 0)
    kinds[3] = kinds[3]._replace(file=str(tmp_path / "cat.jpg"))
    trace.write(tmp_path / "saved.jsonl", due_ns, kinds, ("a", "b"))
    replay = trace.read(tmp_path / "saved.jsonl").replay(("a", "b"), [Kind()])
    np.testing.assert_array_equal(replay.due_ns, due_ns)
    assert replay.sequence() == [kinds[place % len(kinds)] for place in range(due_ns.size)]
    assert replay.mean_rate_per_s() == pytest.approx(due_ns.size / 4e6, rel=1e-3)


def test_a_trace_of_one_model_does_not_name_it(tmp_path: Path) -> None:
    trace.write(tmp_path / "saved.jsonl", np.array([250_000_000]), [Kind(images=2)], ("a",))
    assert (tmp_path / "saved.jsonl").read_text() == '{"at_s": 0.250000000, "images": 2}\n'


def test_a_replay_is_described_by_what_its_requests_differ_in(tmp_path: Path) -> None:
    read = written(tmp_path, {"at_s": 0, "images": 2, "size": "8x8"}, {"at_s": 10, "model": "b"})
    text = trace.described(read.replay(("a", "b"), [Kind()]).document())
    assert text.startswith(f"{read.path}: 2 requests in 20 s, of 2 kinds (2 models, 2 sizes, 1 to 2 images), SHA-256 ")
    plain = trace.described(written(tmp_path, "0", "1").replay(("a",), [Kind()]).document())
    assert "2 requests in 2 s, of one kind, SHA-256" in plain
