"""The process that computes: engines and learners, as `host.py` starts it and gives it orders.

    python -m fulmen.launch.hosted <descriptor of the orders> <descriptor of the tokens>

It ends when the process that started it does, however that comes.
"""

import socket
import sys
from multiprocessing.connection import Connection

from fulmen.launch.host_orders import HostPlan, raised


def main(orders: Connection, tokens: socket.socket) -> None:
    """Follow a plan; what cannot be done of it is told."""
    plan: HostPlan = orders.recv()
    sys.path[:] = plan.path
    try:
        # Not at the top: that PyTorch is not installed is to be told, too.
        from fulmen.launch.computing import compute

        compute(plan, orders, tokens)
    except Exception as error:
        orders.send(raised(error))


if __name__ == "__main__":
    _orders, _tokens = map(int, sys.argv[1:])
    main(Connection(_orders), socket.socket(fileno=_tokens))
