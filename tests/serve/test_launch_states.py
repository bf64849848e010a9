"""When the launcher calls a service up, warns, or gives up; no Ray is started."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from serve_app.launch import can_serve, explain_failure, is_lost


def state(status: str, **deployments: str) -> Any:
    """An application's state as Serve tells it."""
    named = {
        name.replace("_", "-"): SimpleNamespace(status=SimpleNamespace(name=word), message="why")
        for name, word in deployments.items()
    }
    return SimpleNamespace(status=SimpleNamespace(name=status), message="app", deployments=named)


FAILED = "DEPLOY_FAILED"


@pytest.mark.parametrize(
    "given, is_up, is_given_up",
    [
        (state("RUNNING", ingress="HEALTHY", engine="HEALTHY"), True, False),
        (state("DEPLOYING", ingress="HEALTHY", engine="UPDATING"), False, False),
        (state(FAILED, ingress="HEALTHY", engine=FAILED), False, True),
        (state(FAILED, ingress="HEALTHY", engine_a="HEALTHY", engine_b=FAILED), True, False),
        (state(FAILED, ingress="UPDATING", engine_a="HEALTHY", engine_b=FAILED), False, False),
        (state(FAILED, ingress="HEALTHY", engine_a=FAILED, engine_b=FAILED), False, True),
        (state(FAILED, ingress=FAILED, engine_a="HEALTHY", engine_b="HEALTHY"), False, True),
        (state(FAILED), False, True),
    ],
)
def test_one_failed_pool_of_several_is_a_warning(
    given: Any, is_up: bool, is_given_up: bool
) -> None:
    """A service that could serve most of its classes does not start, or one that can serve nobody
    seems to be starting for ever."""
    assert (can_serve(given), is_lost(given)) == (is_up, is_given_up)


def test_a_failure_names_the_pool_and_its_reason() -> None:
    """The message says that the application failed, and nothing else."""
    text = explain_failure(state(FAILED, ingress="HEALTHY", engine_a="HEALTHY", engine_b=FAILED))
    assert text == "engine-b: why"
    assert explain_failure(state(FAILED)) == "app"
