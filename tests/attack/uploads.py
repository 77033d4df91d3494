"""Large messages, many at a time, in little memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Final

from tests.attack import http1, samples
from tests.attack.client import INFERENCE, Client
from tests.attack.registry import OK, Round, attack
from tests.attack.server import MIB
from tests.control_groups import killed, limited_memory

from xlaserve_proto import open_inference_pb2 as pb

LARGE_BYTES: Final = 60 * MIB
GROUP_BYTES: Final = 1280 * MIB
"""Less than the messages of all clients take together where nothing bounds them."""
CLIENTS: Final = 24
LIMIT: Final = "xlaserve_in_flight_message_bytes_limit"
SEEN_S: Final = 30.0
"""How long a limit that is set while it serves may go unseen."""


@attack(allowed={"NOT_FOUND", "404", "RESOURCE_EXHAUSTED", "429"}, site="own", is_short=False)
def large_uploads_at_once(round: Round) -> None:
    """Two dozen uploads of 60 MiB at a time, by both protocols, in a control group of less: none is killed."""
    with ExitStack() as stack:
        try:
            group = stack.enter_context(limited_memory(GROUP_BYTES))
        except OSError as error:
            round.tally.notes.append(f"no control group could be made: {error}")
            round.count(OK, "no control group", frozenset({OK}))
            return
        server = round.start({"models": [{"name": "noop", "source": "builtin:noop", "buckets": [1]}]})
        stack.callback(round.end)  # the group goes once nobody is in it
        server.wait_until_ready()
        for process in server.processes:
            (group / "cgroup.procs").write_text(str(process.pid))
        server.wait_for(lambda: server.metric(LIMIT) <= GROUP_BYTES / 3, "notice the limit", SEEN_S)
        message = pb.ModelInferRequest(model_name="nope", raw_input_contents=[bytes(LARGE_BYTES)]).SerializeToString()
        request = http1.Request("POST", "/v2/models/nope/infer", damaged=b" " * LARGE_BYTES)

        def post() -> tuple[str, str | None]:
            with http1.Client(server.http) as client:
                outcome, _, wrong = client.ask(request)
                return outcome, wrong

        valid = samples.noop([7])
        with ThreadPoolExecutor(CLIENTS // 2) as pool, Client(server.grpc) as client:
            while round.has_time:
                posts = [pool.submit(post) for _ in range(CLIENTS // 2)]
                calls = [client.send(f"{INFERENCE}ModelInfer", message) for _ in range(CLIENTS // 2)]
                for call in calls:
                    round.settle(call, "a large message")
                for each in posts:
                    outcome, wrong = each.result()
                    round.count(outcome, "a large request", wrong=wrong)
                if deaths := killed(group):
                    round.tally.fault(f"{deaths} processes were killed for lack of memory")
                    break
                call = client.send(valid.method, valid.message.SerializeToString())
                round.settle(call, "a call afterwards", allowed=frozenset({OK}), check=valid.check)
