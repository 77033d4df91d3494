"""What each part needs to be installed."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OF_SERVER = ("tensorflow", "keras", "pydantic", "yaml", "rich", "uvloop", "psutil", "prometheus_client", "xlaserve")
OF_LOADTEST = ("plotly", "hdrh")
WITHOUT = """
import runpy, sys
sys.modules.update(dict.fromkeys(sys.argv.pop(1).split(",")))
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


def run(module: str, *arguments: str, without: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Runs a command in a process in which the packages `without` can't be imported."""
    return subprocess.run(
        [sys.executable, "-c", WITHOUT, ",".join(without) or "none", module, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("module", "without"),
    [
        ("xlaserve_client", (*OF_SERVER, *OF_LOADTEST, "xlaserve_loadtest", "PIL")),
        ("xlaserve", (*OF_LOADTEST, "tensorflow", "keras", "xlaserve_loadtest")),
        ("xlaserve_loadtest", ("tensorflow", "keras", "xlaserve")),
    ],
)
def test_each_command_runs_as_a_module_without_what_only_the_others_need(module: str, without: tuple[str, ...]) -> None:
    done = run(module, "--version", without=without)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{version('xlaserve')}\n", "")
    assert run(module, "--help", without=without).stdout.startswith("usage: ")


@pytest.mark.parametrize("missing", OF_LOADTEST)
def test_loadtest_without_its_extra_says_how_to_install_it(missing: str) -> None:
    done = run("xlaserve_loadtest", "report", "x", without=(missing,))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "loadtest needs xlaserve[loadtest]: pip install 'xlaserve[loadtest]'\n"


def test_plain_xlaserve_brings_neither_what_charts_need_nor_tensorflow() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    heavy = ("plotly", "hdrhistogram", "tensorflow", "keras")
    assert not [needed for needed in project["dependencies"] if needed.startswith(heavy)]
    extras = project["optional-dependencies"]
    assert not extras["client"]
    assert {needed.partition(">")[0] for needed in extras["loadtest"]} == {"plotly", "hdrhistogram"}
    assert "xlaserve[loadtest]" in extras["dev"]
