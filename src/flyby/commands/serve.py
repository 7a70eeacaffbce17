"""``flyby serve``: a model behind a page of this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from flyby.commands.common import (
    Device,
    LimitOptions,
    ModelFolder,
    RequireSigned,
    TrustFile,
    answering_model,
    grouped,
    note,
)


@grouped
def serve(
    *,
    model: ModelFolder,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Where the page is; 0: any that is free.")] = 8000,
    host: Annotated[
        str, typer.Option(help="Whom to listen to; 0.0.0.0: everybody who can reach this machine.")
    ] = "127.0.0.1",
    trust: TrustFile = None,
    require_signed: RequireSigned = False,
    allowed: LimitOptions,
    device: Device = "auto",
) -> None:
    """Show a model on a page: drop an image, see what it says. Ctrl-C ends it."""
    from contextlib import suppress

    from flyby.deploy.serve import HERE, Served, Server
    from flyby.fusion.predictor import card_in
    from flyby.machine import pick_device

    predictor = answering_model(model, trust, require_signed, allowed)
    name = model.resolve().stem if model.is_file() else model.resolve().name
    served = Served(predictor, name, card_in(model), pick_device(device))
    with Server(served, host, port) as server, suppress(KeyboardInterrupt):
        if host not in HERE:
            note([f"whoever can reach {host} may ask this model, without a password and in plain text"])
        print(f"{model} is at {server.url} (Ctrl-C ends it)", flush=True)
        server.serve_forever()
    print(f"\n{served.answered} image{'s' if served.answered != 1 else ''} answered")
