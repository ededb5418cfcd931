"""The agents of every framework, each run once; all tests look at what was recorded."""

import asyncio
import os
from dataclasses import dataclass

import pytest

from frameworks.cases import CASES, Case
from frameworks.rollouts import RAISING, SUMS, run_all
from fulmen.schema.records import RolloutResult

collect_ignore = ["agents", "run.py"]
"""Agents are imported by workers, in environments that have their frameworks."""

PYTHONS = dict(
    given.split("=", 1)
    for given in filter(None, os.environ.get("FULMEN_FRAMEWORKS", "").split(os.pathsep))
)
"""Interpreters of the environments that tests/frameworks/run.py has made, by name."""


@dataclass(frozen=True, slots=True)
class Ran:
    """A case and its results, by expression."""

    case: Case
    results: dict[str, RolloutResult]

    @property
    def sums(self) -> list[RolloutResult]:
        """Those whose tool did its work."""
        return [self.results[expression] for expression in SUMS]

    @property
    def raising(self) -> list[RolloutResult]:
        """Those whose tool raised."""
        return [self.results[expression] for expression in RAISING]


@pytest.fixture(
    scope="session",
    params=[case for case in CASES if case.environment in PYTHONS],
    ids=lambda case: case.name,
)
def ran(request, tokenizer, tmp_path_factory) -> Ran:
    """A case, after twelve rollouts at once."""
    case: Case = request.param
    folder = tmp_path_factory.mktemp(case.name)
    python = PYTHONS[case.environment]
    return Ran(case, asyncio.run(run_all(folder, python, case.agent, SUMS + RAISING, tokenizer)))
