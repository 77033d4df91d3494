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
OF_LOADTEST = ("markupsafe", "plotly", "pynvml")
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
    of_loadtest = {"markupsafe", "nvidia-ml-py", "plotly"}
    heavy = (*of_loadtest, "tensorflow", "keras")
    assert not [needed for needed in project["dependencies"] if needed.startswith(heavy)]
    extras = project["optional-dependencies"]
    assert not extras["client"]
    assert {needed.partition(">")[0] for needed in extras["loadtest"]} == of_loadtest
    assert any(needed.startswith("xlaserve[") and "loadtest" in needed for needed in extras["dev"])


@pytest.mark.parametrize(
    ("module", "words", "offered"),
    [
        ("xlaserve", "xlaserve se", {"serve"}),
        ("xlaserve", "xlaserve serve --log-", {"--log-level", "--log-format"}),
        ("xlaserve", "xlaserve serve --config ./a", {"./a.yaml"}),
        ("xlaserve", "xlaserve serve --ready-file ./a", {"./a.yaml"}),
        ("xlaserve_client", "xlaserve-client de", {"detect"}),
        ("xlaserve_client", "xlaserve-client classify digits ./a", {"./a.yaml"}),
        ("xlaserve_loadtest", "loadtest --save-a", {"--save-arrivals"}),
        ("xlaserve_loadtest", "loadtest re", {"report"}),
        ("xlaserve_loadtest", "loadtest sweep --retry", {"--retry-failed"}),
    ],
)
def test_bash_completes_commands_flags_and_files(module: str, words: str, offered: set[str], tmp_path: Path) -> None:
    (tmp_path / "a.yaml").touch()
    script = run(module, "--print-completion", "bash").stdout
    function = script.split()[-2]
    ask = f"COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); {function}; printf '%s\\n' ${{COMPREPLY[@]}}"
    done = subprocess.run(
        ["bash", "-c", f"{script}\n{ask}"], capture_output=True, text=True, check=True, cwd=tmp_path, timeout=60
    )
    assert set(done.stdout.split()) == offered


@pytest.mark.parametrize("module", ["xlaserve", "xlaserve_client", "xlaserve_loadtest"])
def test_zsh_has_a_completion_too(module: str) -> None:
    assert run(module, "--print-completion", "zsh").stdout.startswith("#compdef ")
