from __future__ import annotations

from pathlib import Path

import pytest

from xlaserve.inspection import buffers, dump
from xlaserve.inspection.buffers import Memory

ASSIGNMENT = """BufferAssignment:
allocation 0: size 5120000, parameter 261, shape |f32[1280,1000]| at ShapeIndex {}:
 value: <1607 arg261.1 @0> (size=5120000,offset=0): f32[1280,1000]{1,0}
allocation 1: size 55296, parameter 0, shape |u8[2,96,96,3]| at ShapeIndex {}:
allocation 2: size 8000, output shape is |f32[2,1000]|, maybe-live-out:
allocation 3: size 4, constant:
allocation 4: size 4, thread-local:
allocation 5: size 3601760, preallocated-temp:
"""


def test_allocations_add_up_by_what_they_hold() -> None:
    expected = Memory(input=55296, parameters=5120000, constants=4, temporaries=3601764, outputs=8000)
    assert buffers.parse(ASSIGNMENT) == expected
    assert expected.run == 55296 + 3601764 + 8000


def test_what_is_no_buffer_assignment_is_refused() -> None:
    with pytest.raises(ValueError, match="found no allocation"):
        buffers.parse("hello")


def test_the_stages_of_a_program_belong_together(tmp_path: Path) -> None:
    for module in ("module_0001.a[x].4", "module_0002.b.4"):
        for stage in (
            ".before_optimizations",
            ".cpu_after_optimizations",
            ".cpu_after_optimizations-buffer-assignment",
        ):
            (tmp_path / f"{module}{stage}.txt").write_text(f"{module}{stage}")
    first, second = sorted(dump.compiled(tmp_path))
    assert dump.read(first).optimized_hlo == "module_0001.a[x].4.cpu_after_optimizations"
    assert dump.read(second).buffer_assignment == "module_0002.b.4.cpu_after_optimizations-buffer-assignment"


def test_a_program_that_was_not_finished_is_an_error(tmp_path: Path) -> None:
    (unfinished := tmp_path / "m.before_optimizations.txt").touch()
    assert dump.compiled(tmp_path) == set()
    with pytest.raises(OSError, match="No such file"):
        dump.read(unfinished)


def test_xla_is_asked_besides_what_the_environment_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_use_xnnpack=true")
    with dump.dumped() as folder:
        import os

        assert os.environ["XLA_FLAGS"].startswith(f"--xla_cpu_use_xnnpack=true --xla_dump_to={folder} ")
    assert not folder.exists()
