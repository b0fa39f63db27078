"""A network in front of a server: every byte arrives half a round trip later, in order."""

import asyncio
import contextlib
import threading

CHUNK = 1 << 16


@contextlib.contextmanager
def before(address, seconds):
    """The address of a forwarder to `address` whose round trip takes `seconds` more, until the end
    of the block."""
    loop = asyncio.new_event_loop()
    host, port = address.rsplit(":", 1)
    made = loop.run_until_complete(asyncio.start_server(lambda *ends: carry(ends, host, int(port), seconds / 2), "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield "127.0.0.1:%d" % made.sockets[0].getsockname()[1]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        made.close()
        loop.close()


async def carry(client, host, port, delay):
    """Forwards one connection. A connect takes no time: clients keep their connections."""
    try:
        server = await asyncio.open_connection(host, port)
    except OSError:
        client[1].close()
        return
    await asyncio.gather(pass_on(client[0], server[1], delay), pass_on(server[0], client[1], delay), return_exceptions=True)


async def pass_on(reader, writer, delay):
    """Writes the bytes and the end of a connection `delay` seconds later."""
    loop, queue = asyncio.get_running_loop(), asyncio.Queue()

    async def read():
        while True:
            try:
                data = await reader.read(CHUNK)
            except OSError:
                data = b""
            queue.put_nowait((loop.time() + delay, data))
            if not data:
                return

    reading = loop.create_task(read())
    try:
        while True:
            due, data = await queue.get()
            await asyncio.sleep(max(0.0, due - loop.time()))
            if not data:
                break
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        reading.cancel()
        writer.close()
