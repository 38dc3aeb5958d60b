"""A server that speaks OpenAI's completions API, with a tiny model of random weights on an emulated
GPU.

    python completions_server.py emulated:a100-sxm/0?slower=100      prints its address

It follows https://platform.openai.com/docs/api-reference/completions: `GET /v1/models`, and
`POST /v1/completions` with a prompt of token numbers, answered by server-sent events that end with
`[DONE]`.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from perseus_planner.gpu.simulated.emulated import EmulatedGpu, open_emulated
from perseus_planner.gpu.simulated.model import OpCost

PREFILL = OpCost(6e9, 1e6)
"""Of each input token: nearly all arithmetic."""
DECODE = OpCost(1e9, 4e8)
"""Of each output token: nearly all memory traffic."""
_VOCABULARY = 1024


class TinyModel:
    """Random weights, and an emulated GPU that takes the time of a larger model."""

    def __init__(self, gpu: EmulatedGpu) -> None:
        import torch

        torch.manual_seed(0)
        torch.set_num_threads(1)
        torch.set_grad_enabled(False)
        self._gpu, self._turn, self._tensor = gpu, threading.Lock(), torch.tensor
        self._embedding = torch.nn.Embedding(_VOCABULARY, 16)
        self._cell = torch.nn.GRU(16, 16, batch_first=True)
        self._head = torch.nn.Linear(16, _VOCABULARY)

    def generate(self, prompt: list[int], tokens: int) -> Iterator[int]:
        """Yield so many tokens after the prompt, always the likeliest."""
        following, state = self._tensor([prompt]), None
        for step in range(tokens):
            with self._turn:
                hidden, state = self._cell(self._embedding(following), state)
                self._gpu.run(DECODE if step else PREFILL * len(prompt))
            following = self._head(hidden[:, -1:]).argmax(-1)
            yield int(following)


class Handler(BaseHTTPRequestHandler):
    """Answers requests."""

    protocol_version = "HTTP/1.1"
    model: TinyModel

    def do_GET(self) -> None:
        """List the model."""
        self._answer(200, {"object": "list", "data": [{"id": "tiny", "object": "model"}]})

    def do_POST(self) -> None:
        """Complete a prompt."""
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if request["model"] != "tiny" or not all(
            0 <= token < _VOCABULARY for token in request["prompt"]
        ):
            self._answer(
                400,
                {"error": {"message": "no such model or token", "type": "invalid_request_error"}},
            )
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        wanted = request["max_tokens"] if request.get("ignore_eos") else 1
        for token in self.model.generate(request["prompt"], wanted):
            choice = {"index": 0, "text": f" {token}", "logprobs": None, "finish_reason": None}
            self._event(
                json.dumps({"object": "text_completion", "model": "tiny", "choices": [choice]})
            )
        self._event("[DONE]")
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        """Stay silent."""

    def _event(self, data: str) -> None:
        self.wfile.write(f"data: {data}\n\n".encode())
        self.wfile.flush()

    def _answer(self, status: int, content: object) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    Handler.model = TinyModel(open_emulated(sys.argv[1].removeprefix("emulated:")))
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(f"http://127.0.0.1:{server.server_port}/v1", flush=True)
    server.serve_forever()
