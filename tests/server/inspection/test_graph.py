from __future__ import annotations

import re
import shutil
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from xlaserve.inspection import graph, hlo
from xlaserve.inspection.explanation import Explanation
from xlaserve.inspection.hlo import Module


def test_edges_run_from_the_images_through_what_is_run_and_past_what_renames(
    module: Module, explained: Explanation
) -> None:
    edges = re.findall(r'"(\S+)" -> "(\S+)"', graph.dot(module, explained))
    assert edges == [
        *(("images", "pixels"), ("pixels", "convolution.1"), ("convolution.1", "activation")),
        ("activation", "dot.1"),
    ]


def test_a_loop_is_drawn_as_one_round(explained: Explanation) -> None:
    text = """
        HloModule m
        %body (s: (s32[], u8[4], f32[4])) -> (s32[], u8[4], f32[4]) {
          %s = (s32[], u8[4], f32[4]) parameter(0)
          %round = s32[] get-tuple-element(%s), index=0
          %images = u8[4]{0} get-tuple-element(%s), index=1
          %outputs = f32[4]{0} get-tuple-element(%s), index=2
          %next = s32[] add(%round, %round)
          %converted = f32[4]{0} convert(%images)
          %placed = f32[4]{0} add(%outputs, %converted)
          ROOT %results = (s32[], u8[4], f32[4]) tuple(%next, %images, %placed)
        }
        %condition (t: (s32[], u8[4], f32[4])) -> pred[] {
          %t = (s32[], u8[4], f32[4]) parameter(0)
          ROOT %yes = pred[] constant(true)
        }
        ENTRY %main () -> f32[4] {
          %pixels = u8[4]{0} parameter(0)
          %zero = s32[] constant(0)
          %blank = f32[4]{0} constant({...})
          %state = (s32[], u8[4], f32[4]) tuple(%zero, %pixels, %blank)
          %loop = (s32[], u8[4], f32[4]) while(%state), condition=%condition, body=%body
          %output = f32[4]{0} get-tuple-element(%loop), index=2
          ROOT %scaled = f32[4]{0} add(%output, %output)
        }
    """
    module = hlo.parse(textwrap.dedent(text))
    names = ["converted", "placed", "scaled"]
    rows = tuple(replace(explained.rows[0], name=name) for name in names)
    drawn = graph.dot(module, replace(explained, rows=rows))
    assert re.findall(r'"(\S+)" -> "(\S+)"', drawn) == [
        *(("images", "converted"), ("converted", "placed"), ("placed", "scaled"))
    ]
    assert "1 instructions that read weights alone" in drawn


def test_what_reads_weights_alone_is_a_number(module: Module, explained: Explanation) -> None:
    text = graph.dot(module, explained)
    assert '"factor"' not in text
    assert "1 instructions that read weights alone are not drawn" in text


def test_what_takes_longest_is_darkest(module: Module, explained: Explanation) -> None:
    text = graph.dot(module, explained)
    shades = dict(re.findall(r'^  "(\S+)" \[label=.*fillcolor="(#\w+)"\]$', text, re.MULTILINE))
    assert shades["convolution.1"] == "#e8643c"
    assert shades["dot.1"] == "#ffffff"


def test_names_can_break_out_of_nothing(module: Module, explained: Explanation) -> None:
    assert graph._quoted('a "b" \\ \n') == 'a \\"b\\" \\\\ \\n'


@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz is not installed")
def test_graphviz_draws_it(module: Module, explained: Explanation, tmp_path: Path) -> None:
    file = tmp_path / "graph.svg"
    assert graph.draw(graph.dot(module, explained), file)
    assert "convolution.1" in file.read_text()
    assert not graph.draw("not a graph", tmp_path / "other.svg")


def test_without_graphviz_nothing_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not graph.draw("digraph {}", tmp_path / "graph.svg")
    assert list(tmp_path.iterdir()) == []
