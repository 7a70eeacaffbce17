"""At a site: the Flower ClientApp. It trains the SuperNode's own data by the code of ``flyby train`` and answers with
the parcel's bytes."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flyby.deploy.round import MEGABYTE, NodeSettings, Round, assignments, read_node, read_round
from flyby.deploy.scratch import Scratch
from flyby.errors import BadInput, FlybyError

PARCEL, SITE = "parcel", "site"  # the two records that an answer may hold: the bytes, or why there are none
# What Flower's Array calls the way its bytes were made; nobody but flyby's own reader opens them.
SERIAL = "flyby.parcel"


def make_app() -> Any:
    """The ClientApp that Flower runs; it answers ``train`` messages and nothing else."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
    from flwr.clientapp import ClientApp

    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        try:
            data = answer(context.run_config, context.node_config)
        except Exception as error:
            return Message(
                RecordDict({SITE: ConfigRecord({"error": reason(error, context.node_config)})}), reply_to=message
            )
        # An Array travels in pieces of 5 MB, each sent and stored by itself; one value of a ConfigRecord would be a
        # single message.
        return Message(
            RecordDict({PARCEL: ArrayRecord({PARCEL: Array("uint8", (len(data),), SERIAL, data)})}), reply_to=message
        )

    return app


def answer(run_config: Mapping[str, Any], node_config: Mapping[str, Any]) -> bytes:
    """The bytes of the site's parcel, trained as the round asks, on the data that the node names."""
    asked, node = read_round(run_config), read_node(node_config)
    if node.work:
        return _trained(asked, node, Path(node.work))
    with Scratch("flyby-site") as folder:
        return _trained(asked, node, folder)


def _trained(asked: Round, node: NodeSettings, work: Path) -> bytes:
    from flyby.parcels.signing import read_private
    from flyby.runs.site import Manner, train_parcel

    out = work / f"{node.site}.parcel"
    key = read_private(node.key) if node.key else None
    config = asked.config(node.data, assignments(node.settings))
    if config.split.val is None:  # nobody looks at a node's figures, so that it learns from all its images
        config = config.model_copy(update={"split": config.split.model_copy(update={"val": 0.0})})
    train_parcel(config, out, node.site, Manner(device=node.device, key=key))
    size = out.stat().st_size
    if size > asked.max_bytes:
        raise BadInput(
            f"the parcel has {size / MEGABYTE:,.1f} MB and this round takes {asked.max_megabytes} MB; send less with"
            " --set codec=int8 or raise max-megabytes"
        )
    return out.read_bytes()


def reason(error: Exception, node_config: Mapping[str, Any]) -> str:
    """What the server may know of a failure: flyby's own sentence without the site's paths, of anything else the kind
    alone. The site's log has it all."""
    traceback.print_exception(error, file=sys.stderr)
    if not isinstance(error, FlybyError):
        return f"{type(error).__name__} at the site; its log says more"
    sentence = str(error)
    for name in ("data", "work", "key"):
        path = str(node_config.get(name, ""))
        sentence = sentence.replace(path, f"<{name}>") if path else sentence
    return sentence
