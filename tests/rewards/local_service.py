"""A scoring service on the loopback address that says what a test wants, and remembers what it was asked."""

import json
import socket
import threading
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class LocalService:
    answer: object
    """Called with the decoded body; returns a JSON value, `(status, value, headers)`, bytes, or seconds to hang."""
    url: str = ""
    bodies: list = field(default_factory=list)
    headers: list = field(default_factory=list)
    paths: list = field(default_factory=list)


class ManyCallers(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256


@contextmanager
def serving(answer):
    service = LocalService(answer)
    ended = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            service.bodies.append(body)
            service.headers.append({name.lower(): text for name, text in self.headers.items()})
            service.paths.append(self.path)
            said = service.answer(body)
            if isinstance(said, float):
                ended.wait(said)
                return
            status, value, headers = said if isinstance(said, tuple) else (200, said, {})
            content = value if isinstance(value, bytes) else json.dumps(value).encode()
            self.send_response(status)
            for name, text in {"content-length": str(len(content)), **headers}.items():
                self.send_header(name, text)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *arguments):
            pass

    server = ManyCallers(("127.0.0.1", 0), Handler)
    service.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield service
    finally:
        ended.set()
        server.shutdown()
        server.server_close()
        thread.join()


def in_turn(*answers):
    """One answer after the other, the last of them for ever."""
    left = list(answers)
    return lambda body: left.pop(0) if len(left) > 1 else left[0]


def free_url():
    """Where nobody listens."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    port = server.server_address[1]
    server.server_close()
    return f"http://127.0.0.1:{port}/score"


@contextmanager
def saying(reply):
    """The URL of a server that answers every call with these bytes, HTTP or not."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer():
            with suppress(OSError):  # closed
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        connection.recv(1 << 16)
                        connection.sendall(reply)
                        calls.append(reply)

        calls = []
        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", calls
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
