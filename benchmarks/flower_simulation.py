"""The same one-shot round under ``flyby run`` and under Flower's simulation engine, each from the start of its process
to the judged model.

    python benchmarks/flower_simulation.py                                   # digits, 8 clients, 20 epochs, plain
    training, FedAvg python benchmarks/flower_simulation.py --clients 20 --epochs 40 --repeats 5

Same sites (one seeded split), same network and first weights, same epochs, batches and optimiser: Flower's clients call
flyby's own ``train_site``, so that only what is around the training differs. Flower runs as its users run it from
Python (``run_simulation``, one CPU a client, as many at once as there are cores); it needs ``flwr`` and ``ray``, which
flyby's extras ``flower`` and ``ray`` install. flyby also writes its report and judges every site's own model meanwhile.
Use it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "OMP_NUM_THREADS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",  # as flyby's workers: a busy machine must not starve one of the two
}


def settings_of(words: argparse.Namespace) -> tuple[Any, Any, Any]:
    """Bundle, plan and split, exactly as ``flyby run`` makes them."""
    from flyby.data.splits import make_split
    from flyby.runs.config import make_config, plan

    config = make_config(
        "fedavg",
        data={"name": "digits"},
        split={"name": "dirichlet", "clients": words.clients, "alpha": words.alpha},
        epochs=words.epochs,
    )
    bundle = config.data.load()
    return bundle, plan(config, bundle), make_split(bundle.train, config.split, config.seed)


def with_flower(words: argparse.Namespace) -> None:
    import torch
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    client, server = ClientApp(), ServerApp()

    @client.train()
    def train(message: Message, context: Context) -> Message:
        from flyby.data.site import site_of
        from flyby.training.loop import train_site

        torch.set_num_threads(1)
        bundle, todo, split = settings_of(words)
        recipe = todo.recipe
        site = site_of(bundle, split, list(split.shares)[int(context.node_config["partition-id"])])
        plain = recipe.objective_settings.model_copy(update={"calibrate": False})
        made = train_site(site, recipe.model_copy(update={"objective_settings": plain}))
        metrics = MetricRecord({"num-examples": len(site.train)})
        return Message(
            content=RecordDict({"arrays": ArrayRecord(made.parcel.weights), "metrics": metrics}), reply_to=message
        )

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        from flyby.data.site import part_of
        from flyby.fusion.evaluation import accuracy, scores_of
        from flyby.fusion.predictor import Single
        from flyby.rng import generator

        bundle, todo, _ = settings_of(words)
        spec = todo.recipe.spec
        network = spec.build(generator(0, "shared", "init"))
        strategy = FedAvg(
            fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=words.clients, min_available_nodes=words.clients
        )
        done = strategy.start(grid=grid, initial_arrays=ArrayRecord(network.state_dict()), num_rounds=1)
        network.load_state_dict(done.arrays.to_torch_state_dict())
        test = part_of(bundle.test)
        judged = accuracy(scores_of(Single([spec], bundle.train.class_names, [network]), test.images), test.labels)
        Path(words.answer).write_text(json.dumps({"accuracy": judged}))

    # A cluster of its own: without an address Ray would join whatever cluster ran here last.
    backend: dict[str, Any] = {
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {"address": "local", "include_dashboard": False},
    }
    run_simulation(server_app=server, client_app=client, num_supernodes=words.clients, backend_config=backend)


def timed(command: list[str], folder: Path) -> float:
    started = time.perf_counter()
    with open(folder / "log", "w") as log:
        code = subprocess.run(
            command, stdout=log, stderr=log, env={**os.environ, **QUIET, "FLWR_HOME": str(folder / "flwr")}, check=False
        ).returncode
    if code:
        raise SystemExit(f"{' '.join(command)} failed with {code}:\n{(folder / 'log').read_text()[-3000:]}")
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--alpha", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--answer", help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.answer:
        with_flower(words)
        return
    options = ["--clients", str(words.clients), "--epochs", str(words.epochs), "--alpha", str(words.alpha)]
    found: dict[str, list[tuple[float, float]]] = {"flyby": [], "flower": []}
    for repeat in range(words.repeats):
        for side in ("flyby", "flower") if repeat % 2 == 0 else ("flower", "flyby"):
            with tempfile.TemporaryDirectory(prefix="flyby-flower-") as temporary:
                folder = Path(temporary)
                if side == "flyby":
                    seconds = timed(
                        [
                            sys.executable,
                            "-m",
                            "flyby",
                            "run",
                            "--method",
                            "fedavg",
                            "--data",
                            "digits",
                            *options,
                            "--seed",
                            "0",
                            "--device",
                            "cpu",
                            "--engine",
                            "processes",
                            "--out",
                            str(folder / "run"),
                            "--quiet",
                        ],
                        folder,
                    )
                    judged = json.loads((folder / "run" / "result.json").read_text())["accuracy"]
                else:
                    seconds = timed(
                        [sys.executable, __file__, *options, "--answer", str(folder / "answer.json")], folder
                    )
                    judged = json.loads((folder / "answer.json").read_text())["accuracy"]
                found[side].append((seconds, judged))
                print(f"{side:<7} {seconds:6.2f} s   accuracy {judged:.4f}", file=sys.stderr, flush=True)
    ratio = statistics.median(b[0] / a[0] for a, b in zip(found["flyby"], found["flower"], strict=True))
    facts = {
        side: {"seconds": round(statistics.median(s for s, _ in rows), 2), "accuracy": round(rows[0][1], 4)}
        for side, rows in found.items()
    }
    print(
        json.dumps(
            {
                "clients": words.clients,
                "epochs": words.epochs,
                "cores": os.cpu_count(),
                **facts,
                "flower_over_flyby": round(ratio, 2),
            },
            indent=1,
        )
    )
    if abs(found["flyby"][0][1] - found["flower"][0][1]) > 0.02:
        raise SystemExit("the two reach different accuracies: they did not do the same work")


if __name__ == "__main__":
    main()
