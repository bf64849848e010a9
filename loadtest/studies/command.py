"""`chunkserve study`: the studies by name."""

from __future__ import annotations

import argparse

from loadtest.studies import capacity, fidelity, fleet, prefixes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A subcommand for each study; it sets `run`."""
    studies = parser.add_subparsers(dest="study", required=True)
    for name, module, about in (
        ("fidelity", fidelity, "the simulator beside a measured run of vLLM"),
        ("capacity", capacity, "what chunking is worth: rates within an SLO, by policy"),
        ("fleet", fleet, "GPUs for 1,000 requests/s, and what a burst does to them"),
        ("prefixes", prefixes, "what a prefix cache finds, by its size and by router"),
    ):
        study = studies.add_parser(name, help=about, description=module.__doc__)
        module.add_arguments(study)
        study.set_defaults(run=module.main)
