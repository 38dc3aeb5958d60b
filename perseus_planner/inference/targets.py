"""A client of a server that speaks OpenAI's API, as vLLM, SGLang, TGI and llama.cpp serve it.

`POST /v1/completions` or `/v1/chat/completions` with `stream`, answered by server-sent events
(https://platform.openai.com/docs/api-reference/completions). Tokens are those that the server
counts (`usage`): an event may have several, or no text.
"""

from __future__ import annotations

import http.client
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from perseus_planner.base.errors import UsageError

LIMIT_S = 600.0
"""The most seconds between two events of an answer, unless others are given."""
_TOKENS = range(10, 1010)  # numbers of tokens that every vocabulary has
_WORDS = ("the", "of", "and", "to", "in", "is", "that", "for", "it", "as", "was", "with", "be")
_MOST_OFF = 0.1  # of the tokens of a request that a server may count otherwise


class Answer(NamedTuple):
    """What came of a request; times in seconds of the monotonic clock."""

    begin_s: float  #: when it was sent
    times_s: tuple[float, ...]  #: when each event with text came
    input_tokens: int  #: as the server counts them
    output_tokens: int  #: likewise

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.times_s[0] - self.begin_s

    @property
    def tbt_s(self) -> float | None:
        """Mean time between tokens, which GenAI-Perf calls inter token latency and others time per
        output token; None if there is one token.
        """
        if self.output_tokens < 2:
            return None
        return (self.times_s[-1] - self.times_s[0]) / (self.output_tokens - 1)


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    choices: tuple[_Choice, ...] = ()
    usage: _Usage | None = None
    error: Any = None

    @property
    def has_text(self) -> bool:
        return any(
            each.text or (each.delta and (each.delta.content or each.delta.reasoning_content))
            for each in self.choices
        )


_decode = msgspec.json.Decoder(_Event).decode


class Server:
    """A server at an address such as "http://127.0.0.1:8000/v1"; connections are kept alive.

    Args:
        address: Where it is; with or without /v1.
        model: Name of the model; None for the first that the server lists.
        chat: Whether to ask for chat completions.
        text: Whether prompts are text; otherwise numbers of tokens. Chats are text.
        key: What the server wants as a bearer token.
        limit_s: The most seconds between two events of an answer.

    Raises:
        UsageError: If no server answers there, or it does not list the model.
    """

    def __init__(
        self,
        address: str,
        model: str | None = None,
        *,
        chat: bool = False,
        text: bool = False,
        key: str | None = None,
        limit_s: float = LIMIT_S,
    ) -> None:
        self.address = address.rstrip("/").removesuffix("/v1") + "/v1"
        parts = urlsplit(self.address)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(
                f"{address!r} is no address of a server; write one such as http://127.0.0.1:8000/v1"
            )
        self._parts, self._limit_s = parts, limit_s
        self._chat, self._text = chat, text or chat
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._free: list[http.client.HTTPConnection] = []
        with self._answered("GET", "/models") as response:
            try:
                names = [str(entry["id"]) for entry in msgspec.json.decode(response.read())["data"]]
                self._model = names[0] if model is None else model
            except (LookupError, TypeError, msgspec.DecodeError) as error:
                raise self._problem(f"lists no models ({error!r})") from error
        if self._model not in names:
            self.close()
            raise UsageError(
                f"{self.address}: has no model {model!r}; choose one of: {', '.join(names)}"
            )

    def close(self) -> None:
        """Close all connections."""
        while self._free:
            self._free.pop().close()

    def complete(self, input_tokens: int, output_tokens: int) -> Answer:
        """Send a request, and return what came; its prompt is random, so that no server has it in
        its cache. May be called by many threads.

        Raises:
            UsageError: If the server refuses it, ends it early or takes too long.
        """
        prompt: Any = random.choices(_TOKENS, k=input_tokens)
        if self._text:
            prompt = " ".join(_WORDS[token % len(_WORDS)] for token in prompt)
        asked = {"messages": [{"role": "user", "content": prompt}]} if self._chat else None
        body = {
            "model": self._model,
            **(asked or {"prompt": prompt}),
            "max_tokens": output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
        path = "/chat/completions" if self._chat else "/completions"
        times_s, usage, finish = list[float](), None, "no reason given"
        encoded, begin_s = msgspec.json.encode(body), time.monotonic()
        with self._answered("POST", path, encoded) as response:
            for now_s, event in self._events(response):
                if event.error is not None:
                    raise self._problem(f"ended a request with {str(event.error)[:200]}")
                if event.has_text:
                    times_s.append(now_s)
                for choice in event.choices:
                    finish = choice.finish_reason or finish
                usage = event.usage or usage
        if usage is None and len(times_s) == output_tokens:
            usage = _Usage(input_tokens, output_tokens)
        if usage is None:
            raise self._problem(
                f"sent {len(times_s)} events for {output_tokens} tokens, and does not say how many "
                "tokens they have (stream_options.include_usage)"
            )
        if not times_s or usage.completion_tokens < (1 - _MOST_OFF) * output_tokens:
            raise UsageError(
                f"{self.address}: the server ended a request after {usage.completion_tokens} of "
                f"{output_tokens} tokens, {len(times_s)} events of which had text ({finish}); let "
                "it ignore the end of a text (ignore_eos), or ask for fewer"
            )
        if abs(usage.prompt_tokens - input_tokens) > max(_MOST_OFF * input_tokens, 64):
            raise UsageError(
                f"{self.address}: counts {usage.prompt_tokens} tokens in a prompt of "
                f"{input_tokens}; send numbers of tokens, or another class"
            )
        return Answer(begin_s, tuple(times_s), usage.prompt_tokens, usage.completion_tokens)

    def _events(self, response: http.client.HTTPResponse) -> Iterator[tuple[float, _Event]]:
        """Yield when each server-sent event came, and what it says."""
        rest = b""
        while data := response.read1(1 << 16):
            now_s = time.monotonic()
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    if line[5:].strip() == b"[DONE]":
                        response.read()  # to its end, so that the connection can be used again
                        return
                    yield now_s, _decode(line[5:])
        raise self._problem("ended a request without its last event ([DONE])")

    @contextmanager
    def _answered(
        self, method: str, path: str, body: bytes | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        """Send a request; what goes wrong with the connection is a `UsageError`."""
        try:
            connection, response = self._sent(method, self._parts.path + path, body)
            try:
                self._check(response, path)
                yield response
            except BaseException:
                connection.close()
                raise
            self._free.append(connection)
        except TimeoutError as error:
            raise self._problem(f"sent nothing for {self._limit_s:g} s") from error
        except (OSError, http.client.HTTPException, msgspec.DecodeError) as error:
            raise self._problem(f"does not answer as OpenAI's API does ({error!r})") from error

    def _sent(
        self, method: str, path: str, body: bytes | None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """Send a request on a connection that is open, or on a new one if the server has closed
        that.
        """
        while True:
            try:
                connection, is_new = self._free.pop(), False
            except IndexError:
                secure = self._parts.scheme == "https"
                kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
                host, port = self._parts.hostname or "", self._parts.port
                connection, is_new = kind(host, port, timeout=self._limit_s), True
            try:
                connection.request(method, path, body, self._headers)
                return connection, connection.getresponse()
            except (ConnectionError, http.client.BadStatusLine):
                connection.close()
                if is_new:
                    raise

    def _check(self, response: http.client.HTTPResponse, path: str) -> None:
        if response.status != 200:
            said = response.read(200).decode(errors="replace")
            raise UsageError(
                f"{self.address}{path}: answers {response.status}: {said}; check the address, the "
                "key and the model"
            )

    def _problem(self, what: str) -> UsageError:
        return UsageError(
            f"{self.address}: {what}; start the server, and give the address that it prints"
        )
