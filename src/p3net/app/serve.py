"""`p3net serve`: a page in the browser to count, to mark points and to train."""

from __future__ import annotations

import signal
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from p3net.errors import InputError

if TYPE_CHECKING:
    from p3net.app.web.session import Session

LOOPBACK = ("127.0.0.1", "::1", "localhost")


def serve(
    model: Annotated[
        Path | None,
        typer.Argument(
            metavar="MODEL",
            help="A run's folder, or a file of weights. By default the newest run of --data, or "
            "without --data the model in the box.",
        ),
    ] = None,
    *,
    data: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Images to mark and to train on; points go there."),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Where to listen; anything but this machine asks for a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8000,
    assign: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="a.b=c", help="A setting for training; may be repeated."),
    ] = None,
) -> None:
    """Count, mark points and train on one page in the browser.

    p3net serve --data photos/                 mark, train, then count

    p3net serve runs/square                    count; without a model, with the one in the box

    Every change is on disk at once, in a folder that `p3net data` and `p3net train` read. With
    another --host the page can be reached from outside: the address then has a token in it.
    """
    try:
        import fastapi
        import python_multipart
        import uvicorn
    except ImportError:
        raise InputError("the page needs more packages: pip install 'p3net[serve]'") from None
    del fastapi, python_multipart

    import secrets

    from p3net.app.web.guard import Rules
    from p3net.app.web.server import create_app
    from p3net.app.web.session import Limits, Model, Session
    from p3net.app.web.store import Store
    from p3net.checkpoint import BOX, load
    from p3net.configuration import assignments, settings

    if model is None and data is None:
        model = Path(BOX)
    # What is wrong is refused now, not when training starts.
    settings({"data": str(data), **assignments(assign or [])}, preset="quick")
    limits = Limits()
    with ExitStack() as stack:
        listening = stack.enter_context(_listen(host, port))
        counter = None if model is None else Model(load(model), model.name or str(model))
        store = None if data is None else Store(data)
        session = Session(store, counter, tuple(assign or ()), limits)
        stack.callback(session.close)
        token = None if host in LOOPBACK else secrets.token_urlsafe(24)
        app = create_app(session, Rules(token, body_bytes=limits.upload_bytes + 100_000))
        config = uvicorn.Config(
            app,
            log_level="warning",
            server_header=False,
            limit_concurrency=512,
            timeout_graceful_shutdown=10,
            timeout_keep_alive=20,
        )
        # uvicorn ends gently on both signals, then raises them again for whoever listened before.
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, lambda *_: None)
        _announce(session, listening, host, token)
        uvicorn.Server(config).run(sockets=[listening])
    typer.echo("stopped; all marks are saved", err=True)


def _listen(host: str, port: int) -> socket.socket:
    with ExitStack() as failing:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            listening = failing.enter_context(socket.socket(family, kind, protocol))
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen(256)
        except OSError as error:
            raise InputError(
                f"cannot listen on {host} port {port} ({error.strerror}); choose another --port, "
                "or 0 for any that is free"
            ) from None
        failing.pop_all()
    return listening


def _announce(session: Session, listening: socket.socket, host: str, token: str | None) -> None:
    port = listening.getsockname()[1]
    shown = f"[{host}]" if ":" in host else host
    if host in ("0.0.0.0", "::"):  # noqa: S104  only to show a name that leads here
        shown = socket.gethostname()
    address = f"http://{shown}:{port}/" + (f"?token={token}" if token else "")
    has = []
    if session.model is not None:
        has.append(f"counting with {session.model.name}")
    if session.store is not None:
        has.append(f"marking {len(session.store.entries):,} images in {session.store.folder}")
    typer.echo(f"{'; '.join(has)}\n{address}")
    if token:
        typer.echo("the token is all that keeps others out, and it is not encrypted", err=True)
