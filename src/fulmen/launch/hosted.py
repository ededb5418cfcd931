"""The process that computes: engines and learners, as `host.py` starts it and gives it orders.

    python -m fulmen.launch.hosted <descriptor of the orders> <descriptor of the tokens>

It ends when the process that started it does, however that comes.
"""

import os
import select
import socket
import sys
import threading
from multiprocessing.connection import Connection

from fulmen.launch.host_orders import HostPlan, raised


def main(orders: Connection, tokens: socket.socket) -> None:
    """Follow a plan; what cannot be done of it is told."""
    threading.Thread(target=_end_with, args=[tokens], daemon=True).start()
    plan: HostPlan = orders.recv()
    sys.path[:] = plan.path
    try:
        # Not at the top: that PyTorch is not installed is to be told, too.
        from fulmen.launch.computing import compute

        compute(plan, orders, tokens)
    except Exception as error:
        orders.send(raised(error))


def _end_with(tokens: socket.socket) -> None:
    """Wait until the other side has hung up. Nothing here is worth finishing then: a checkpoint
    that was being written is a draft, which the next process clears away."""
    hung_up = select.poll()
    hung_up.register(tokens, 0)
    hung_up.poll()
    os._exit(0)


if __name__ == "__main__":
    _orders, _tokens = map(int, sys.argv[1:])
    for _descriptor in (_orders, _tokens):  # what a user's function starts must not hold them open
        os.set_inheritable(_descriptor, False)
    main(Connection(_orders), socket.socket(fileno=_tokens))
