"""Get answers from a server that speaks the OpenAI protocol, such as vLLM or SGLang.

POST <url>/chat/completions. `return_token_ids` requests the exact ids: vLLM puts `prompt_token_ids` beside the choices,
SGLang into the choice, both `token_ids` into the choice. A server that knows neither leaves them out.
"""

import http.client
import json
import time
import urllib.error
import urllib.request
from typing import Any, NamedTuple

from common.errors import HeadraceError
from launch.data.answers import Answer, History
from launch.data.conversations import REASONING_KEYS, Message, with_text_arguments

_TRANSIENT = {408, 409, 425, 429, 500, 502, 503, 504}
_REFUSED = {400, 413, 422}
_CUT = {"length", "abort", "content_filter", "error"}  # reasons to end that the target did not choose
_MAX_WAIT_S = 30.0


class ServerError(HeadraceError):
    """The server cannot be reached, or does not speak the protocol."""


class RefusedError(Exception):
    """One conversation cannot be answered: too long, or refused by the template. Others can go on."""


class Server(NamedTuple):
    """A server and the settings of its requests."""

    url: str  # with /v1
    model: str
    max_new_tokens: int | None  # None: as many as the server allows
    settings: dict[str, Any]  # more fields of a request, such as temperature
    api_key: str = ""
    max_retries: int = 5
    timeout_s: float = 600.0
    backoff_s: float = 1.0  # doubled with every retry

    def answer(self, history: History) -> Answer:
        """Request one answer. RefusedError where the server refuses it, ServerError where all retries fail."""
        body = {
            "model": self.model,
            "messages": [with_text_arguments(message) for message in history.messages],
            **({"max_tokens": self.max_new_tokens} if self.max_new_tokens else {}),
            "return_token_ids": True,
            **({"tools": history.tools} if history.tools else {}),
            **self.settings,
        }
        return _read_answer(self._request(json.dumps(body).encode()))

    def _request(self, body: bytes) -> dict[str, Any]:
        for attempt in range(self.max_retries + 1):
            if attempt:
                time.sleep(min(_MAX_WAIT_S, self.backoff_s * 2 ** (attempt - 1)))
            try:
                return self._post(body)
            except urllib.error.HTTPError as error:
                reason = f"{error.code} {_read_reason(error)}"
                if error.code in _REFUSED:
                    raise RefusedError(reason) from error
                if error.code not in _TRANSIENT:
                    raise ServerError(f"{self.url}: {reason}") from error
            except (OSError, http.client.HTTPException, ValueError) as error:
                reason = str(error) or type(error).__name__
        raise ServerError(f"{self.url}: no answer in {self.max_retries + 1} attempts, the last: {reason}")

    def _post(self, body: bytes) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.api_key}"} if self.api_key else {})
        request = urllib.request.Request(f"{self.url.rstrip('/')}/chat/completions", body, headers)
        with urllib.request.urlopen(request, timeout=self.timeout_s) as response:
            reply = json.loads(response.read())
        if not isinstance(reply, dict) or not reply.get("choices"):
            raise ValueError("a reply without choices")
        return reply


def _read_answer(reply: dict[str, Any]) -> Answer:
    choice = reply["choices"][0]
    given = choice.get("message") or {}
    message: Message = {"role": "assistant", "content": given.get("content") or ""}
    if reasoning := next((given[key] for key in REASONING_KEYS if given.get(key)), None):
        message["reasoning_content"] = reasoning
    if given.get("tool_calls"):
        message["tool_calls"] = given["tool_calls"]
    prompt_ids = choice.get("prompt_token_ids") or reply.get("prompt_token_ids")
    return Answer(message, choice.get("finish_reason") not in _CUT, prompt_ids, choice.get("token_ids"))


def _read_reason(error: urllib.error.HTTPError) -> str:
    try:
        text = error.read(2000).decode(errors="replace")
    except OSError:
        text = ""
    return " ".join((text or str(error.reason)).split())[:300]
