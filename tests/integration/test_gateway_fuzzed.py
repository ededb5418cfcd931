"""All that the gateway describes, tried with generated requests, right ones and wrong ones."""

from pathlib import Path

import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from transformers import AutoTokenizer

from fulmen.server.app import make_app
from gateways import Face

BASE = Path(__file__).parents[2] / "examples/calc/base"


def face() -> Face:
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    return Face(tokenizer, script=lambda _: tokenizer.encode("17 + 25<|im_end|>"))


FACE = face()
APP = make_app(FACE.gateway)
KEY = {"authorization": FACE.client.headers["authorization"]}
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
api = schemathesis.openapi.from_asgi("/v1/openapi.json", APP)


@api.parametrize()
@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)
def test_whatever_is_asked_gets_an_answer_of_the_described_form(case):
    case.call_and_validate(headers=KEY, checks=CHECKS)
