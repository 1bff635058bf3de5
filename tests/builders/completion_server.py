"""A real HTTP server that speaks the chat protocol of OpenAI as vLLM and SGLang do, and answers by rule.

It says "re: " and the last message; it calls a tool when that contains "use the tool". A token id is a byte, 256 ends.
"""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

END_ID = 256


class CompletionServer:
    """Listens on a port of its own until closed.

    Args:
        ids: whether exact ids are returned, and where: beside the choices (vLLM) or inside (SGLang).
        failures: status codes of the first replies; 0 closes the connection without one.
        meet: wait until so many requests are there at a time.
    """

    def __init__(self, ids: Literal["vllm", "sglang", ""] = "", failures: tuple[int, ...] = (), meet: int = 1) -> None:
        self.requests: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.max_answers = 1_000_000  # from then on 401
        self._ids = ids
        self._failures = list(failures)
        self._barrier = threading.Barrier(meet)
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._make_handler())
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/v1"

    def __enter__(self) -> "CompletionServer":
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def prompts(self) -> list[str]:
        """The last message of every request, sorted: their order is not decided."""
        return sorted(str(request["messages"][-1]["content"]) for request in self.requests)

    def reply(self, path: str, request: dict[str, Any], key: str | None) -> tuple[int, dict[str, Any]]:
        with self._lock:
            if self._failures:
                return self._failures.pop(0), {"error": "try again"}
            if len(self.requests) >= self.max_answers:
                return 401, {"error": "no more"}
            self.requests.append(request)
            self.keys.add(key)
        self._barrier.wait(timeout=30)
        text = str(request["messages"][-1]["content"])
        if path != "/v1/chat/completions":
            return 404, {"error": "no such path"}
        if "too long" in text:
            return 400, {"error": {"message": "the prompt is too long"}}
        return 200, self._answer(request, text)

    def _answer(self, request: dict[str, Any], text: str) -> dict[str, Any]:
        said = f"re: {text}".encode()
        ids = [*said, END_ID][: request.get("max_tokens")]
        finished = ids[-1] == END_ID
        message: dict[str, Any] = {"role": "assistant", "content": bytes(ids[:-1] if finished else ids).decode()}
        reason = "stop" if finished else "length"
        if "use the tool" in text:
            message |= {"content": None, "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]}
            reason = "tool_calls"
        choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": reason}
        reply: dict[str, Any] = {"object": "chat.completion", "choices": [choice]}
        if self._ids and request.get("return_token_ids"):
            choice["token_ids"] = ids
            prompt = "|".join(str(message["content"]) for message in request["messages"]).encode()
            (reply if self._ids == "vllm" else choice)["prompt_token_ids"] = list(prompt)
        return reply

    def _make_handler(self) -> type[BaseHTTPRequestHandler]:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status, reply = outer.reply(self.path, request, self.headers.get("Authorization"))
                if status == 0:
                    return
                content = json.dumps(reply).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: object) -> None:
                pass

        return Handler
