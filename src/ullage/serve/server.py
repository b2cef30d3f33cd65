"""HTTP: the routes, the stream of server-sent events, and an orderly end. The only file that knows Starlette."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from types import FrameType

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.server import HANDLED_SIGNALS

from ullage.base.errors import UllageError
from ullage.base.garbage import settled_garbage
from ullage.serve.answer import Answer, Order, Piece
from ullage.serve.guard import Guard
from ullage.serve.reply import Object, Reply, reply_to
from ullage.serve.request import Body, ChatBody, CompletionBody, RefusalError, parse
from ullage.serve.service import Service
from ullage.serve.worker import Delivered, StoppingError
from ullage.telemetry.view import printable

BACKLOG = 1024
MAX_BODY_BYTES = 16 * 2**20
BODY_SECONDS = 30.0
GRACE_SECONDS = 5.0
"""For answers under way when the server is asked to stop (SIGTERM)."""

Log = Callable[[str], None]


class Endpoint:
    """Turns requests into answers."""

    def __init__(self, service: Service, log: Log) -> None:
        self._service = service
        self._log = log
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="prompts")
        """Reads prompts: a long one must not keep other clients waiting for their tokens."""
        self.stopping = False

    def close(self) -> None:
        self._reader.shutdown(wait=False)

    def app(self, guard: Guard) -> ASGIApp:
        routes = [
            Route("/health", self.health, methods=["GET"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{name:path}", self.model, methods=["GET"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat_completions, methods=["POST"]),
        ]
        app = Starlette(routes=routes, exception_handlers={HTTPException: self._not_found})
        app.router.redirect_slashes = False
        return self._guarded(app, guard)

    def _guarded(self, app: ASGIApp, guard: Guard) -> ASGIApp:
        async def checked(scope: Scope, receive: Receive, send: Send) -> None:
            request = Request(scope)
            try:
                guard.check(request.headers.get("host"), request.headers.get("authorization"))
            except RefusalError as refusal:
                await self._refused(request, refusal)(scope, receive, send)
                return
            await app(scope, receive, send)

        return checked

    async def health(self, request: Request) -> Response:
        del request
        status = self._service.worker.status
        return _json(
            {
                "status": "stopping" if self.stopping else "ok",
                "model": self._service.name,
                "running": status.running,
                "waiting": status.waiting,
                "slots": status.slots,
                "drawn_tokens": status.drawn_tokens,
                "free_pages": status.free_pages,
                "total_pages": status.total_pages,
            },
            503 if self.stopping else 200,
        )

    async def models(self, request: Request) -> Response:
        del request
        return _json({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        try:
            self._service.check_model(request.path_params["name"])
        except RefusalError as refusal:
            return self._refused(request, refusal)
        return _json(self._card())

    def _card(self) -> Object:
        service = self._service
        return {
            "id": service.name,
            "object": "model",
            "created": service.created,
            "owned_by": "ullage",
            "max_model_len": service.max_length,
        }

    async def completions(self, request: Request) -> Response:
        return await self._answered(request, CompletionBody)

    async def chat_completions(self, request: Request) -> Response:
        return await self._answered(request, ChatBody)

    async def _answered(self, request: Request, kind: type[Body]) -> Response:
        try:
            body = parse(await _read_body(request), kind)
            loop = asyncio.get_running_loop()
            order = await loop.run_in_executor(self._reader, self._service.order, body)
            if self.stopping:
                raise StoppingError
            self._service.check_queue(order)
            reply = reply_to(body, order, self._service.name, self._service.model.tokenizer)
            inbox = Inbox(order, self._service, request)
            if body.stream:
                headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
                events = self._events(request, inbox, reply)
                return StreamingResponse(events, media_type="text/event-stream", headers=headers)
            async with aclosing(inbox.pieces()) as pieces:
                async for piece in pieces:
                    reply.add(piece)
            return _json(reply.whole())
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it
        except Exception as error:  # noqa: BLE001 -- every failure has an answer, and none shows a traceback
            return self._refused(request, _refusal(error))

    async def _events(self, request: Request, inbox: Inbox, reply: Reply) -> AsyncIterator[bytes]:
        try:
            async with aclosing(inbox.pieces()) as pieces:
                for chunk in reply.opening():
                    yield _event(chunk)
                async for piece in pieces:
                    yield _event(reply.chunk(piece))
            for chunk in reply.closing():
                yield _event(chunk)
            yield b"data: [DONE]\n\n"
        except ClientDisconnect:
            return
        except Exception as error:  # noqa: BLE001 -- the status is sent already: the stream itself says what happened
            refusal = _refusal(error)
            self._note(request, refusal)
            yield _event(refusal.body)

    async def _not_found(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException), "what it is registered for"
        message = f"no such path: {request.url.path}"
        if error.status_code == 405:
            message = f"{request.url.path} does not answer to {request.method}"
        return self._refused(request, RefusalError(error.status_code, message, headers=dict(error.headers or {})))

    def _refused(self, request: Request, refusal: RefusalError) -> Response:
        self._note(request, refusal)
        response = _json(refusal.body, refusal.status)
        response.headers.update(refusal.headers)
        return response

    def _note(self, request: Request, refusal: RefusalError) -> None:
        line = f"{refusal.status} {request.method} {request.url.path}: {refusal}"
        self._log(" ".join(printable(line).split())[:500])


class Inbox:
    """What the worker delivers for one request, brought into the event loop."""

    def __init__(self, order: Order, service: Service, request: Request) -> None:
        loop = asyncio.get_running_loop()
        self._delivered: asyncio.Queue[Delivered] = asyncio.Queue()
        self._request = request

        def deliver(item: Delivered) -> None:
            loop.call_soon_threadsafe(self._delivered.put_nowait, item)

        self._answer = Answer(order, service.worker, service.model.tokenizer, deliver)
        # Watched from here on: a client may leave while its request still waits for a slot.
        self._watch = asyncio.create_task(self._watched())

    async def _watched(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass
        self._answer.cancel()
        self._delivered.put_nowait(ClientDisconnect())

    async def pieces(self) -> AsyncGenerator[Piece]:
        """Until every choice has ended; ClientDisconnect when there is nobody left to read them."""
        try:
            while not self._answer.finished:
                piece = self._answer.take(await self._delivered.get())
                if piece is not None:
                    yield piece
        finally:
            self._watch.cancel()
            self._answer.cancel()


class _Server(uvicorn.Server):
    """Ends answers under way before it ends itself."""

    def __init__(self, config: uvicorn.Config, on_stop: Callable[[int], None]) -> None:
        super().__init__(config)
        self._on_stop = on_stop

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.should_exit:
            self._on_stop(sig)
        super().handle_exit(sig, frame)


@settled_garbage()
def serve(service: Service, guard: Guard, listener: socket.socket, log: Log, on_ready: Callable[[], None]) -> int:
    """Serve until a signal, which is returned; raises what broke the engine. The worker is closed either way."""
    received: list[int] = []
    # uvicorn raises the signals that it has handled once more, after its own end: these hear them then.
    before = {number: signal.signal(number, lambda got, _: received.append(got)) for number in HANDLED_SIGNALS}
    try:
        asyncio.run(_serve(service, guard, listener, log, on_ready))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if service.worker.failure is not None:
        raise service.worker.failure
    return received[0]


async def _serve(
    service: Service, guard: Guard, listener: socket.socket, log: Log, on_ready: Callable[[], None]
) -> None:
    loop = asyncio.get_running_loop()
    endpoint = Endpoint(service, log)
    worker = service.worker

    def stop(number: int) -> None:
        endpoint.stopping = True
        patience = GRACE_SECONDS if number == signal.SIGTERM else 0.0
        loop.call_soon_threadsafe(loop.call_later, patience, worker.abandon)

    config = uvicorn.Config(
        endpoint.app(guard),
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="critical",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=int(2 * GRACE_SECONDS),
    )
    server = _Server(config, stop)

    def give_up() -> None:
        server.should_exit = True

    worker.on_failure = give_up
    listener.listen(BACKLOG)
    on_ready()
    try:
        await server.serve(sockets=[listener])
    finally:
        endpoint.close()
        await asyncio.to_thread(worker.close)


async def _read_body(request: Request) -> bytes:
    """The whole body of a JSON request, within bounds of size and time."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # also what a page in a browser cannot send here without asking first
        raise RefusalError(415, "Content-Type must be application/json")
    too_large = RefusalError(413, f"the body is larger than {MAX_BODY_BYTES} bytes", code="body_too_large")
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > MAX_BODY_BYTES:
        raise too_large
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size > MAX_BODY_BYTES:
                    raise too_large
                parts.append(part)
    except TimeoutError:
        raise RefusalError(408, f"the body did not arrive within {BODY_SECONDS:.0f} seconds") from None
    return b"".join(parts)


def _refusal(error: Exception) -> RefusalError:
    """What a client is told of a failure."""
    if isinstance(error, RefusalError):
        return error
    if isinstance(error, StoppingError):
        retry = {"Retry-After": str(int(GRACE_SECONDS))}
        return RefusalError(503, error.cause, kind="server_error", code="stopping", headers=retry)
    message = error.cause if isinstance(error, UllageError) else f"internal error: {type(error).__name__}"
    return RefusalError(500, message, kind="server_error")


def _json(value: Object, status: int = 200) -> Response:
    return Response(_encoded(value), status, media_type="application/json")


def _event(value: Object) -> bytes:
    return b"data: " + _encoded(value) + b"\n\n"


def _encoded(value: Object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
