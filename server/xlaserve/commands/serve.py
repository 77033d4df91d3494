"""`xlaserve serve`: compiles every model, then serves."""

from __future__ import annotations

from xlaserve import console
from xlaserve.commands.command import Command, Invocation, run_loop


def run(invocation: Invocation) -> int:
    """Serves until a signal."""

    async def serve() -> int:
        from xlaserve.app import App  # noqa: PLC0415

        with console.WarmUp(invocation.settings) as progress:
            app = App(
                invocation.settings,
                read_models=lambda: invocation.load().models,
                on_record=progress.record,
                on_loaded=progress.end,
            )
            return await app.run()

    return run_loop(serve())


COMMAND = Command("serve", "compile every model, then serve until a signal", run)
