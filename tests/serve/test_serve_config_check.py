"""A configuration file is read in full before Serve sees it; no Ray is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from serve_app.serve_config_check import check_serve_config

GOOD = """
proxy_location: EveryNode
http_options: {host: 0.0.0.0, port: 8000}
logging_config: {enable_access_log: false}
applications:
  - name: chunkserve
    route_prefix: /
    import_path: serve_app.app:build_app
    args: {scheduler: {chunk_size: 256}, pool: {num_cpus: 1}}
    deployments:
      - name: engine
        num_replicas: 1
        autoscaling_config: null
        ray_actor_options: {num_cpus: 1}
"""


def check(folder: Path, text: str) -> list[str]:
    path = folder / "config.yaml"
    path.write_text(text)
    return check_serve_config(path)


@pytest.mark.parametrize(
    "text",
    [
        GOOD,
        "scheduler: {chunk_size: 256}",
        "chunk_size: 512\noverlap_ratio: 0.1\nbatch_timeout_ms: 50\ngpu_mem_reserve_gb: 4",
        "",
    ],
)
def test_usable_files_have_no_faults(tmp_path: Path, text: str) -> None:
    """A file in one of the accepted forms is refused."""
    assert check(tmp_path, text) == []


@pytest.mark.parametrize(
    "good, bad, place, hint",
    [
        ("http_options:", "http_option:", "http_option", "http_options"),
        ("applications:", "application:", "application", "applications"),
        ("port: 8000", "prot: 8000", "http_options.prot", "port"),
        (
            "enable_access_log",
            "enable_acces_log",
            "logging_config.enable_acces_log",
            "enable_access_log",
        ),
        ("route_prefix", "route_prefx", "applications.0.route_prefx", "route_prefix"),
        (
            "num_replicas: 1",
            "num_replica: 1",
            "applications.0.deployments.0.num_replica",
            "num_replicas",
        ),
        ("{num_cpus: 1}\n", "{num_cpu: 1}\n", "ray_actor_options.num_cpu", "num_cpus"),
        (
            "autoscaling_config: null",
            "autoscaling_config: {max_replcas: 2}",
            "max_replcas",
            "max_replicas",
        ),
        ("chunk_size", "chunk_sze", "applications.0.args", "chunk_size"),
        ("scheduler:", "schedular:", "applications.0.args", "scheduler"),
    ],
)
def test_a_misspelled_key_is_found_at_any_depth(
    tmp_path: Path, good: str, bad: str, place: str, hint: str
) -> None:
    """A misspelled key is ignored without a word, and its default runs instead."""
    assert good in GOOD
    faults = check(tmp_path, GOOD.replace(good, bad))
    assert any(place in fault and f"did you mean '{hint}'" in fault for fault in faults), faults


@pytest.mark.parametrize(
    "good, bad, place",
    [
        ("port: 8000", "port: x", "http_options.port"),
        ("num_replicas: 1", "num_replicas: -1", "num_replicas"),
        ("chunk_size: 256", "chunk_size: 0", "applications.0.args: scheduler.chunk_size"),
        ("applications:", "applications: 5\nx:", "applications"),
    ],
)
def test_a_value_out_of_range_is_found(tmp_path: Path, good: str, bad: str, place: str) -> None:
    """A value that fails the deployment later is not seen before."""
    faults = check(tmp_path, GOOD.replace(good, bad))
    assert any(place in fault for fault in faults), faults


@pytest.mark.parametrize("text", ["{", "[]", "5", "chunk_sze: 5"])
def test_what_is_no_configuration_says_so(tmp_path: Path, text: str) -> None:
    """A file that cannot be used raises instead of being described."""
    assert len(check(tmp_path, text)) == 1
    assert len(check_serve_config(tmp_path / "missing.yaml")) == 1
