"""Prints what prefix-aware routing is worth beside Serve's own and chance: hit rate, balance, wait.

Run: python -m loadtest.bench_router
"""

from __future__ import annotations

import argparse
import random

from loadtest.routing_workload import chat_workload, choices, replay

NUM_BLOCKS = 4000


def main() -> None:
    """Replay one workload through each way of choosing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--chats", type=int, default=400)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arrivals = chat_workload(arguments.chats, arguments.turns, random.Random(arguments.seed))
    print(f"{len(arrivals)} requests of {arguments.chats} chats on {arguments.replicas} replicas")
    print(f"{'':12} {'hit rate':>9} {'of best':>8} {'busiest/mean':>13} {'wait':>9}")
    for name, make in choices(arguments.replicas, NUM_BLOCKS, arguments.seed).items():
        result = replay(arrivals, make(), arguments.replicas, num_blocks=NUM_BLOCKS)
        print(
            f"{name:12} {result.hit_rate:9.1%} {result.hit_rate / result.best_hit_rate:8.1%} "
            f"{result.imbalance:13.2f} {result.mean_wait_s * 1e3:6.0f} ms"
        )


if __name__ == "__main__":
    main()
