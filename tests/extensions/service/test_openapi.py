"""The service keeps what its OpenAPI document says, whatever it is sent; requests drawn by
schemathesis, over HTTP.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from service_stand_in import StandIn
from services import frontier_file, job, service_at, serving

from perseus_planner.extensions.service.access import (
    ROLES,
    TOKENS_VARIABLE,
    Access,
    Limits,
    read_tokens,
)
from perseus_planner.extensions.service.app import create_app
from perseus_planner.extensions.service.serve import Address
from perseus_planner.extensions.service.service import Service

schemathesis = pytest.importorskip("schemathesis")
checks = pytest.importorskip("schemathesis.specs.openapi.checks")

pytest_plugins = ("schemathesis.pytest.plugin",)  # pyproject.toml spares all others from it
DOCUMENT = create_app(StandIn(), Access(), Limits()).openapi()
WHOLE = schemathesis.openapi.from_dict(DOCUMENT)  # with a request for each rule of the document
SCHEMA = schemathesis.openapi.from_dict(DOCUMENT)
SCHEMA.config.phases.coverage.enabled = False
# Job names are replaced below, and a schema cannot say which fields go together.
EXCEPT = [
    checks.negative_data_rejection,
    checks.positive_data_acceptance,
    checks.missing_required_header,
]
TOKEN = "0123456789abcdef"
TOKENS = (None, *ROLES)
OPEN = ("/livez", "/readyz", "/healthz", "/v1/me")
_NUMBERS: dict[str, Iterator[int]] = defaultdict(count)  #: of the next request, by operation

OPEN = ("/healthz", "/livez", "/readyz", "/v1/me")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("service")
    with service_at(folder / "service.sqlite") as service:
        yield service


@pytest.fixture(scope="module")
def url(service: Service) -> Iterator[str]:
    lines = "\n".join(f"{TOKEN}{role} {role} test" for role in ROLES)
    with serving(service, Address(port=0), read_tokens(None, {TOKENS_VARIABLE: lines})) as url:
        yield url


@pytest.fixture(scope="module")
def session() -> Iterator[Any]:
    with pytest.importorskip("requests").Session() as session:
        yield session


def drawn(examples: int) -> Any:
    phases = (Phase.explicit, Phase.generate)
    return settings(
        max_examples=examples,
        phases=phases,
        suppress_health_check=list(HealthCheck),
        derandomize=True,
    )


def check_answers(
    case: Any, service: Service, url: str, session: Any, whole: float = math.inf
) -> None:
    """Send the first `whole` requests of each kind with every kind of token, and the others with
    one in turn.
    """
    number = next(_NUMBERS[case.operation.label])
    if "job" in case.path_parameters and len(str(case.path_parameters["job"])) % 2:
        case.path_parameters["job"] = "known"
    wait_s = case.query.get("wait_s")
    if isinstance(wait_s, (int, float)) and 0.01 < wait_s <= 60:
        case.query["wait_s"] = 0.01
    for role in TOKENS if number < whole else [TOKENS[number % len(TOKENS)]]:
        service.set_power(None, None).result()
        service.register(job("known"), frontier_file())  # it may have been ended
        headers = {"Authorization": f"Bearer {TOKEN}{role}"} if role else {}
        answer = case.call_and_validate(url, session, headers, excluded_checks=EXCEPT)
        assert answer.status_code < 500
        if answer.status_code >= 400:
            assert {"title", "status", "detail", "code"} <= set(answer.json())
        if role is None:
            assert answer.status_code in (401, 413) or case.path in OPEN


@SCHEMA.parametrize()
@drawn(5)  # besides those that the document gives; the soaks below send more
def test_every_answer_to_every_kind_of_token_is_one_that_the_document_has(
    case, service, url, session
):
    check_answers(case, service, url, session, whole=2)


@pytest.mark.soak
@WHOLE.parametrize()
@drawn(2)
def test_every_answer_to_what_a_rule_allows_or_not_is_one_that_the_document_has(
    case, service, url, session
):
    check_answers(case, service, url, session, whole=2)


@pytest.mark.soak
@WHOLE.parametrize()
@drawn(28)
def test_two_thousand_answers_are_ones_that_the_document_has(case, service, url, session):
    check_answers(case, service, url, session)
