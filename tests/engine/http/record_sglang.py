"""Records what a real SGLang answers, for `recordings/sglang.json`, which the fake is compared with.

    proxima engine install sglang
    .venv-sglang/bin/python -m sglang.launch_server --model-path MODEL --context-length 256 ...
    python -m tests.engine.http.record_sglang http://127.0.0.1:30000 MODEL [URL-OF-A-MIXTURE]

MODEL is a tiny model, such as `tests.tiny.make_tiny` makes; a mixture of experts is served with
`--enable-return-routed-experts`. `CALLS` has the calls, which the comparison sends to the fake too. Values that differ
from one recording to the next are left out, and so is what a run does not read of `/server_info`.
"""

import asyncio
import json
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

FILE = Path(__file__).parent / "recordings" / "sglang.json"
PROMPT, SHORT, ENDLESS = [5, 6, 7, 8], {"max_new_tokens": 3, "temperature": 1.0}, {"max_new_tokens": 200}
LOGPROBS = {"return_logprob": True, "logprob_start_len": -1}
SETTINGS = ("version", "dtype", "quantization", "context_length", "sampling_mask_max_tokens", "weight_version")
SETTINGS += (
    "device",
    "tp_size",
    "pp_size",
    "dp_size",
    "enable_deterministic_inference",
    "enable_return_routed_experts",
    "incremental_streaming_output",
)


def generate(*, stream: bool = False, ids: list[int] | None = None, **fields: Any) -> dict[str, Any]:
    """The body of a request for a completion; `fields` replace its own."""
    return {"input_ids": ids or PROMPT, "sampling_params": SHORT, "stream": stream, **LOGPROBS, **fields}


def masked(*, stream: bool = False, **sampling: Any) -> dict[str, Any]:
    return generate(stream=stream, return_sampling_mask=True, sampling_params=SHORT | sampling)


# name: method, path, body; a stream is recorded message by message
CALLS: dict[str, tuple[str, str, Any]] = {
    "model_info": ("GET", "/model_info", None),
    "server_info": ("GET", "/server_info", None),
    "loads": ("GET", "/v1/loads", None),
    "models": ("GET", "/v1/models", None),
    "tokenize": ("POST", "/tokenize", {"prompt": "ab", "add_special_tokens": False}),
    "probe": ("POST", "/generate", generate(top_logprobs_num=2, sampling_params=SHORT | {"top_k": 2})),
    "score": ("POST", "/generate", generate(logprob_start_len=1, sampling_params=SHORT | {"max_new_tokens": 1})),
    "stream": ("POST", "/generate", generate(stream=True)),
    "masked": ("POST", "/generate", masked(top_k=2)),
    "masked_stream": ("POST", "/generate", masked(stream=True, top_k=2)),
    "masked_without_top_k": ("POST", "/generate", masked(top_p=0.9)),
    "masked_without_top_k_stream": ("POST", "/generate", masked(stream=True, top_p=0.9)),
    "too_long": ("POST", "/generate", generate(ids=[5] * 251)),
    "too_long_stream": ("POST", "/generate", generate(ids=[5] * 251, stream=True)),
    "top_k_of_zero": ("POST", "/generate", generate(sampling_params=SHORT | {"top_k": 0})),
    "flush": ("POST", "/flush_cache?timeout=5", None),
    "weights_of_no_folder": ("POST", "/update_weights_from_disk", {"model_path": "/no/such/folder"}),
    "weights": ("POST", "/update_weights_from_disk", {"model_path": "MODEL", "weight_version": "v1"}),
}
ROUTES = {"routes": ("POST", "/generate", generate(return_routed_experts=True))}


class Recorder:
    """One server."""

    def __init__(self, url: str, model: str = "") -> None:
        self.client, self.model = httpx.AsyncClient(base_url=url, timeout=60), model

    async def call(self, method: str, path: str, body: Any, hear: Callable[[Any], None] = lambda _: None) -> Any:
        """Status and answer; a stream's answer is the list of its messages, each of which `hear` gets."""
        if body and self.model:
            body = json.loads(json.dumps(body).replace("MODEL", self.model))
        async with self.client.stream(method, path, json=body) as response:
            if not response.headers.get("content-type", "").startswith("text/event-stream"):
                text = (await response.aread()).decode()
                with suppress(ValueError):
                    return {"status": response.status_code, "answer": json.loads(text)}
                return {"status": response.status_code, "text": text}
            messages = list[Any]()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    messages.append(json.loads(line.removeprefix("data: ")))
                    hear(messages[-1])
            return {"status": response.status_code, "messages": messages}

    async def aborted(self, *, begun: bool) -> Any:
        """The end of a stream that is aborted while it runs, or at once; and a flush that is tried before it."""
        first = asyncio.Event()
        body = generate(stream=True, rid="aborted", sampling_params=ENDLESS | {"ignore_eos": True})
        stream = asyncio.create_task(self.call("POST", "/generate", body, lambda _: first.set()))
        await (first.wait() if begun else asyncio.sleep(0.01))
        held = await self.call("POST", "/flush_cache", None) if begun else None
        await self.call("POST", "/pause_generation", {"mode": "abort"})
        await self.call("POST", "/continue_generation", {})
        recorded = await stream
        recorded["messages"] = recorded["messages"][-1:]
        return recorded, held


async def record(url: str, model: str, mixture: str | None) -> dict[str, Any]:
    recorder = Recorder(url, model)
    recorded = {name: await recorder.call(*call) for name, call in CALLS.items() if "weights" not in name}
    recorded["aborted"], recorded["flush_while_one_runs"] = await recorder.aborted(begun=True)
    recorded["aborted_before_a_token"], _ = await recorder.aborted(begun=False)
    recorded |= {name: await recorder.call(*call) for name, call in CALLS.items() if "weights" in name}
    if mixture is not None:
        recorded |= {name: await Recorder(mixture).call(*call) for name, call in ROUTES.items()}
    info = recorded["server_info"]["answer"]
    recorded["server_info"]["answer"] = {name: info[name] for name in SETTINGS}
    return json.loads(json.dumps(recorded).replace(model, "MODEL"))


def main() -> None:
    url, model, *mixture = sys.argv[1:]
    recorded = asyncio.run(record(url, model, mixture[0] if mixture else None))
    FILE.parent.mkdir(exist_ok=True)
    lines = [f"{json.dumps(name)}: {json.dumps(answer)}" for name, answer in recorded.items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
