"""How a configuration file becomes a tree, and what is said about one that cannot."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from deployments.config import (
    ConfigError,
    ServiceConfig,
    load_service_config,
    parse_service_config,
)
from serve_app.launch import serve_config_for

REPOSITORY = Path(__file__).parents[2]
GUIDE = REPOSITORY / "configs/scheduler_config.yaml"


def test_the_guides_file_loads_as_it_is() -> None:
    """The four keys of the guide, and nothing else, are a whole configuration."""
    assert set(yaml.safe_load(GUIDE.read_text())) == {
        "chunk_size",
        "overlap_ratio",
        "batch_timeout_ms",
        "gpu_mem_reserve_gb",
    }
    scheduler = load_service_config(GUIDE).scheduler
    assert (scheduler.chunk_size, scheduler.overlap_ratio) == (512, 0.1)
    assert (scheduler.batch_timeout_s, scheduler.gpu_mem_reserve_gb) == (0.05, 4)


def test_the_guides_file_can_be_served_as_it_is() -> None:
    """`chunkserve check` accepts the guide's file, and Serve refuses what is made of it."""
    (application,) = serve_config_for(GUIDE, None, {})["applications"]
    # As Serve does it: by the annotation of build_app's argument.
    assert ServiceConfig.model_validate(application["args"]) == load_service_config(GUIDE)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"chunk_sise": 5}, "did you mean 'chunk_size'|known keys"),
        ({"scheduler": {"chunk_sise": 5}}, "did you mean 'chunk_size'"),
        ({"modle": {}}, "did you mean 'model'"),
        ({"scheduler": {"chunk_size": 0}}, "scheduler.chunk_size.*greater than or equal to 1"),
        ({"scheduler": {"max_num_seqs": 8, "max_num_batched_tokens": 8}}, "raise it to at least 9"),
        ({"execution": {"device": "gpu"}}, "execution.device"),
        ({"model": {"quantization": "int2"}}, "quantization: .*'none', 'int8' or 'int4'.*'int2'"),
        ([1], "must be a mapping"),
    ],
)
def test_a_fault_is_named_with_its_place_and_what_to_change(data: object, expected: str) -> None:
    """A misspelled key or a value out of range is taken silently, or refused without a hint."""
    with pytest.raises(ConfigError, match=expected):
        parse_service_config(data)


def test_an_ingress_never_throttles_the_pool() -> None:
    """Serve's own limit of the ingress is reached before the engine is full."""
    config = parse_service_config(
        {"scheduler": {"max_num_seqs": 2000}, "pool": {"num_replicas": 3}}
    )
    taken = config.scheduler.max_num_seqs + config.scheduler.max_num_waiting
    assert config.max_ingress_requests > 3 * taken


def test_a_model_and_an_address_may_be_given_instead_of_the_files() -> None:
    """`--model`, `--host` and `--port` are ignored, or lose the rest of the file."""
    local = REPOSITORY / "configs/local.yaml"
    data = serve_config_for(local, "org/name", {"host": None, "port": 8123})
    assert data["http_options"] == {"host": "127.0.0.1", "port": 8123}
    served = ServiceConfig.model_validate(data["applications"][0]["args"])
    assert served.model.source == "org/name"
    assert served.model.name == "name"
    assert served.cache == load_service_config(local).cache


def test_a_bare_off_in_yaml_is_no_boolean(tmp_path: Path) -> None:
    """YAML reads `off` as false, and the one documented way to switch graphs off is refused."""
    path = tmp_path / "service.yaml"
    path.write_text("model: {}\nexecution:\n  cuda_graphs: off\n")
    assert load_service_config(path).execution.cuda_graphs == "off"
    path.write_text("model: {}\nexecution:\n  cuda_graphs: auto\n")
    assert load_service_config(path).execution.cuda_graphs == "auto"
