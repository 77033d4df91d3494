from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from xlaserve.inspection import graph
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
