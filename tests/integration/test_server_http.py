"""The HTTP server's socket options, which no answer shows but in its latency."""

import socket

import httpx

from fulmen.server.http import Listening


async def _hello(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"hello"})


async def test_an_answer_does_not_wait_for_the_acknowledgement_of_its_head():
    async with Listening(_hello, "127.0.0.1", 0) as server, httpx.AsyncClient() as client:
        await client.get(server.url)
        (connection,) = server._server.server_state.connections
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
