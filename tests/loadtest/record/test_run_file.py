from __future__ import annotations

import gzip
import json
import tracemalloc
import zlib
from pathlib import Path
from types import ModuleType

import grpc
import numpy as np
import pytest
from tests.loadtest.run_files import ENVIRONMENT, NewRun
from tests.required import required

from xlaserve_loadtest.record.blocks import BlockLine, Counters, GeneratorUse, LoadLine, MachineUse, ServerUse
from xlaserve_loadtest.record.lines import End, Equality, Event, Failure, GeneratorLine, Line, Requests, Run
from xlaserve_loadtest.record.requests import REQUEST, Status
from xlaserve_loadtest.record.run_file import RunFileError, RunWriter, new_file, read_run
from xlaserve_loadtest.reports import cli, compare_cli


def read_text(path: Path, *lines: str) -> Run:
    path.write_text("".join(line + "\n" for line in lines))
    return read_run(path)


def header_text(run_file: NewRun, **changes: object) -> str:
    path = run_file("header").header().write(ends=False)
    return json.dumps({**json.loads(gzip.decompress(path.read_bytes())), **changes})


def test_a_full_disk_is_an_error_that_names_the_file() -> None:
    writer = RunWriter(Path("/dev/full"))
    full = r"No space left on device: '/dev/full'"
    with pytest.raises(OSError, match=full):
        writer.write(End(interrupted=False, complete=True))
    with pytest.raises(OSError, match=full):
        writer.close()
    writer.close()


def test_everything_comes_back_as_it_was_written(run_file: NewRun) -> None:
    file = run_file().header(control=True).server(compile_s={"xla": 4.0}, models={"digits": {"weights": "random"}})
    file.block("xla", [1.0, 2.5, 3.25], stages_s={"queue_s": 0.125, "total_s": 0.5}, round=3)
    file.block("graph", [1.0, 2.5, 3.25], columns={"target": [0, 1, 0], "generator": [0, 0, 255], "model": [1, 0, 1]})
    machine = MachineUse("10.0.0.2:7070", 2, 0.5, 100, 3, 0.1, 2.5, 12, 0.01, clock_error_ms=0.25, clock_drift_ms=-0.5)
    rest: list[Line] = [
        BlockLine(
            7,
            "graph",
            LoadLine("open", rate_per_s=50.0, arrivals="poisson", ramp_per_s=(10.0, 90.0), images_per_request="1:0.7"),
            start_ns=1,
            end_ns=2,
            generator=GeneratorUse(2, 0.5, 100, late_sends=3, dropped=4, busy=0.25, machines=(machine,)),
            role="search",
            server_use=ServerUse(1.5, 2**30, 0.5, 2**31),
            counters=Counters({"8x224x224": 3}, 1, 23, 0),
        ),
        GeneratorLine("10.0.0.2:7070", "gen2", 2, ENVIRONMENT),
        Event(5, "compile", "xla 8x224x224"),
        Equality("xla", "graph", 64, 1e-6, 1e-5, 1.0, 1e-4, 1e-3, is_equal=True),
        Failure("xla", "INTERNAL", 3, "no"),
        End(interrupted=True, complete=False, reason="Ctrl-C"),
    ]
    run = file.read(*rest, ends=False)
    assert [run.header, *run.servers] == [file.lines[0], file.lines[1]]
    assert [*run.blocks[2:], *run.generators, *run.events, *run.equalities, *run.failures, run.end] == rest
    written = np.concatenate([line.rows for line in file.lines if isinstance(line, Requests)])
    assert run.requests.dtype == REQUEST
    for column in required(REQUEST.names):
        np.testing.assert_array_equal(run.requests[column], written[column])


def test_what_was_written_is_on_disk_before_the_file_is_closed(run_file: NewRun) -> None:
    file = run_file().header().block("xla", [1.0] * 50)
    with RunWriter(file.path) as writer:
        for line in file.lines:
            writer.write(line)
        run = read_run(file.path)
    assert (len(run.blocks), run.requests.size, run.end) == (1, 50, None)


def test_a_file_cut_off_anywhere_gives_the_lines_that_were_whole(run_file: NewRun) -> None:
    file = run_file().header().block("xla", [1.0] * 20).block("graph", [2.0] * 20)
    data = file.write().read_bytes()
    blocks = []
    for length in range(0, len(data), 11):
        file.path.write_bytes(data[:length])
        try:
            blocks.append(len(read_run(file.path).blocks))
        except RunFileError as error:
            assert "nothing was recorded" in str(error)
            blocks.append(-1)
    assert blocks == sorted(blocks)
    assert {-1, 0, 1, 2} == set(blocks)


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("more", [b"x", b'{"kind": "poem"}\n', b"the file itself"])
def test_data_after_the_end_of_a_run_is_refused(run_file: NewRun, more: bytes, *, is_packed: bool) -> None:
    path = run_file().header().block("xla", [1.0]).write()
    data = path.read_bytes() if is_packed else gzip.decompress(path.read_bytes())
    path.write_bytes(data)
    assert read_run(path).end
    path.write_bytes(data + (data if more == b"the file itself" else more))
    with pytest.raises(RunFileError, match=r"follows? the end of the run; expected one run in a file"):
        read_run(path)


@pytest.mark.parametrize("place", range(1, 6))
def test_a_file_that_lost_a_line_is_refused(run_file: NewRun, place: int) -> None:
    path = run_file().header().server().block("xla", [1.0]).block("graph", [1.0]).write()
    lines = gzip.decompress(path.read_bytes()).splitlines(keepends=True)
    path.write_bytes(b"".join(lines))
    assert read_run(path).end
    path.write_bytes(b"".join([*lines[:place], *lines[place + 1 :]]))
    with pytest.raises(RunFileError, match=r"line 6: end: lines: expected 6, got 7: lines are missing"):
        read_run(path)


def test_the_end_of_an_older_file_has_no_number_of_lines(run_file: NewRun, tmp_path: Path) -> None:
    end = '{"kind": "end", "interrupted": false, "complete": true}'
    assert read_text(tmp_path / "x", header_text(run_file), BLOCK, end).end == End(False, True)


def test_a_file_that_was_unpacked_is_read_as_well(run_file: NewRun, tmp_path: Path) -> None:
    path = run_file().header().block("xla", [1.0]).write()
    plain = tmp_path / "plain.jsonl"
    plain.write_bytes(gzip.decompress(path.read_bytes()))
    assert read_run(plain).requests.size == 1


def test_unknown_fields_are_ignored_and_missing_ones_have_defaults(run_file: NewRun, tmp_path: Path) -> None:
    block = {"kind": "block", "index": 0, "arm": "xla", "load": {"type": "closed"}, "start_ns": 0, "end_ns": 1}
    block |= {"generator": {"workers": 1, "cpu_s": 0, "sends": 1}, "phase_of_the_moon": "full"}
    run = read_text(tmp_path / "x", header_text(run_file, more=1), json.dumps(block))
    assert run.blocks[0].role == "measure"
    assert run.blocks[0].counters is None


def test_an_event_of_another_version_is_kept(run_file: NewRun, tmp_path: Path) -> None:
    event = {"kind": "event", "at_ns": 1, "what": "stall", "text": "0.4 s"}
    run = read_text(tmp_path / "x", header_text(run_file), json.dumps(event))
    assert run.events == (Event(1, "stall", "0.4 s"),)


def test_lines_of_kinds_that_are_not_known_are_skipped(run_file: NewRun, tmp_path: Path) -> None:
    lines = ('{"kind": "poem", "schema": 2}', BLOCK, '{"kind": "poem"}')
    assert len(read_text(tmp_path / "x", header_text(run_file), *lines).blocks) == 1


BLOCK = (
    '{"kind": "block", "index": 0, "arm": "xla", "load": {"type": "closed"}, "start_ns": 0, "end_ns": 1,'
    ' "generator": {"workers": 1, "cpu_s": 0, "sends": 1}}'
)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "empty; nothing was recorded"),
        (["hello"], "expected a run file, NAME.run.jsonl.gz, got another file"),
        (["{"], "expected a run file, NAME.run.jsonl.gz, got another file"),
        (['{"a": 1}'], "expected a run file, NAME.run.jsonl.gz, got another file"),
        (['{"kind": "end", "interrupted": false, "complete": true}'], "line 1: expected a header, got end"),
        (['{"kind": "header", "schema": "xlaserve.loadtest.run/9"}'], "schema 'xlaserve.loadtest.run/9' is not known"),
        (['{"kind": "header"}'], "line 1: header: started_at: field required"),
        (["HEADER", '{"kind": "event", "at_ns": NaN, "what": "note", "text": ""}'], "line 2: expected JSON"),
        (["HEADER", "[" * 100_000], "line 2: expected JSON"),
        (["HEADER", "HEADER"], "a second header; expected one run"),
        (["HEADER", BLOCK.replace("xla", "ghost")], "block 0: the header names no arm 'ghost'"),
        (["HEADER", BLOCK, BLOCK], "block 0: there are two of this index"),
        (["HEADER", BLOCK.replace('"sends"', '"differing": 1, "sends"')], "generator.differing: expected 0 to 0"),
        (["HEADER", BLOCK.replace('"sends"', '"differing": -1, "sends"')], "generator.differing: expected 0 to 0"),
        (['{"kind": "poem"}'], "line 1: expected a header, got poem"),
        (["HEADER", "{}"], "line 2: expected JSON of a kind"),
        (["HEADER", '{"kind": "end", "interrupted": "maybe", "complete": true}'], "line 2: end: interrupted: "),
        (["HEADER", '{"kind": "event", "at_ns": 1, "what": 1, "text": ""}'], "line 2: event: what: "),
    ],
)
def test_what_is_no_run_is_refused_with_the_line_and_the_reason(
    run_file: NewRun, tmp_path: Path, lines: list[str], message: str
) -> None:
    header = header_text(run_file)
    with pytest.raises(RunFileError) as caught:
        read_text(tmp_path / "x", *(header if line == "HEADER" else line for line in lines))
    assert message in str(caught.value)
    assert str(tmp_path / "x") in str(caught.value)


TWO = {"status": ["OK"] * 2, "images": [1] * 2, "measured": [True] * 2}
TWO |= {column: [1] * 2 for column in ("scheduled_ns", "start_ns", "end_ns")}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"status": ["FINE"]}, "'FINE' is not a status"),
        ({"images": [1, 2]}, "different lengths"),
        ({"status": ["OK", "OK"], "images": [1, 1]}, "different lengths"),
        *(({**TWO, column: [1]}, "different lengths") for column in ("model", "target", "generator")),
        ({"end_ns": [0]}, "ended before it was due"),
        ({"end_ns": [2**80]}, "too large"),
    ],
)
def test_requests_that_make_no_sense_are_refused(
    run_file: NewRun, tmp_path: Path, changes: dict[str, list[object]], message: str
) -> None:
    row = {"kind": "requests", "block": 0, "status": ["OK"], "images": [1], "measured": [True]}
    row |= {"scheduled_ns": [1], "start_ns": [1], "end_ns": [2]}
    with pytest.raises(RunFileError, match=message):
        read_text(tmp_path / "x", header_text(run_file), json.dumps({**row, **changes}))


def test_a_damaged_or_missing_file_is_refused(run_file: NewRun, tmp_path: Path) -> None:
    path = run_file().header().block("xla", np.random.default_rng(0).random(500)).write()
    data = bytearray(path.read_bytes())
    data[40:60] = bytes(20)
    path.write_bytes(data)
    with pytest.raises(RunFileError, match="damaged"):
        read_run(path)
    with pytest.raises(RunFileError, match="got no such file"):
        read_run(tmp_path / "none")


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_large_file_of_others_is_refused_by_its_first_bytes(tmp_path: Path, *, is_packed: bool) -> None:
    path, size = tmp_path / "image.raw", 64 * 2**20
    if is_packed:
        path.write_bytes(gzip.compress(bytes(size)))
    else:
        with path.open("wb") as file:
            file.truncate(size)
    tracemalloc.start()
    try:
        with pytest.raises(RunFileError, match="got another file"):
            read_run(path)
        assert tracemalloc.get_traced_memory()[1] < size / 8
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("piece_bytes", [2, 50, 300])
def test_lines_of_many_pieces_are_read(
    run_file: NewRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, piece_bytes: int
) -> None:
    path = run_file().header().block("xla", np.arange(50.0)).write()
    whole = read_run(path)
    plain = tmp_path / "plain.jsonl"
    plain.write_bytes(gzip.decompress(path.read_bytes()))
    monkeypatch.setattr("xlaserve_loadtest.record.run_file._PIECE_BYTES", piece_bytes)
    for each in (path, plain):
        run = read_run(each)
        assert run.blocks == whole.blocks
        assert run.requests.tobytes() == whole.requests.tobytes()


@pytest.mark.parametrize("command", [cli, compare_cli])
@pytest.mark.parametrize("name", ["", "page.html", "gone.run.jsonl.gz"])
def test_what_is_no_run_file_is_refused_with_those_that_lie_there(
    command: ModuleType, name: str, run_file: NewRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "page.html").write_text("<html>")
    (tmp_path / "latest.run.jsonl.gz").symlink_to(tmp_path / "left")
    for number in range(7):
        new_file(tmp_path, "a" if number else "first")
    assert command.main([str(tmp_path / name)] * (1 if command is cli else 2)) == 1
    said = capsys.readouterr().err
    assert "expected a run file, NAME.run.jsonl.gz, got " in said
    assert said.count(".run.jsonl.gz") - said.count("NAME.run") - said.count("gone.run") == 5
    assert f"run files in {tmp_path}: " in said
    assert " and 2 more" in said


def test_every_status_survives(run_file: NewRun) -> None:
    rows = np.zeros(len(Status), REQUEST)
    rows["status"] = list(Status)
    run = run_file().header().read(Requests(0, rows))
    assert run.requests["status"].tolist() == list(Status)


def test_the_file_is_gzip_to_other_tools(run_file: NewRun) -> None:
    path = run_file().header().block("xla", [1.0] * 10).write()
    text = zlib.decompress(path.read_bytes(), 16 + zlib.MAX_WBITS).decode()
    assert [json.loads(line)["kind"] for line in text.splitlines()] == ["header", "requests", "block", "end"]


def test_statuses_have_the_numbers_of_grpc() -> None:
    numbers = {status.name: status.value[0] for status in grpc.StatusCode}
    assert numbers == {status.name: status.value for status in Status if status < Status.INVALID_REPLY}
