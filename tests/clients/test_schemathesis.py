"""Schemathesis over the OpenAPI page: whatever it thinks of, no answer is a 5xx.

Needs the extra `dev-openapi`; `make test-openapi` installs it.
"""

from __future__ import annotations

import pytest

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")

from hypothesis import HealthCheck, settings  # noqa: E402

from lookonce.server.routes.openapi import OPERATIONS, describe  # noqa: E402

EXAMPLES = 40
"""Per route."""
SHORT = 4
"""Tokens per answer: it is the request that is tried here."""
LIMITS = {
    "/v1/chat/completions": "max_tokens",
    "/v1/completions": "max_tokens",
    "/v1/responses": "max_output_tokens",
}

schema = schemathesis.openapi.from_dict(describe(OPERATIONS))


@schema.parametrize()
@settings(
    max_examples=EXAMPLES, deadline=None, derandomize=True,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
def test_no_answer_is_the_server_s_fault(case, server):
    keep_short(case)
    response = case.call(base_url=server.url, timeout=60)
    assert response.status_code < 500, response.text


def test_afterwards_the_server_is_well(server):
    assert server.get("/ready").status_code == 200
    assert server.metrics()["num_requests_running"] == 0


def keep_short(case):
    body, path = case.body, case.operation.path
    if isinstance(body, dict) and path in LIMITS and is_some_number(body.get(LIMITS[path])):
        body[LIMITS[path]] = SHORT
    if isinstance(body, dict) and path == "/debug/profile":
        body["seconds"] = min(body.get("seconds", 5.0), 0.05) if _is_number(body) else "none"
    if isinstance(body, dict) and path == "/inference/v1/generate":
        sampling = body.get("sampling_params")
        if sampling is None or isinstance(sampling, dict):
            body["sampling_params"] = {"max_tokens": SHORT, **(sampling or {})}


def _is_number(body):
    return isinstance(body.get("seconds", 5.0), int | float)


def is_some_number(limit):
    return limit is None or (isinstance(limit, int) and limit > 0)
