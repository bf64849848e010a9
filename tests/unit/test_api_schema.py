"""The OpenAPI page against the service itself: no 5xx, no undocumented answer, no breach of a
schema, whatever fits or breaks the schemas of requests.
"""

from __future__ import annotations

from typing import Any

import schemathesis
from api_doubles import ScriptedBackend, make_card, make_tokenizer
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from deployments.config import ServiceConfig
from serve_app.ingress import make_api

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
    unsupported_method,
]
BACKEND = ScriptedBackend(
    [[token_id] for token_id in make_tokenizer().encode("hello time")],
    card=make_card(max_model_len=4096),
)
schema = schemathesis.openapi.from_asgi("/openapi.json", make_api(BACKEND, ServiceConfig()))


@schema.parametrize()
@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_every_answer_is_as_documented(case: Any) -> None:
    """Some body makes the service fail, or it answers with what the page does not tell."""
    case.call_and_validate(checks=CHECKS)
