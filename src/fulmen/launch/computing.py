"""Following a plan: models loaded, sampled from and trained, until there are no more orders."""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection

from fulmen.engine.pytorch.serving import Serving
from fulmen.launch.host_orders import Do, Done, HostPlan, Order, Ready, raised
from fulmen.launch.learners import make_learners
from fulmen.launch.learning import base_of, joined, serve_trained
from fulmen.launch.loading import LoadedPolicy, serve_in_groups, serve_policy
from fulmen.launch.memory import settled
from fulmen.learner.ranks import Ranks
from fulmen.learner.together import end
from fulmen.schema.training import TrainConfig
from fulmen.trainer.learners import Learners


def compute(plan: HostPlan, orders: Connection, tokens: socket.socket) -> None:
    """Say when all is there, then do what is ordered over the pipe and asked over the socket."""
    with _ranks(plan) as ranks:
        learners = _begin(plan, ranks, orders, tokens)
        with settled():
            outcome = _obey(orders, learners)
        if ranks is not None:
            end(ranks, outcome)
    orders.send(Done(None, {}))


@contextmanager
def _ranks(plan: HostPlan) -> Iterator[Ranks | None]:
    if not isinstance(plan.settings, TrainConfig):
        yield None
        return
    with joined(plan.settings) as ranks:
        yield ranks


def _begin(
    plan: HostPlan, ranks: Ranks | None, orders: Connection, tokens: socket.socket
) -> Learners | None:
    """Load everything, say so, and sample what is asked for from here on."""
    policies = _policies(plan)
    frozen = [serve_policy(source, plan.settings) for source in plan.frozen]
    serving = Serving(tokens, {one.source.name: one.engine for one in [*policies, *frozen]})
    learners = None
    if isinstance(plan.settings, TrainConfig):
        learners = make_learners(plan.settings, policies, plan.checkpoint, ranks, serving.updating)
    models = {id(policy.loaded.model): policy.loaded for policy in policies}
    threading.Thread(target=serving.run, name="tokens", daemon=True).start()
    orders.send(
        Ready(
            served=serving.served,
            parameters=sum(loaded.parameters for loaded in models.values()),
            versions=_versions(learners),
            why=[] if learners is None else learners.why,
        )
    )
    return learners


def _policies(plan: HostPlan) -> list[LoadedPolicy]:
    settings = plan.settings
    if not isinstance(settings, TrainConfig):
        return [serve_policy(source, settings) for source in plan.sources]
    serve = partial(serve_trained, settings, plan)
    return serve_in_groups(plan.sources, serve, partial(base_of, settings))


def _obey(orders: Connection, learners: Learners | None) -> bytes:
    """Carry out orders until the end of the run; returns its outcome."""
    while True:
        try:
            order: Order = orders.recv()
        except EOFError:
            # There is nobody to end in order for, and torchrun's others may be waiting for us in
            # the middle of something: they end because we do.
            os._exit(0)
        if not isinstance(order, Do):
            return order.outcome
        try:
            value = order.method(learners, *order.arguments)
            orders.send(Done(value, _versions(learners)))
        except Exception as error:
            orders.send(raised(error))


def _versions(learners: Learners | None) -> dict[str, int]:
    """Of what is trained; empty where nothing is."""
    return {} if learners is None else learners.versions
