"""A server that speaks OpenAI's API, with continuous batching on an emulated GPU: each iteration
takes what its tokens take there at the clock that is set.

    python completions_server.py emulated:a100-sxm/0?slower=10 [NAME=VALUE ...]

It prints its address.

`/v1/models`, `/v1/completions`, `/v1/chat/completions` (server-sent events that end with `[DONE]`)
follow https://platform.openai.com/docs/api-reference; `/metrics` has the names of vLLM 0.33.

    burst=3      several tokens an event, as with speculative decoding
    empty=1      an event without text before the first token
    texts=2      only so many events have text; says at the end why it ends
    usage=0      never says how many tokens there were
    early=2      ends each answer after so many tokens
    field=refusal    what has the text of a delta: content, reasoning, tool (a call's arguments) ...
    thoughts=6   so many tokens come first in a delta's field `reasoning`; hidden=6: in no event
    cached=48    so many tokens of each prompt come from a cache; said=1: `usage` says it too
    metrics=no   none; metrics=other: of another program
    key=secret   wants this key
"""

from __future__ import annotations

import json
import sys
import threading
import time
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Queue

from perseus_planner.gpu.simulated.emulated import EmulatedGpu, open_emulated
from perseus_planner.gpu.simulated.model import OpCost

INPUT = OpCost(6e9, 1e6)
"""Of each input token: nearly all arithmetic."""
OUTPUT = OpCost(1e9, 1e7)
"""Of each output token."""
WEIGHTS = OpCost(1e6, 4e8)
"""Of each iteration: nearly all memory traffic."""
CHUNK, MOST = 512, 64
"""Most input tokens of an iteration, and requests at once."""
BUCKETS = (0.001, 0.01, 0.02, 0.04, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)


@dataclass
class Sequence:
    """A request in the server."""

    input_tokens: int
    output_tokens: int
    came_s: float
    cached: int = 0  # of the input tokens
    left: int = 0  # input tokens to compute
    done: int = 0  # output tokens
    first_s: float = 0.0
    last_s: float = 0.0
    events: Queue[int] = field(default_factory=Queue)  # tokens of each event; 0 at the end

    def __post_init__(self) -> None:
        self.left = self.input_tokens - self.cached


class Histogram:
    """Counts of values by buckets, as Prometheus has them."""

    def __init__(self, name: str) -> None:
        self.name, self.counts, self.sum = name, [0] * (len(BUCKETS) + 1), 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(BUCKETS, value)] += 1
        self.sum += value

    def text(self) -> str:
        lines, total = [], 0
        for most, count in zip((*BUCKETS, "+Inf"), self.counts, strict=True):
            total += count
            lines.append(
                f'vllm:{self.name}_bucket{{engine="0",le="{most}",model_name="tiny"}} {total}'
            )
        labels = '{engine="0",model_name="tiny"}'
        lines += [
            f"vllm:{self.name}_sum{labels} {self.sum}",
            f"vllm:{self.name}_count{labels} {total}",
        ]
        return "\n".join([f"# TYPE vllm:{self.name} histogram", *lines])


class Engine:
    """Runs one iteration after the other, with all requests that are there."""

    def __init__(self, gpu: EmulatedGpu, burst: int) -> None:
        self._gpu, self._burst = gpu, burst
        self.lock = threading.Condition()
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.ttft, self.itl, self.tpot = (
            Histogram("time_to_first_token_seconds"),
            Histogram("inter_token_latency_seconds"),
            Histogram("request_time_per_output_token_seconds"),
        )
        self.prompt_tokens = self.cached_tokens = self.generation_tokens = 0
        threading.Thread(target=self._run, daemon=True).start()

    def add(self, sequence: Sequence) -> None:
        with self.lock:
            self.cached_tokens += sequence.cached
            self.waiting.append(sequence)
            self.lock.notify()

    def _run(self) -> None:
        while True:
            with self.lock:
                self.lock.wait_for(lambda: self.waiting or self.running)
                while self.waiting and len(self.running) < MOST:
                    self.running.append(self.waiting.popleft())
            budget, cost, chunks = CHUNK, WEIGHTS, list[int]()
            for each in self.running:
                tokens = min(each.left, budget)
                budget -= tokens
                chunks.append(tokens)
                cost = cost + (INPUT * tokens if each.left else OUTPUT)
            self._gpu.run(cost)
            now_s = time.monotonic()
            with self.lock:
                for each, tokens in zip(self.running, chunks, strict=True):
                    self._advance(each, tokens, now_s)
                self.running = [each for each in self.running if each.done < each.output_tokens]

    def _advance(self, sequence: Sequence, tokens: int, now_s: float) -> None:
        sequence.left -= tokens
        self.prompt_tokens += tokens
        if sequence.left or (tokens == 0 and sequence.done == 0):
            return
        new = 1 if sequence.done == 0 else min(self._burst, sequence.output_tokens - sequence.done)
        for _ in range(new):
            if sequence.done:
                self.itl.add((now_s - sequence.last_s) / new)
            else:
                self.ttft.add(now_s - sequence.came_s)
                sequence.first_s = now_s
            sequence.done += 1
        sequence.last_s = now_s
        self.generation_tokens += new
        sequence.events.put(new)
        if sequence.done >= sequence.output_tokens:
            self.tpot.add((now_s - sequence.first_s) / max(1, sequence.done - 1))
            sequence.events.put(0)

    def metrics(self) -> str:
        labels = '{engine="0",model_name="tiny"}'
        with self.lock:
            return "\n".join(
                [
                    "# TYPE vllm:num_requests_running gauge",
                    f"vllm:num_requests_running{labels} {float(len(self.running))}",
                    "# TYPE vllm:num_requests_waiting gauge",
                    f"vllm:num_requests_waiting{labels} {float(len(self.waiting))}",
                    f"vllm:prompt_tokens_total{labels} "
                    f"{float(self.prompt_tokens + self.cached_tokens)}",
                    *(
                        f'vllm:prompt_tokens_by_source_total{{engine="0",model_name="tiny",'
                        f'source="{source}"}} {float(tokens)}'
                        for source, tokens in (
                            ("local_compute", self.prompt_tokens),
                            ("local_cache_hit", self.cached_tokens),
                            ("external_kv_transfer", 0),
                        )
                    ),
                    f"vllm:generation_tokens_total{labels} {float(self.generation_tokens)}",
                    self.ttft.text(),
                    self.itl.text(),
                    self.tpot.text(),
                    "",
                ]
            )


class Handler(BaseHTTPRequestHandler):
    """Answers requests; connections are kept alive."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else events wait for acknowledgements
    engine: Engine
    options: dict[str, str]

    def do_GET(self) -> None:
        metrics = self.options.get("metrics")
        if self.path == "/metrics" and metrics != "no":
            text = self.engine.metrics()
            self._answer(
                200, text.replace("vllm:", "tgi_" if metrics == "other" else "vllm:").encode()
            )
        elif self.path == "/v1/models":
            self._answer(200, {"object": "list", "data": [{"id": "tiny", "object": "model"}]})
        else:
            self._answer(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        key = self.options.get("key")
        if key and self.headers.get("Authorization") != f"Bearer {key}":
            self._answer(401, {"error": "Unauthorized"})
            return
        if asked["model"] != "tiny":
            self._answer(
                400, {"error": {"message": "no such model", "type": "invalid_request_error"}}
            )
            return
        chat = self.path.endswith("/chat/completions")
        prompt = asked["messages"][0]["content"] if chat else asked["prompt"]
        tokens = len(prompt.split()) if isinstance(prompt, str) else len(prompt)
        most = int(self.options.get("early", asked["max_tokens"]))
        cached = min(int(self.options.get("cached", 0)), tokens - 1)
        output_tokens = min(most, asked["max_tokens"])
        sequence = Sequence(tokens, output_tokens, time.monotonic(), cached)
        self.engine.add(sequence)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if "empty" in self.options:
            self._choice(chat, "")
        texts = int(self.options.get("texts", most))
        sent = 0
        thoughts, hidden = (int(self.options.get(name, 0)) for name in ("thoughts", "hidden"))
        while new := sequence.events.get():
            sent += new
            if sent <= hidden:
                continue
            field = "reasoning" if sent <= thoughts else self.options.get("field", "content")
            self._choice(chat, " word" * new if texts > 0 else "", field=field)
            texts -= 1
        if "texts" in self.options or hidden:
            self._choice(chat, "", "length")
        if (
            asked.get("stream_options", {}).get("include_usage")
            and self.options.get("usage") != "0"
        ):
            usage: dict[str, object] = {"prompt_tokens": tokens}
            usage["completion_tokens"] = sequence.done
            if "said" in self.options:
                usage["prompt_tokens_details"] = {"cached_tokens": cached}
            self._event(json.dumps({"choices": [], "usage": usage}))
        self._event("[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_: object) -> None:
        """Stay silent."""

    def _choice(
        self, chat: bool, text: str, finish: str | None = None, field: str = "content"
    ) -> None:
        delta: dict[str, object] = {field: text}
        if field == "tool":
            call = {"index": 0, "id": "call-1", "type": "function", "function": {"arguments": text}}
            delta = {"tool_calls": [call]}
        said: dict[str, object] = {"delta": delta} if chat else {"text": text}
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": finish}
        self._event(json.dumps({"model": "tiny", "choices": [choice], "usage": None}))

    def _event(self, data: str) -> None:
        event = f"data: {data}\n\n".encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))
        self.wfile.flush()

    def _answer(self, status: int, content: object) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class Server(ThreadingHTTPServer):
    """Takes as many connections at once as come."""

    request_queue_size = 256
    daemon_threads = True


if __name__ == "__main__":
    options = dict(each.split("=", 1) for each in sys.argv[2:])
    gpu = open_emulated(sys.argv[1].removeprefix("emulated:"))
    Handler.engine, Handler.options = Engine(gpu, int(options.get("burst", 1))), options
    server = Server(("127.0.0.1", int(options.get("port", 0))), Handler)
    print(f"http://127.0.0.1:{server.server_port}/v1", flush=True)
    server.serve_forever()
