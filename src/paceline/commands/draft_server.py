"""`paceline draft-server`: passes on between workers what each of them generates."""

from __future__ import annotations

import signal
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from paceline.errors import ConfigError, InstallError

MIB = 1 << 20


def draft_server(
    address: Annotated[
        str, typer.Argument(metavar="ADDRESS", help="Where to listen; port 0 takes a free one.")
    ] = "tcp://127.0.0.1:5757",
    secret_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="16 to 64 bytes that clients must know too; needed beyond this machine."
        ),
    ] = None,
    memory_mib: Annotated[
        int, typer.Option(help="Bound on what is kept, MiB; whole groups go, oldest first.")
    ] = 1024,
    ttl_s: Annotated[
        float, typer.Option(help="A group that nobody used for so long is dropped, seconds.")
    ] = 3600.0,
) -> None:
    """Let workers draft from what all of them generate, not from their own responses alone.

    Point every worker's engine at it: EngineSettings(draft_servers=("tcp://HOST:PORT",)). Start several and list all of
    them everywhere to spread the groups. It may be stopped and started at any time: it slows nothing down and changes
    no token. Ctrl-C ends it.

    Example: paceline draft-server tcp://127.0.0.1:5757
    """
    if memory_mib < 1 or not ttl_s > 0:
        raise ConfigError(f"--memory-mib {memory_mib}, --ttl-s {ttl_s}: both must be above 0")
    try:
        import zmq  # noqa: F401
    except ImportError as error:
        raise InstallError(
            f"the draft server needs pyzmq ({error}): pip install 'paceline[fleet]'"
        ) from error
    from paceline.drafting.server import DraftServer
    from paceline.drafting.wire import read_secret

    server = DraftServer(address, secret=read_secret(secret_file), max_bytes=memory_mib * MIB, ttl_s=ttl_s)

    def stop(number: int, frame: FrameType | None) -> None:
        server.stop()

    for number in (signal.SIGINT, signal.SIGTERM):  # named, as a shell ignores Ctrl-C for what it puts behind
        signal.signal(number, stop)
    try:
        typer.echo(f"draft server: {server.address}")
        server.serve()
        typer.echo(f"draft server: ended, {server.num_refused} messages refused")
    finally:
        server.close()
