from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from xlaserve.programs.cache.records import SUFFIX, Record, RecordFolder

HEADER = {"outputs": [["float32", [1, 10]]], "weights": "w"}
BLOBS = {"module": b"MLIR" * 100, "empty": b"", "executable": bytes(range(256))}


def as_it_is(record: Record) -> Record:
    return record


@pytest.fixture
def folder(tmp_path: Path) -> RecordFolder:
    return RecordFolder(tmp_path / "model", read_only=False)


def file_of(folder: RecordFolder) -> Path:
    (file,) = folder.path.iterdir()
    return file


def test_a_record_comes_back_as_it_was_written(folder: RecordFolder) -> None:
    folder.write("program", HEADER, BLOBS)
    record = folder.read("program", as_it_is)
    assert record is not None
    assert record.header == HEADER
    assert {name: bytes(blob) for name, blob in record.blobs.items()} == BLOBS


def test_what_was_never_written_is_not_there(folder: RecordFolder) -> None:
    assert folder.read("program", as_it_is) is None


def test_no_byte_can_be_changed_unnoticed(folder: RecordFolder) -> None:
    folder.write("program", HEADER, BLOBS)
    file = file_of(folder)
    whole = file.read_bytes()
    for position in range(len(whole)):
        file.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        assert folder.read("program", as_it_is) is None, position
        assert not file.exists()


def test_no_truncation_goes_unnoticed(folder: RecordFolder) -> None:
    folder.write("program", HEADER, BLOBS)
    file = file_of(folder)
    whole = file.read_bytes()
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        assert folder.read("program", as_it_is) is None, length


def test_a_damaged_record_is_removed_with_a_warning(folder: RecordFolder, caplog: pytest.LogCaptureFixture) -> None:
    folder.write("program", HEADER, BLOBS)
    file = file_of(folder)
    file.write_bytes(b"half")
    assert folder.read("program", as_it_is) is None
    assert not file.exists()
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert str(file) in warning
    assert "made again" in warning


@pytest.mark.parametrize(("model", "name"), [("model", "other"), ("other", "program")])
def test_a_whole_record_in_anothers_place_is_of_no_use(
    folder: RecordFolder, tmp_path: Path, model: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    RecordFolder(tmp_path / model, read_only=False).write(name, HEADER, BLOBS)
    folder.path.mkdir(exist_ok=True)
    (tmp_path / model / f"{name}{SUFFIX}").rename(folder.path / f"program{SUFFIX}")
    assert folder.read("program", as_it_is) is None
    assert "written for another place" in caplog.text
    folder.write("program", HEADER, BLOBS)
    assert folder.read("program", as_it_is) is not None


def test_a_record_that_can_not_be_used_is_removed_with_a_warning(
    folder: RecordFolder, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(record: Record) -> str:
        return str(record.header["cost"])

    folder.write("program", HEADER, BLOBS)
    assert folder.read("program", refuse) is None
    assert "KeyError when it was loaded" in caplog.text
    assert list(folder.path.iterdir()) == []


def test_a_record_that_a_full_disk_keeps_from_use_stays(folder: RecordFolder, caplog: pytest.LogCaptureFixture) -> None:
    def fail(record: Record) -> None:
        raise OSError(28, "No space left on device")

    folder.write("program", HEADER, BLOBS)
    assert folder.read("program", fail) is None
    assert "can't be used: No space left" in caplog.text
    assert folder.read("program", as_it_is) is not None


def test_a_header_that_is_not_of_jsons_types_is_a_warning(
    folder: RecordFolder, caplog: pytest.LogCaptureFixture
) -> None:
    folder.write("program", {"size": object()}, BLOBS)
    assert "can't be written: TypeError" in caplog.text
    assert folder.read("program", as_it_is) is None


def test_a_read_only_folder_is_never_changed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    RecordFolder(tmp_path, read_only=False).write("kept", HEADER, BLOBS)
    (tmp_path / f"damaged{SUFFIX}").write_bytes(b"half")
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    folder = RecordFolder(tmp_path, read_only=True)
    with caplog.at_level(logging.INFO):
        folder.write("new", HEADER, BLOBS)
    assert "new is not kept" in caplog.text
    assert folder.read("damaged", as_it_is) is None
    assert folder.read("kept", as_it_is) is not None
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_what_can_not_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "model").write_text("a file where a folder is to be")
    RecordFolder(tmp_path / "model", read_only=False).write("program", HEADER, BLOBS)
    assert "can't be written" in caplog.text


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_leaves_nothing_half_written(
    folder: RecordFolder, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tempfile

    real = tempfile.NamedTemporaryFile

    def full(*args: Any, **kwargs: Any) -> Any:
        file = real(*args, **kwargs)
        os.dup2(os.open("/dev/full", os.O_WRONLY), file.fileno())
        return file

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", full)
    folder.write("program", HEADER, {"module": bytes(1 << 20)})
    assert "No space left" in caplog.text
    assert list(folder.path.iterdir()) == []


def test_a_disk_that_fails_is_said_once(folder: RecordFolder, caplog: pytest.LogCaptureFixture) -> None:
    folder.path.write_text("a file where a folder is to be")
    for name in ("weights", "program"):
        folder.write(name, HEADER, BLOBS)
    (warning,) = caplog.records
    assert f"{folder.path}/weights{SUFFIX} can't be written: " in warning.getMessage()


def test_what_a_killed_process_left_is_removed_and_writes_under_way_stay(folder: RecordFolder) -> None:
    folder.path.mkdir()
    old, new = folder.path / "old.partial", folder.path / "new.partial"
    for file in (old, new):
        file.write_bytes(b"half")
    yesterday = time.time() - 86_400
    os.utime(old, (yesterday, yesterday))
    folder.write("program", HEADER, BLOBS)
    assert not old.exists()
    assert new.exists()


def test_readers_beside_writers_see_whole_records_only(folder: RecordFolder, caplog: pytest.LogCaptureFixture) -> None:
    done = threading.Event()

    def write(version: int) -> None:
        while not done.is_set():
            folder.write("program", {"version": version}, {"module": bytes([version]) * 50_000})

    writers = [threading.Thread(target=write, args=(version,)) for version in range(3)]
    for writer in writers:
        writer.start()
    try:
        for _ in range(300):
            if (record := folder.read("program", as_it_is)) is not None:
                assert set(record.blobs["module"]) == {record.header["version"]}
    finally:
        done.set()
        for writer in writers:
            writer.join()
    assert not caplog.records
