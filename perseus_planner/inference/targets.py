"""What serves the requests of `serving.py`: a server that speaks OpenAI's completions API, or a
function.

The API is that of https://platform.openai.com/docs/api-reference/completions, as vLLM, SGLang, TGI
and llama.cpp serve it: `POST /v1/completions` with the numbers of the prompt's tokens and `stream`,
answered by server-sent events.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

from perseus_planner.base.errors import UsageError

if TYPE_CHECKING:
    import httpx

_TIMEOUT_S = 600.0
_TOKENS = range(10, 1010)  # numbers of tokens that every vocabulary has
_MOST_MISSING = 0.1  # of the output tokens; a server may join two of them in one event


class CompletionsServer:
    """A server at an address such as "http://127.0.0.1:8000/v1".

    Args:
        address: Where it is; with or without /v1.
        model: Name of the model; None for the first that the server lists.

    Raises:
        UsageError: If no server answers there, or it does not list the model.
    """

    def __init__(self, address: str, model: str | None = None) -> None:
        import httpx

        self._address = address.rstrip("/").removesuffix("/v1") + "/v1"
        key = os.environ.get("OPENAI_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._http = httpx.Client(headers=headers, timeout=_TIMEOUT_S, limits=limits)
        try:
            self._model = self._found(model)
        except UsageError:
            self.close()
            raise

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def serve(self, batch: int, input_tokens: int, output_tokens: int) -> Sequence[Sequence[float]]:
        """Send `batch` requests at once, and return the seconds from then to each output token of
        each request.

        Raises:
            UsageError: If the server refuses a request, or ends it early.
        """
        with ThreadPoolExecutor(batch) as pool:
            return list(
                pool.map(lambda _: self._complete(input_tokens, output_tokens), range(batch))
            )

    def _complete(self, input_tokens: int, output_tokens: int) -> list[float]:
        """Send one request; its prompt is random, so that no server has it in its cache."""
        request = {
            "model": self._model,
            "prompt": random.choices(_TOKENS, k=input_tokens),
            "max_tokens": output_tokens,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
        }
        begin_s = time.monotonic()
        with (
            _answering(self._address),
            self._http.stream("POST", f"{self._address}/completions", json=request) as response,
        ):
            self._check(response)
            events = filter(lambda event: event.get("choices"), _events(response.iter_lines()))
            times_s = [time.monotonic() - begin_s for _ in events]
        if len(times_s) < (1 - _MOST_MISSING) * output_tokens:
            raise UsageError(
                f"{self._address}: sent {len(times_s)} of {output_tokens} tokens one by one; let "
                "it ignore the end of a text (ignore_eos) and stream every token, or ask for fewer"
            )
        return times_s

    def _found(self, model: str | None) -> str:
        """Return the name of the model, which the server must list."""
        with _answering(self._address):
            response = self._http.get(f"{self._address}/models")
            self._check(response)
            names = [str(entry["id"]) for entry in response.json()["data"]]
            if model is None:
                return names[0]
        if model not in names:
            raise UsageError(
                f"{self._address}: has no model {model!r}; choose one of: {', '.join(names)}"
            )
        return model

    def _check(self, response: httpx.Response) -> None:
        if response.status_code != 200:
            said = response.read().decode(errors="replace")[:200]
            raise UsageError(
                f"{response.url}: answers {response.status_code}: {said}; check the address and "
                "the model"
            )


@contextmanager
def _answering(address: str) -> Iterator[None]:
    """Turn errors of the connection into a `UsageError`."""
    import httpx

    try:
        yield
    except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
        raise UsageError(
            f"{address}: does not answer as OpenAI's completions API does ({error!r}); start the "
            "server, and give the address that it prints"
        ) from error


def _events(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield the JSON of each server-sent event."""
    for line in lines:
        if line.startswith("data:") and line.removeprefix("data:").strip() != "[DONE]":
            yield json.loads(line.removeprefix("data:"))


class ServingFunction:
    """A function `f(batch, input_tokens, output_tokens)`, which yields after each step of one token
    of each request.

    Args:
        place: Where it is, as "module:function".

    Raises:
        UsageError: If there is no such function.
    """

    def __init__(self, place: str) -> None:
        module, _, name = place.partition(":")
        try:
            self._function: Callable[[int, int, int], Iterable[object]] = getattr(
                import_module(module), name
            )
        except (ImportError, AttributeError) as error:
            raise UsageError(
                f"{place}: {error}; name a function as module:function, from the folder it is in"
            ) from error
        self._place = place

    def close(self) -> None:
        """Do nothing: a function has nothing to close."""

    def serve(self, batch: int, input_tokens: int, output_tokens: int) -> Sequence[Sequence[float]]:
        """Call the function, and return the seconds from then to each step, for each request.

        Raises:
            UsageError: If it does not yield once for each output token.
        """
        begin_s = time.monotonic()
        times_s = [
            time.monotonic() - begin_s for _ in self._function(batch, input_tokens, output_tokens)
        ]
        if len(times_s) != output_tokens:
            raise UsageError(
                f"{self._place}: yielded {len(times_s)} times for {output_tokens} output tokens; "
                "yield once for each"
            )
        return [times_s] * batch


def open_target(text: str, model: str | None = None) -> CompletionsServer | ServingFunction:
    """Return the server at an address, or the function "module:function".

    Raises:
        UsageError: If there is neither.
    """
    if text.startswith(("http://", "https://")):
        return CompletionsServer(text, model)
    if model is not None:
        raise UsageError(f"--model {model}: {text} is not a server; leave it out")
    return ServingFunction(text)
