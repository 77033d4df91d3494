"""The commands, as processes: what they print where, and how they end."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path

import pytest
import yaml
from tests.server.conftest import CommandLine

from xlaserve import __version__, cli, config
from xlaserve.commands.subject import model_settings
from xlaserve.errors import ConfigError

TIMEOUT_S = 60
NOOP = "[{name: noop, source: 'builtin:noop', buckets: [1, 2], modes: [xla, graph]}]"
# Without TensorFlow, which takes seconds to import.
BROKEN = "[{name: broken, source: 'builtin:noop', weights: other}]"
COMMAND = (sys.executable, "-m", "xlaserve")
ANY_PORTS = ("--grpc-port", "0", "--http-port", "0", "--metrics-port", "0")
NO_TEMPORARY_FOLDER = """
import tempfile

def find_none():
    raise FileNotFoundError(2, "No usable temporary directory found")

tempfile._get_default_tempdir = find_none
"""
ENDLESS_COMPILATION = """
import threading
from xlaserve.models.sources.noop import NoopProgram

NoopProgram.compile = lambda *arguments: threading.Event().wait()
"""


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    return {**{key: value for key, value in os.environ.items() if not key.startswith("XLASERVE_")}, **extra}


def xlaserve(*arguments: object, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env=environment(env or {}),
    )


def assert_refused(done: subprocess.CompletedProcess[str], *says: str) -> None:
    """It ended with status 1 and one line that says why."""
    assert done.returncode == 1, done.stderr
    assert done.stdout == ""
    last = done.stderr.splitlines()[-1]
    assert last.startswith("xlaserve: ")
    for text in says:
        assert text in last
    assert "Traceback" not in done.stderr


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield taken.getsockname()[1]


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_server_serves_and_stops_with_standard_files_closed(tmp_path: Path, closed: str) -> None:
    ready = tmp_path / "ready"
    command = (*COMMAND, "serve", "--models", NOOP, *ANY_PORTS, "--ready-file", str(ready))
    with subprocess.Popen(["sh", "-c", f'exec "$0" "$@" {closed}', *command]) as process:
        try:
            give_up_at = time.monotonic() + TIMEOUT_S
            while not ready.exists():
                assert process.poll() is None
                assert time.monotonic() < give_up_at
                time.sleep(0.05)
            process.terminate()
            assert process.wait(TIMEOUT_S) == 0
        finally:
            process.kill()


# Configuration.


def test_the_configuration_that_is_shown_is_one_that_can_be_read(tmp_path: Path, command_line: CommandLine) -> None:
    shown = command_line("config", "--show", "--models", NOOP, "--grpc-port", 9001, "--no-reflection")
    assert shown.returncode == 0, shown.stderr
    assert shown.stderr == ""
    values = yaml.safe_load(shown.stdout)
    assert (values["grpc_port"], values["reflection"], values["models"][0]["name"]) == (9001, False, "noop")
    file = tmp_path / "config.yaml"
    file.write_text(shown.stdout)
    assert command_line("config", "--show", "--config", file).stdout == shown.stdout


def test_flags_override_the_environment_which_overrides_the_file(tmp_path: Path, command_line: CommandLine) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"{{grpc_port: 1, http_port: 2, lanes: 3, log_level: error, models: {NOOP}}}")
    env = {"XLASERVE_HTTP_PORT": "20", "XLASERVE_LANES": "30", "XLASERVE_CONFIG": str(file)}
    values = yaml.safe_load(command_line("config", "--show", "--lanes", "200", env=env).stdout)
    assert (values["grpc_port"], values["http_port"], values["lanes"]) == (1, 20, 200)
    assert values["log_level"] == "error"


def test_without_show_the_configuration_is_only_checked(command_line: CommandLine) -> None:
    done = command_line("config")
    assert (done.returncode, done.stderr) == (0, "")
    assert "valid" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "env", "says"),
    [
        (["--grpc-port", "high"], {}, ("grpc_port", "'high'", "whole number")),
        (["--config", "/nonexistent/file.yaml"], {}, ("/nonexistent/file.yaml", "can't be read")),
        (["--models", "[{name: a}]"], {}, ("model a: source: expected a value, got none",)),
        ([], {"XLASERVE_LANES": "many"}, ("lanes", "'many'")),
    ],
)
def test_a_wrong_configuration_is_refused_with_the_field_and_the_value(
    arguments: list[str], env: dict[str, str], says: tuple[str, ...], command_line: CommandLine
) -> None:
    assert_refused(command_line("config", *arguments, env=env), *says)


@pytest.mark.parametrize("columns", [80, 120])
def test_help_of_serve_explains_every_field_with_choices_and_default(columns: int, command_line: CommandLine) -> None:
    shown = command_line("serve", "--help-all", env={"COLUMNS": str(columns)}).stdout
    explained = [line for line in shown.splitlines() if line.startswith(" " * 8)]
    assert columns - 5 < max(map(len, explained)) <= columns
    for name in config.Settings.model_fields:
        assert f"--{name.replace('_', '-')}" in shown
    for name in (
        *config.ModelSettings.model_fields,
        *(f"auto_buckets.{name}" for name in config.AutoBuckets.model_fields),
    ):
        assert f"\n  {name}" in shown
    words = " ".join(shown.split())
    assert "--ready-when {all,first_bucket}" in words
    assert "gRPC port; 0 takes a free one. [8001]" in words
    assert "batch_dependence {single,refuse,allow} Treatment of a model" in words
    assert "The largest candidate. Candidates are" in words
    # Choices of what may be left out or is a list, values of other types, and defaults that are lists.
    assert "fit {resize,letterbox,pad,crop,center_crop,reject} How" in words
    assert "modes [{eager,graph,xla,autocluster,openvino,auto},...] The modes" in words
    assert "bucket in the fastest. [xla]" in words
    assert "--max-connection-idle-s X" in words
    assert "--compile-cache PATH" in words
    assert "custom_objects {NAME: TEXT} For" in words
    assert "The model's name in requests. [required]" in words
    assert "least expected cost. [1, 2, 4, 8, 16]" in words


def test_the_help_of_serve_fits_two_screens_and_says_where_the_rest_is(command_line: CommandLine) -> None:
    shown = command_line("serve", "--help", env={"COLUMNS": "100"}).stdout
    assert len(shown.splitlines()) < 100
    assert {"--labels", "--http-port", "--help-all"} <= set(re.findall(r"--[a-z-]+", shown))
    assert "--max-connections" not in shown


def test_examples_of_serve_are_in_its_own_help_alone(command_line: CommandLine) -> None:
    of_serve, of_config = (command_line(command, "--help-all").stdout for command in ("serve", "config"))
    assert ("xlaserve serve mine.keras" in of_serve, "xlaserve serve" in of_config) == (True, False)
    assert all("\nfields of a model" in shown for shown in (of_serve, of_config))


def test_the_fields_of_a_model_have_a_help_of_their_own(command_line: CommandLine) -> None:
    shown = command_line("help", "models").stdout
    assert all(f"\n  {name}" in shown for name in config.ModelSettings.model_fields)


def test_help_lists_every_command_in_its_group(command_line: CommandLine) -> None:
    shown = command_line("--help", env={"COLUMNS": "80"}).stdout
    assert max(map(len, shown.splitlines())) <= 80
    for group, commands in cli.COMMANDS.items():
        assert f"\n{group}:\n" in shown
        assert all(f"\n  {command.name} " in shown for command in commands)


def test_a_command_line_imports_its_own_command_alone() -> None:
    script = "import sys, xlaserve.cli; xlaserve.cli.parser(('key',)); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    imported = {name for name in done.stdout.split() if name.startswith("xlaserve.commands.")}
    assert "xlaserve.commands.key" in imported
    assert not {f"xlaserve.commands.{name}" for name in ("serve", "plan", "check", "remote")} & imported


@pytest.mark.parametrize("command", ["config", "serve", "warm"])
def test_files_that_are_not_there_are_refused_before_anything_is_loaded(
    command: str, tmp_path: Path, command_line: CommandLine
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("models: [{name: a, source: 'builtin:noop'}, {name: b, source: b.keras, labels: b.txt}]")
    done = command_line(command, "--config", file)
    assert_refused(done, f"model b: source: expected an existing path, got {tmp_path / 'b.keras'}", "model b: labels: ")
    assert "loading" not in done.stderr


@pytest.mark.parametrize("command", ["explain", "profile", "check"])
def test_a_model_of_a_configuration_that_was_not_named_is_said_to_need_it(
    command: str, command_line: CommandLine
) -> None:
    assert_refused(command_line(command, "mine"), "got mine; --config names the file that configures others")


def test_a_folder_is_a_source_by_its_bare_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="got saved; --config names"):
        model_settings(config.Settings(), "saved")
    (tmp_path / "saved").mkdir()
    assert model_settings(config.Settings(), "saved").source == "saved"


@pytest.fixture
def without_temporary_folder(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "sitecustomize.py").write_text(NO_TEMPORARY_FOLDER)
    return {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}


@pytest.mark.parametrize("command", ["explain digits", "check digits", "warm", "warm --compile-cache cache"])
def test_a_file_system_without_a_temporary_folder_is_said_in_a_sentence(
    command: str, without_temporary_folder: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = xlaserve(*command.split(), env=without_temporary_folder)
    assert_refused(done, "TMPDIR: expected a folder for temporary files that can be written")


def test_a_server_without_tensorflow_takes_no_temporary_folder(without_temporary_folder: dict[str, str]) -> None:
    done = xlaserve("warm", "--json", "--models", NOOP, env=without_temporary_folder)
    assert done.returncode == 0, done.stderr


# Usage.


def test_help_is_printed() -> None:
    done = xlaserve("--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: xlaserve")


@pytest.mark.parametrize("command", [command.name for command in chain(*cli.COMMANDS.values())])
def test_every_command_has_help(command: str, command_line: CommandLine) -> None:
    done = command_line(command, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: xlaserve {command} ")


@pytest.mark.parametrize(
    ("command", "takes", "others"),
    [
        *((command, set(config.Settings.model_fields), set()) for command in ("serve", "config")),
        *((command, {"host", "grpc_port"}, {"models", "http_port", "lanes"}) for command in ("ledger", "buckets")),
        ("plan", {"grpc_port", "lanes", "max_queue_images"}, {"models", "tls_key"}),
        *(
            (command, {"models", "device", "tf32"}, {"grpc_port", "access"})
            for command in ("explain", "profile", "warm")
        ),
        ("check", {"models", "device"}, {"grpc_port", "lanes"}),
        ("warm", {"compile_cache"}, {"ready_when", "load_process"}),
        *((command, set(), set(config.Settings.model_fields) - {"models"}) for command in ("key", "import", "inspect")),
    ],
)
def test_a_command_has_flags_for_the_settings_that_concern_it(
    command: str, takes: set[str], others: set[str], command_line: CommandLine
) -> None:
    text = "--help-all" if command in ("serve", "config") else "--help"
    shown = set(re.findall(r"--[a-z0-9-]+", command_line(command, text).stdout))
    assert {f"--{name.replace('_', '-')}" for name in takes} <= shown
    assert not {f"--{name.replace('_', '-')}" for name in others} & shown
    assert ("--config" in shown) == bool(takes)


def test_a_command_without_settings_reads_no_configuration(command_line: CommandLine) -> None:
    done = command_line("key", "shop", env={"XLASERVE_GRPC_PORT": "none"})
    assert (done.returncode, done.stdout[:4]) == (0, "xla_")


def test_the_version_is_printed(command_line: CommandLine) -> None:
    assert command_line("--version").stdout == f"{__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "command", "says"),
    [
        ((), "xlaserve", "required: COMMAND"),
        (("nonsense",), "xlaserve", "invalid choice: 'nonsense'"),
        (("serve", "--nonsense"), "xlaserve serve", "unrecognized arguments: --nonsense"),
        (("--nonsense", "serve"), "xlaserve", "unrecognized arguments: --nonsense"),
        (("--grpc-port=0", "serve"), "xlaserve", "options follow the command: xlaserve COMMAND --grpc-port ..."),
        (("config", "--models", "a: ["), "xlaserve config", "argument --models: not YAML"),
    ],
)
def test_wrong_usage_is_one_line_that_says_where_help_is(
    arguments: tuple[str, ...], command: str, says: str, command_line: CommandLine
) -> None:
    done = command_line(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"{command}: error: ")
    assert says in line
    assert line.endswith(f"; see {command} --help")


def test_a_reader_that_leaves_early_is_no_accident() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout:
        done = subprocess.run(
            [*COMMAND, "config", "--show"],
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
            env=environment({}),
        )
    assert (done.returncode, done.stderr) == (1, "")


# Warm-up.


def test_warm_prints_the_ledger_as_json_on_stdout_and_nothing_else() -> None:
    model = "[{name: digits, source: 'builtin:digits', buckets: [1, 2], modes: [xla, eager]}]"
    done = xlaserve("warm", "--json", "--models", model)
    assert done.returncode == 0, done.stderr
    ledger = json.loads(done.stdout)
    assert [(entry["model"], entry["mode"], entry["bucket"]) for entry in ledger] == [
        ("digits", mode, [batch, 32, 32]) for mode in ("xla", "eager") for batch in (1, 2)
    ]
    for entry in ledger:
        assert entry["run_s"] > 0
        assert entry["run_loaded_s"] > 0
        assert (entry["compile_s"] > 0) == (entry["mode"] == "xla")
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", entry["at"])
    assert "model digits: ready" in done.stderr


def test_warm_prints_the_ledger_as_a_table() -> None:
    done = xlaserve("warm", "--models", NOOP)
    assert done.returncode == 0, done.stderr
    title, *rows = done.stdout.splitlines()
    assert title.split()[:3] == ["model", "mode", "bucket"]
    assert [row.split()[:3] for row in rows] == [
        ["noop", mode, f"{batch}x224x224"] for mode in ("xla", "graph") for batch in (1, 2)
    ]
    assert "noop: xla 2x224x224 compiled in" in done.stderr
    assert "(4 of 4)" in done.stderr


def test_warm_fails_with_the_reason_of_the_model_that_failed() -> None:
    assert_refused(xlaserve("warm", "--json", "--models", BROKEN), "model broken failed: weights: ", "got other")


def test_ctrl_c_ends_a_warm_up_at_once(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(ENDLESS_COMPILATION)
    with subprocess.Popen(
        [*COMMAND, "warm", "--models", NOOP],
        stderr=subprocess.PIPE,
        text=True,
        env=environment({"PYTHONPATH": str(tmp_path)}),
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "compiling" in line:
                break
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130
    assert "Traceback" not in said


# Serving.


def test_a_model_that_fails_ends_the_server_with_its_reason() -> None:
    models = f"{BROKEN[:-1]}, {NOOP[1:]}"
    done = xlaserve("serve", "--models", models, *ANY_PORTS)
    assert_refused(done, "model broken failed: weights: ", "got other")


@pytest.mark.parametrize("kind", ["grpc", "http", "metrics"])
def test_a_taken_port_is_named(taken_port: int, kind: str) -> None:
    ports = {"grpc": 0, "http": 0, "metrics": 0, kind: taken_port}
    flags = [value for name, port in ports.items() for value in (f"--{name}-port", port)]
    done = xlaserve("serve", "--models", NOOP, *flags)
    assert_refused(done, f"{kind}_port: expected a free port of 127.0.0.1, got {taken_port}: Address already in use")
    assert done.stderr.splitlines()[-1].endswith("choose another: 0 takes a free one")


def test_a_ready_file_that_cannot_be_made_is_refused_before_loading(tmp_path: Path) -> None:
    done = xlaserve("serve", "--models", NOOP, "--ready-file", tmp_path / "missing" / "ready.json", *ANY_PORTS)
    assert_refused(done, "ready_file: expected a file in a folder that exists", "missing/ready.json")
    assert "loading" not in done.stderr


def served(*arguments: object) -> tuple[int, str]:
    """Serves until it is ready, then ends it; returns the status and what it wrote to its terminal."""
    terminal, end = pty.openpty()
    command = [*COMMAND, "serve", *ANY_PORTS, *map(str, arguments)]
    process = subprocess.Popen(command, stdin=end, stdout=end, stderr=end, env=environment({"TERM": "xterm-256color"}))
    os.close(end)
    said = b""
    try:
        while b"ready: noop" not in said:
            said += os.read(terminal, 65_536)
        process.terminate()
        while True:
            said += os.read(terminal, 65_536)
    except OSError:  # the server closed its end
        process.wait(TIMEOUT_S)
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
    return process.returncode, said.decode()


def test_on_a_terminal_the_log_is_above_a_bar_that_goes_after_loading() -> None:
    models = f"{BROKEN[:-1]}, {NOOP[1:]}"
    status, said = served("--models", models, "--no-exit-on-model-failure")
    assert status == 0, said
    lines = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", said))
    assert any("warming up" in line for line in lines)
    logged = [line for line in lines if re.search(r"\d\d:\d\d:\d\d (INFO|ERROR) ", line)]
    assert all(re.match(r"\d\d:\d\d:\d\d ", line) for line in logged)
    after = lines[next(number for number, line in enumerate(lines) if " ready: " in line) :]
    assert not [line for line in after if "━" in line]
    assert after[-2].endswith("stopped")


def test_a_stale_ready_file_is_gone_until_the_server_is_ready(tmp_path: Path) -> None:
    file = tmp_path / "ready.json"
    file.write_text('{"grpc": "of a server that was killed"}')
    done = xlaserve("serve", "--models", BROKEN, "--ready-file", file, *ANY_PORTS)
    assert_refused(done, "model broken failed")
    assert not file.exists()


@pytest.mark.parametrize("fronts", [0, 1])
def test_a_second_start_leaves_the_ready_file_of_the_first(tmp_path: Path, fronts: int) -> None:
    file = tmp_path / "ready.json"
    models = ("--models", NOOP, "--fronts", fronts, "--ready-file", file)
    first = subprocess.Popen([*COMMAND, "serve", *map(str, (*models, *ANY_PORTS))], stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + TIMEOUT_S
        while not file.exists():
            assert time.monotonic() < until
            assert first.poll() is None
            time.sleep(0.05)
        found = json.loads(file.read_text())
        ports = [part for name in ("grpc", "http") for part in (f"--{name}-port", found[name].rpartition(":")[2])]
        done = xlaserve("serve", *models, *ports, "--metrics-port", 0)
        assert_refused(done, "_port: expected a free port")
        assert json.loads(file.read_text()) == found
    finally:
        first.terminate()
        status = first.wait(TIMEOUT_S)
    assert (status, file.exists()) == (0, False)


def test_an_ipv6_address_is_written_as_one() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    status, said = served("--models", NOOP, "--host", "::1", "--log-format", "json")
    assert status == 0, said
    assert re.search(r"listening: gRPC \[::1\]:\d+, HTTP \[::1\]:\d+, metrics \[::1\]:\d+", said)
