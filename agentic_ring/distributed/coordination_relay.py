"""Relays one process's connections to JAX's coordination service; runs as a process of its own.

    python -I -S coordination_relay.py HOST PORT

JAX ends a process by abort(), with a C++ stack, as soon as the service closes its connection: where the first
process of the job is killed, before Python can say so. The relay keeps the connection of its process open,
silently, and prints ``closed``. It ends when its standard input closes, as it does when its process ends.
"""

import asyncio
import os
import signal
import sys
import threading


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()


async def _relay(host: str, port: int) -> None:
    reached = False

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal reached
        try:
            service = await asyncio.open_connection(host, port)
        except OSError:
            if not reached:  # the first process is not there yet: JAX tries again
                writer.close()
                return
            service = None
        if service is not None:
            reached = True
            upward = asyncio.ensure_future(_pump(reader, service[1]))
            downward = asyncio.ensure_future(_pump(service[0], writer))
            await asyncio.wait({upward, downward}, return_when=asyncio.FIRST_COMPLETED)
            if upward.done() and not upward.exception() and not downward.done():  # JAX closed it
                downward.cancel()
                service[1].close()
                writer.close()
                return
        print("closed", flush=True)
        await asyncio.Event().wait()

    server = await asyncio.start_server(connect, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await server.serve_forever()


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    # A scheduler signals every process of the job; this one lives as long as its parent.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    asyncio.run(_relay(sys.argv[1], int(sys.argv[2])))
