"""Our service beside what a user would take instead: vLLM, llama.cpp, transformers, Ray's own.

Each peer runs in an environment of its own, with the best flags its makers publish, on the same
weights. All take turns under the same workloads (W1 to W6, see `peers.workloads`), and what counts
is the ratio within a round.

    chunkserve bench peers --install ~/.cache/chunkserve/peers
    chunkserve bench peers --peers vllm,llama.cpp --scale 0.25 --rounds 2

The wiring alone: flags, and who is given to `peers.contest`.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from deployments.config import ServiceConfig, parse_service_config
from loadtest.bench_serve import free_port
from loadtest.load_prompts import TextPrompts, TokenIdPrompts
from loadtest.local_service import changed_config
from loadtest.number_types import positive_number, whole_number
from loadtest.peers import chunkserve_service
from loadtest.peers.contest import Contest, ContestSettings, PromptForms
from loadtest.peers.engine_service import EngineService
from loadtest.peers.hardware_limits import Limits, ModelShapes
from loadtest.peers.installer import install_peers
from loadtest.peers.launch import Peer, Place
from loadtest.peers.launchers import PEERS
from loadtest.peers.model_files import find_model_dir, weights_of
from loadtest.peers.process import ServerFailed
from loadtest.peers.services import HttpService, Service
from loadtest.peers.summary import summarise
from loadtest.peers.table import table_of
from loadtest.peers.turns import Quiet, no_wait
from loadtest.peers.workloads import WORKLOADS, Sizes
from loadtest.prompts import PromptMaker
from loadtest.provenance import keep_result, origin
from loadtest.tokenizer_source import load_tokenizer

DEFAULT_FOLDER = Path.home() / ".cache" / "chunkserve" / "peers"
DEFAULT_WORKLOADS = "W1,W2,W2cap,W3,W4,W5,W6,W6chunk"
INTERRUPTED = 130
"""Exit status of a command that was ended by Ctrl-C."""
RESULT, TABLE, PLOT = "peers.json", "peers.md", "peers.png"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this benchmark."""
    parser.add_argument(
        "--peers", default=",".join(PEERS), help=f"of {', '.join(PEERS)}; by default all"
    )
    parser.add_argument("--peers-dir", type=Path, default=DEFAULT_FOLDER, help="where they are")
    parser.add_argument(
        "--install", type=Path, metavar="DIR", help="install them there, and measure nothing"
    )
    parser.add_argument("--config", type=Path, default=Path("configs/local.yaml"), help="of ours")
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        help="of our weights; by default what the config comes to on this machine",
    )
    parser.add_argument(
        "--quantization",
        choices=["none", "int8", "int4"],
        help="of our weights; by default as the config says",
    )
    parser.add_argument("--workloads", default=DEFAULT_WORKLOADS, help=f"of {', '.join(WORKLOADS)}")
    parser.add_argument(
        "--scale", type=positive_number, default=1.0, help="of the numbers of requests"
    )
    parser.add_argument(
        "--rate", type=positive_number, default=0.7, help="of W2, requests per second"
    )
    parser.add_argument("--rounds", type=whole_number(1), default=2)
    parser.add_argument(
        "--threads", type=whole_number(1), default=2, help="that each service computes with"
    )
    parser.add_argument(
        "--max-others", type=float, default=0.1, help="cores; a turn with more is dropped"
    )
    parser.add_argument("--no-engine", action="store_true", help="without our engine alone")
    parser.add_argument("--no-limits", action="store_true", help="without the machine's limits")
    parser.add_argument("--results-dir", type=Path, default=Path("loadtest/results"))


def chosen(names: str, known: Sequence[str], flag: str) -> tuple[str, ...]:
    """The names of a list with commas.

    Raises:
        ValueError: one is not known, or there is none.
    """
    found = tuple(name.strip() for name in names.split(",") if name.strip())
    unknown = [name for name in found if name not in known]
    if unknown or not found:
        what = f"no {unknown[0]!r}" if unknown else "it is empty"
        raise ValueError(f"{flag}: {what}; choose of {', '.join(known)}")
    return found


def main(arguments: argparse.Namespace) -> int:
    """Install, or measure and print the tables; 1 if something failed."""
    peers = [PEERS[name] for name in chosen(arguments.peers, list(PEERS), "--peers")]
    place = place_of(arguments)
    if arguments.install is not None:
        return int(bool(install_peers(peers, replace(place, folder=arguments.install), tell)))
    # As Ctrl-C does, so that the servers end with the benchmark.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        summary = run_bench(arguments, peers, place)
    except KeyboardInterrupt:
        tell(f"interrupted; what was measured is in {arguments.results_dir / RESULT}")
        return INTERRUPTED
    except ServerFailed as error:
        tell(f"nothing is measured: {error}")
        return 1
    return int(bool(summary["failed"] or summary["left_out"]))


def run_bench(
    arguments: argparse.Namespace, peers: Sequence[Peer], place: Place, quiet: Quiet = no_wait
) -> dict[str, Any]:
    """Measure all that are installed, print and keep the result.

    Args:
        arguments: as `add_arguments` defines them.
        peers: to compare with; those that are not installed are skipped, and told.
        place: where they are.
        quiet: entered around each turn.

    Raises:
        ServerFailed: ours did not come up.
        ValueError: an argument is out of range.
    """
    settings = settings_of(arguments)
    installed = [peer for peer in peers if peer.is_installed(place)]
    for peer in peers:
        if peer not in installed:
            tell(peer.skip_line(place))
    limits = None
    if not arguments.no_limits:
        with quiet():
            limits = measured_limits(place)
    with tempfile.TemporaryDirectory(prefix="chunkserve-peers-") as folder:
        services = services_of(arguments, place, installed, Path(folder))
        contest = Contest(settings, services, prompts_of(place), tell, quiet)
        shapes = ModelShapes.read(place.model_dir)

        def keep() -> dict[str, Any]:
            summary = {
                **origin(),
                "model": place.model_dir.name,
                "scale": settings.sizes.scale,
                "rate": settings.sizes.rate,
                "rounds": settings.num_rounds,
                "skipped": [peer.name for peer in peers if peer not in installed],
                **summarise(contest.results, contest.entrants, limits, shapes, contest.left_out),
            }
            keep_result(arguments.results_dir / RESULT, summary)
            return summary

        # Kept after each turn: an interrupted benchmark of half an hour has something to show.
        contest.run(keep)
        summary = keep()
    show(summary, arguments.results_dir)
    return summary


def show(summary: dict[str, Any], folder: Path) -> None:
    """Print the tables, and keep them and the plot beside the result."""
    head = (
        f"{summary['machine']}, {summary['date']}; {summary['model']}; "
        f"scale {summary['scale']:g}, W2 at {summary['rate']:g} requests/s, "
        f"{summary['rounds']} rounds"
    )
    text = f"{head}\n\n{table_of(summary)}\n"
    (folder / TABLE).write_text(text, encoding="utf-8")
    print(text)
    try:
        from loadtest.peers.plot import draw_ratios
    except ImportError:
        tell("no plot: pip install matplotlib")
        return
    png = draw_ratios(summary)
    if png is not None:
        (folder / PLOT).write_bytes(png)


def tell(line: str) -> None:
    """One line for whoever waits."""
    print(line, file=sys.stderr, flush=True)


def settings_of(arguments: argparse.Namespace) -> ContestSettings:
    """What is played.

    Raises:
        ValueError: an argument is out of range.
    """
    if arguments.rounds < 1 or arguments.threads < 1:
        raise ValueError("--rounds and --threads must be at least 1")
    return ContestSettings(
        chosen(arguments.workloads, list(WORKLOADS), "--workloads"),
        arguments.rounds,
        Sizes(arguments.scale, arguments.rate),
        arguments.max_others,
    )


def place_of(arguments: argparse.Namespace) -> Place:
    """Where the peers are, and the weights of our config's model, converted if need be."""
    model = own_config(arguments)[1].model
    return Place(arguments.peers_dir, find_model_dir(model), arguments.threads)


def own_config(arguments: argparse.Namespace) -> tuple[dict[str, Any], ServiceConfig]:
    """The config of our service for this benchmark: as Serve takes it, and its service tree.

    Raises:
        ValueError: the file has no application, or several, or is not valid.
    """
    model: dict[str, Any] = {"served_name": chunkserve_service.SERVED_NAME}
    if arguments.dtype is not None:
        model["dtype"] = arguments.dtype
    if arguments.quantization is not None:
        model["quantization"] = arguments.quantization
    execution = {"num_threads": arguments.threads}
    serve_config = changed_config(arguments.config, {"model": model, "execution": execution})
    args = serve_config["applications"][0]["args"]
    return serve_config, parse_service_config(args, str(arguments.config))


def measured_limits(place: Place) -> Limits:
    """This machine's limits, measured by a process of their own."""
    tell("measuring the machine's limits")
    command = [sys.executable, "-m", "loadtest.peers.hardware_limits", str(place.model_dir)]
    done = subprocess.run(
        [*command, "--threads", str(place.num_threads)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return Limits(**json.loads(done.stdout))


def services_of(
    arguments: argparse.Namespace, place: Place, peers: Sequence[Peer], folder: Path
) -> list[Service]:
    """Our service, each peer, and our engine alone, none of them started.

    Args:
        arguments: of the command.
        place: where the peers are.
        peers: that are installed.
        folder: takes the config file and the logs.
    """
    serve_config, config = own_config(arguments)
    file = folder / "serve.yaml"
    file.write_text(yaml.safe_dump(serve_config), encoding="utf-8")
    weights = weights_of(config.model)
    ours = chunkserve_service.launch(free_port(), file, weights)
    services: list[Service] = [HttpService(chunkserve_service.NAME, ours, folder)]
    services += [HttpService(peer.name, peer.launch(place, free_port()), folder) for peer in peers]
    if not arguments.no_engine:
        services.append(EngineService(config, weights.dtype, weights.num_bytes, folder))
    return services


def prompts_of(place: Place) -> PromptForms:
    """Real English, the same in both forms."""
    maker = PromptMaker(load_tokenizer(str(place.model_dir)), {"en": 1.0})
    return PromptForms(TokenIdPrompts(maker), TextPrompts(maker))


if __name__ == "__main__":
    _parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(_parser)
    sys.exit(main(_parser.parse_args()))
