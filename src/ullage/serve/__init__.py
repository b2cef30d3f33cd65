"""An OpenAI-compatible endpoint over the embedded engine; `ullage chat` talks to the same core without a socket.

`room` (how much the engine may hold) · `worker` (the thread that drives it) · `answer` and `text` (tokens to text, stop
strings) · `request` (what a client may ask for) · `service` (requests to orders) · `reply` (what it is answered) ·
`guard` (who may ask) · `server` (HTTP).
"""
