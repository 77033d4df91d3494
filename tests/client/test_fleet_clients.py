"""Both clients on a fleet: a name service and servers, over real sockets on loopback."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import socket
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import grpc
import grpc.aio
import psutil
import pytest
import trustme
from tests.client.conftest import Puppet, StartPuppet, running_puppet
from tests.client.fleets import PATIENCE_S, MakeClient, NameService, ask, eventually

from xlaserve_client import Overloaded, Unavailable, VisionClient, connection
from xlaserve_client import name_service as name_service_module
from xlaserve_client.cli import main
from xlaserve_client.connection import MAX_ATTEMPTS

UNAVAILABLE = (grpc.StatusCode.UNAVAILABLE, "draining")


def test_calls_take_turns(make_client: MakeClient, service: NameService, puppets: list[Puppet]) -> None:
    with make_client(service.target) as client:
        assert [ask(client, number) for number in range(9)] == list(range(9))
    assert [len(puppet.seen) for puppet in puppets] == [3, 3, 3]


def test_a_call_goes_to_the_server_with_the_fewest_that_are_not_answered(
    make_client: MakeClient, service: NameService, puppets: list[Puppet]
) -> None:
    puppets[0].hold = threading.Event()
    with make_client(service.target) as client, ThreadPoolExecutor(1) as pool:
        held = pool.submit(ask, client, 7)
        eventually(lambda: puppets[0].seen)
        for number in range(8):
            assert ask(client, number) == number
        assert [len(puppet.seen) for puppet in puppets] == [1, 4, 4]
        puppets[0].hold.set()
        assert held.result(PATIENCE_S) == 7


def test_every_method_goes_to_a_fleet_but_those_that_change_one_server(
    make_client: MakeClient, service: NameService, puppets: list[Puppet]
) -> None:
    with make_client(service.target, priority=3) as client:
        assert client.infer(b"\x01", model="digits").scores.argmax() == 1
        assert [model.name for model in client.models()] == ["digits", "broken"]
        assert client.ready("digits")
        client.wait_until_ready(5)
        for verb in ("load", "unload"):
            with pytest.raises(ValueError, match="expected a client of one server, HOST:PORT, got one of a fleet"):
                getattr(client, verb)("digits")
    assert sum(len(puppet.seen) for puppet in puppets) == 4
    assert puppets[0].seen[0].parameters["priority"].int64_param == 3


def test_a_server_that_drains_ends_its_calls_and_gets_no_others(
    make_client: MakeClient, service: NameService, puppets: list[Puppet]
) -> None:
    leaving, *others = puppets
    leaving.hold = threading.Event()
    with make_client(service.target) as client, ThreadPoolExecutor(1) as pool:
        held = pool.submit(ask, client, 7)
        eventually(lambda: leaving.seen)
        service.publish(*(puppet.target for puppet in others), draining=(leaving.target,))
        service.wait_until_heard()
        for number in range(8):
            assert ask(client, number) == number
        assert [len(puppet.seen) for puppet in puppets] == [1, 4, 4]
        service.publish(*(puppet.target for puppet in others))
        service.wait_until_heard()
        leaving.hold.set()
        assert held.result(PATIENCE_S) == 7


def test_every_call_is_answered_while_servers_are_killed_and_started(
    make_client: MakeClient, service: NameService, puppets: list[Puppet], start_puppet: StartPuppet
) -> None:
    answered: Counter[bool] = Counter()
    is_over = threading.Event()

    def send(own: int) -> Counter[bool]:
        found: Counter[bool] = Counter()
        while not is_over.is_set():
            found[ask(client, own) == own] += 1
        return found

    def wait_for_calls(puppet: Puppet) -> None:
        before = len(puppet.seen)
        eventually(lambda: len(puppet.seen) > before + 20)

    with make_client(service.target) as client, ThreadPoolExecutor(8) as pool:
        senders = [pool.submit(send, own) for own in range(8)]
        try:
            for puppet in puppets[:2]:
                wait_for_calls(puppet)
                puppet.kill()  # and it stays listed
                wait_for_calls(puppets[2])
            started = start_puppet()
            service.publish(puppets[2].target, started.target)
            wait_for_calls(started)
        finally:
            is_over.set()
        for sender in senders:
            answered += sender.result(PATIENCE_S)
    assert set(answered) == {True}


@pytest.mark.parametrize("options", [{}, {"hedge_after_s": 5.0}], ids=["plain", "hedged"])
def test_a_call_that_a_server_cancels_as_it_ends_is_made_again_on_another(
    make_client: MakeClient, service: NameService, puppets: list[Puppet], options: dict[str, float]
) -> None:
    puppets[0].failures = [(grpc.StatusCode.CANCELLED, "gone")]
    with make_client(service.target, **options) as client:
        assert [ask(client, number) for number in range(3)] == list(range(3))
    assert [len(puppet.seen) for puppet in puppets] == [1, 2, 1]


def test_what_is_not_idempotent_or_wrong_is_not_sent_to_another(
    make_client: MakeClient, service: NameService, puppets: list[Puppet]
) -> None:
    for puppet in puppets:
        puppet.failures = [UNAVAILABLE, (grpc.StatusCode.INVALID_ARGUMENT, "no image")]
    with make_client(service.target) as client:
        assert client.ready() is False
        assert sum(len(puppet.seen) for puppet in puppets) == 1


def test_attempts_are_bounded_and_the_error_names_the_server(
    make_client: MakeClient, service: NameService, puppets: list[Puppet]
) -> None:
    for puppet in puppets:
        puppet.failures = [UNAVAILABLE] * 9
    with make_client(service.target) as client:
        with pytest.raises(Unavailable, match="draining") as caught:
            ask(client)
        assert caught.value.target in [puppet.target for puppet in puppets]
    assert sum(len(puppet.seen) for puppet in puppets) == MAX_ATTEMPTS
    assert min(len(puppet.seen) for puppet in puppets) >= 1


def test_a_server_without_room_is_obeyed_as_if_it_were_alone(
    make_client: MakeClient, service: NameService, puppets: list[Puppet]
) -> None:
    full = (grpc.StatusCode.RESOURCE_EXHAUSTED, "full", 0.2)
    puppets[0].failures = [full]
    with make_client(service.target) as client, pytest.raises(Overloaded):
        ask(client)
    puppets[0].failures = [full]
    with make_client(service.target, retry_overload=True) as client:
        before = time.monotonic()
        ask(client)
        assert time.monotonic() - before >= 0.2
    assert len(puppets[0].seen) == 2
    assert len(puppets[1].seen) == 1


def test_a_server_that_can_not_be_reached_is_passed_over(
    make_client: MakeClient, service: NameService, puppets: list[Puppet], closed_port: str
) -> None:
    service.publish(closed_port, puppets[0].target)
    with make_client(service.target) as client:
        assert [ask(client, number) for number in range(20)] == list(range(20))


def test_a_server_that_accepts_and_says_nothing_is_passed_over_in_time(
    make_client: MakeClient, service: NameService, puppets: list[Puppet], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_CONNECT_TIMEOUT_MS", 300)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        service.publish(f"127.0.0.1:{silent.getsockname()[1]}", puppets[0].target)
        with make_client(service.target) as client:
            before = time.monotonic()
            assert [ask(client, number) for number in range(5)] == list(range(5))
            assert time.monotonic() - before < 8


def test_calls_continue_without_the_name_service_and_follow_its_return(
    make_client: MakeClient, service: NameService, puppets: list[Puppet]
) -> None:
    with make_client(service.target) as client:
        ask(client)
        service.stop()
        assert [ask(client, number) for number in range(6)] == list(range(6))
        service.generation = 1000  # one that was restarted counts from elsewhere
        service.publish(puppets[2].target)
        service.asked.clear()
        service.start()
        service.wait_until_heard()
        before = len(puppets[2].seen)
        assert [ask(client, number) for number in range(6)] == list(range(6))
        assert len(puppets[2].seen) == before + 6


def test_a_name_service_that_was_never_reached_is_named(make_client: MakeClient, closed_port: str) -> None:
    with make_client(f"fleet://{closed_port}", deadline_s=5) as client:
        before = time.monotonic()
        with pytest.raises(Unavailable) as caught:
            ask(client)
        assert time.monotonic() - before < 5
        assert client.ready() is False
    assert f"http://{closed_port}/v1/servers could not be asked" in str(caught.value)
    assert "refused" in str(caught.value)


def test_a_silent_name_service_is_waited_for_until_the_deadline(make_client: MakeClient) -> None:
    silent = socket.create_server(("127.0.0.1", 0))
    with silent, make_client(f"fleet://127.0.0.1:{silent.getsockname()[1]}", deadline_s=0.3) as client:
        before = time.monotonic()
        with pytest.raises(Unavailable, match="has not answered yet"):
            ask(client)
        assert time.monotonic() - before < 5


def test_where_no_server_is_ready_it_is_said(
    make_client: MakeClient, service: NameService, puppets: list[Puppet]
) -> None:
    service.publish(draining=(puppets[0].target,))
    with make_client(service.target) as client:
        with pytest.raises(Unavailable, match=r"listed 1 servers, none of them ready, \d+\.\d s ago"):
            ask(client)
        service.publish(puppets[1].target)
        client.wait_until_ready(PATIENCE_S)
        assert ask(client, 3) == 3


def test_tls_tokens_and_metadata_are_those_of_every_server(make_client: MakeClient, service: NameService) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    chain = b"".join(part.bytes() for part in issued.cert_chain_pems)
    of_server = grpc.ssl_server_credentials([(issued.private_key_pem.bytes(), chain)])
    of_client = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
    with running_puppet(of_server) as one, running_puppet(of_server) as other:
        service.publish(one.target, other.target)
        with make_client(service.target, credentials=of_client, token="secret") as client:
            assert [ask(client, number) for number in range(4)] == list(range(4))
        assert one.tokens == other.tokens == ["Bearer secret"] * 2
    assert not any("secret" in asked for asked in service.asked)


def held_by(process: psutil.Process) -> tuple[int, int]:
    """How many threads and open files the process has, and how many channels."""
    gc.collect()
    return process.num_threads(), process.num_fds()


def channels() -> int:
    gc.collect()
    return sum(isinstance(each, (grpc.Channel, grpc.aio.Channel)) for each in gc.get_objects())


def test_hundreds_of_changes_leave_no_threads_channels_or_files(
    make_client: MakeClient, service: NameService, puppets: list[Puppet], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(name_service_module, "MIN_PAUSE_S", 0.0)
    process = psutil.Process()
    targets = [puppet.target for puppet in puppets]
    before = channels()
    with make_client(service.target) as client:
        for number in range(100):
            service.publish(*targets[: number % 3 + 1])
            ask(client)
        threads, files = held_by(process)
        for number in range(300):
            kept = [target for place, target in enumerate(targets) if place != number % 4]
            service.publish(*kept, draining=tuple(set(targets) - set(kept)))
            service.wait_until_heard()
            ask(client)
        assert channels() - before <= len(targets)
        eventually(lambda: held_by(process)[0] <= threads + 2)
        eventually(lambda: held_by(process)[1] <= files + 10)
    eventually(lambda: channels() == before)


def test_closing_ends_the_thread_at_once(service: NameService, puppets: list[Puppet]) -> None:
    before = threading.active_count()
    for _ in range(20):
        with VisionClient(service.target) as client:
            ask(client)
    VisionClient(service.target).close()
    eventually(lambda: threading.active_count() <= before + 16 * len(puppets))  # those of the servers
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("fleet://")]


def test_a_client_that_cannot_start_its_event_loop_says_why_and_closes(
    service: NameService, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> asyncio.AbstractEventLoop:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(asyncio.events, "new_event_loop", fail)
    client = VisionClient(service.target)
    with pytest.raises(Unavailable, match=os.strerror(errno.EMFILE)):
        ask(client)
    client.close()


def test_a_closed_client_is_not_used(make_client: MakeClient, service: NameService, puppets: list[Puppet]) -> None:
    with make_client(service.target) as client:
        ask(client)
        client.close()
        with pytest.raises(ValueError, match="closed"):
            ask(client)


def test_the_command_takes_a_fleet(
    service: NameService, puppets: list[Puppet], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["models", "--target", service.target]) == 0
    assert "digits" in capsys.readouterr().out
    assert main(["models", "--target", "fleet://nonsense"]) == 1
    assert capsys.readouterr().err == "xlaserve-client: target: expected fleet://HOST:PORT, got 'fleet://nonsense'\n"
