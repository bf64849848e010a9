"""What `pools` in a configuration means, and what is said about one that cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from deployments.config import ConfigError, load_service_config, parse_service_config

EXAMPLE = Path(__file__).parents[2] / "configs/pools.yaml"


def test_a_pool_inherits_what_it_does_not_set() -> None:
    """A pool loses the service's settings, or shares its own with other pools."""
    config = parse_service_config(
        {
            "scheduler": {"chunk_size": 128, "max_num_seqs": 8},
            "pool": {"num_gpus": 1, "num_replicas": 3},
            "pools": {
                "chat": {"priorities": [0], "scheduler": {"chunk_size": 64}, "num_gpus": 2},
                "batch": {"cache": {"num_blocks": 99}, "autoscaling": {"max_replicas": 4}},
            },
        }
    )
    chat, batch = config.for_pool("chat"), config.for_pool("batch")
    assert (chat.scheduler.chunk_size, chat.scheduler.max_num_seqs) == (64, 8)
    assert (chat.pool.num_gpus, chat.pool.num_replicas) == (2, 3)
    assert (batch.scheduler.chunk_size, batch.cache.num_blocks) == (128, 99)
    assert (batch.pool.num_gpus, batch.pool.max_replicas) == (1, 4)
    assert chat.cache.num_blocks is None and not chat.pools
    # The ingress has room for what all pools take.
    assert config.num_taken_requests == (3 + 4) * (8 + 1024)


@pytest.mark.parametrize(
    "pools, message",
    [
        ({"a": {"scheduler": {"chunk_sise": 3}}}, "pools.a: scheduler.*did you mean 'chunk_size'"),
        ({"a": {"scheduler": {"chunk_size": 0}}}, "pools.a: scheduler.chunk_size"),
        ({"a": {"spill_to": "b"}}, "did you mean 'spills_to'"),
        ({"batch": {}, "chat": {"spills_to": "bach"}}, "no pool 'bach'; did you mean 'batch'"),
        ({"a": {"spills_to": "a"}}, "cannot spill to itself"),
        ({"a": {"priorities": [1]}, "b": {"priorities": [1]}}, "class 1 is served by pool 'a'"),
        ({"a": {"priorities": [-1]}}, "priorities.0"),
        ({"A b": {}}, "a pool's name"),
        ({"a": {"autoscaling": {"max_replicas": 2}, "num_replicas": 2}}, "not both"),
        ({"a": {"autoscaling": {"min_replicas": 3, "max_replicas": 2}}}, "above max_replicas"),
    ],
)
def test_pools_that_contradict_are_refused(pools: object, message: str) -> None:
    """A class with two pools, or a spill to nowhere, is found when the first request fails."""
    with pytest.raises(ConfigError, match=message):
        parse_service_config({"pools": pools})


def test_a_default_pool_must_be_one() -> None:
    """Requests of a class without a pool have nowhere to go."""
    with pytest.raises(ConfigError, match="default_pool: there is no pool 'x'"):
        parse_service_config({"default_pool": "x"})


def test_the_example_loads() -> None:
    """configs/pools.yaml is out of date."""
    config = load_service_config(EXAMPLE)
    assert list(config.pools) == ["chat", "batch"]
    assert (
        config.for_pool("chat").scheduler.chunk_size < config.for_pool("batch").scheduler.chunk_size
    )
