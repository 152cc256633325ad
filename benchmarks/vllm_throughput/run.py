"""Compare the tokens per second of a vLLM server through the engine with `vllm bench serve` on similar requests."""

import asyncio
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.harness import HERE, Spread, finish, need_model, parser, table

PEER = "vllm bench serve"
LOCAL = "local engine"


def questions(count: int, seed: int) -> list[str]:
    """Return texts that no prefix cache has seen: their first words differ."""
    return [
        f"Question {seed}.{i}: a train leaves at {i % 12} o'clock and covers {31 * i + seed} miles in {2 + i % 7} h. "
        "Another one follows an hour later and is faster by a third. Where do they meet, and when? Explain each step."
        for i in range(count)
    ]


class PeerBenchmark:
    """`vllm bench serve`: completions streamed over /v1/completions, without log-probs.

    Args:
        program: the server's program.
        url, key, model: of the running server.
        folder: for its files.
        running: completions at once.
        tokens: of each completion.
    """

    def __init__(
        self, program: str, url: str, key: str, model: str, folder: Path, *, running: int, tokens: int
    ) -> None:
        self.folder, self.variables = folder, os.environ | {"OPENAI_API_KEY": key, "HF_HUB_OFFLINE": "1"}
        self.command = [program, "bench", "serve", "--backend", "openai", "--base-url", url, "--model", model]
        self.command += ["--dataset-name", "custom", "--skip-chat-template", "--disable-shuffle", "--disable-tqdm"]
        self.command += ["--custom-output-len", str(tokens), "--ignore-eos", "--temperature", "1"]
        self.command += ["--max-concurrency", str(running), "--save-result", "--result-dir", str(folder)]

    def once(self, texts: Sequence[str]) -> dict[str, Any]:
        """Run the requests; return the tokens, and the seconds from the first request to the last token."""
        data, out = self.folder / "prompts.jsonl", self.folder / "result.json"
        data.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts), encoding="utf-8")
        more = ["--dataset-path", str(data), "--num-prompts", str(len(texts)), "--result-filename", out.name]
        done = subprocess.run(
            [*self.command, *more], capture_output=True, encoding="utf-8", errors="replace", env=self.variables
        )
        if done.returncode:
            message = "; ".join((done.stderr or done.stdout).strip().splitlines()[-3:])
            raise RuntimeError(f"`{PEER}` failed (it needs pandas in the server's environment): {message}")
        result = json.loads(out.read_text(encoding="utf-8"))
        return {"tokens": result["total_output_tokens"], "seconds": result["duration"], "failed": result["failed"]}


def ours(engine: Any, prompts: Sequence[Any], tokens: int) -> dict[str, Any]:
    """Run the requests through the engine, with the log-prob and the version of every token."""
    from proxima.engine.protocol import Request, Sampling

    sampling = Sampling(max_tokens=tokens)
    asked = [Request(prompt=prompt, sample=0, sampling=sampling, seed=prompt.uid) for prompt in prompts]

    async def main() -> int:
        return sum([len(completion.tokens) async for completion in engine.generate(asked)])

    start = time.perf_counter()
    return {"tokens": asyncio.run(main()), "seconds": time.perf_counter() - start, "failed": 0}


def main() -> None:
    p = parser(__doc__, repeats=3)
    p.add_argument("--executable", help="the server's program (default: that of .venv-vllm)")
    p.add_argument("--requests", type=int, default=128, help="completions of a measurement (default: %(default)s)")
    p.add_argument("--running", type=int, default=32, help="completions at once (default: %(default)s)")
    p.add_argument("--tokens", type=int, default=64, help="tokens of each completion (default: %(default)s)")
    p.add_argument("--chunks", type=int, nargs="+", default=[1, 8], help="values of chunk_tokens (default: 1 8)")
    o = p.parse_args()
    import numpy as np
    import torch

    from proxima.data.flow import Prompt
    from proxima.engine.http.vllm import Vllm
    from proxima.engine.protocol import EngineSetup
    from proxima.engine.serve.launch import Serve, find_executable
    from proxima.engine.serve.servers import start_servers
    from proxima.model.load import load

    model = str(Path(need_model(o.model)).resolve())
    loaded = load(model, dtype=torch.bfloat16, device="cpu")
    if o.executable:
        environment = None
    else:
        environment = str(HERE.parent / ".venv-vllm")
    serve = Serve(executable=o.executable, environment=environment, dtype="bfloat16", threads=1)
    program = str(find_executable(serve))
    by_engine: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        with closing(start_servers("vllm", serve, model=model, max_length=1024, log=folder / "engine.log")) as servers:
            url = servers.urls[0]
            peer = PeerBenchmark(program, url, servers.token, model, folder, running=o.running, tokens=o.tokens)
            os.environ["PROXIMA_BENCHMARK_KEY"] = servers.token
            settings = {"url": url, "token_env": "PROXIMA_BENCHMARK_KEY", "max_running": o.running, "seeded": False}
            engines = {
                f"proxima, chunk_tokens {size}": Vllm(chunk_tokens=size, **settings).build(
                    EngineSetup.of(loaded, max_length=1024)
                )
                for size in o.chunks
            }
            for engine in engines.values():
                engine.rules = endless(engine.rules)
            engines |= {LOCAL: local_engine(loaded, o.running)}
            for turn in range(o.repeats + 1):
                for number, name in enumerate((PEER, *engines)):
                    texts = questions(o.requests, 100 * turn + number)
                    if name == PEER:
                        run = peer.once(texts)
                    else:
                        ids = [loaded.tokenizer(text)["input_ids"] for text in texts]
                        prompts = [
                            Prompt(uid=i, messages=(), tokens=np.asarray(tokens, np.int32))
                            for i, tokens in enumerate(ids)
                        ]
                        run = ours(engines[name], prompts, o.tokens)
                    run["rate"] = run["tokens"] / run["seconds"]
                    print(f"  {name}: {run['rate']:.0f} tokens/s{'' if turn else ', discarded'}", flush=True)
                    if turn:
                        by_engine.setdefault(name, []).append(run)
            for name in engines.keys() - {LOCAL}:
                engines[name].close()
    report(by_engine, o)


def local_engine(loaded: Any, running: int) -> Any:
    """Return the engine in this process, on the GPU if there is one, also without stop tokens."""
    from benchmarks.side import device
    from proxima.engine.local.local_engine import Local, LocalEngine

    here = replace(loaded, model=loaded.model.to(device()))
    engine = LocalEngine(here, Local(slots=running, dtype="bfloat16"), max_length=1024)
    engine.scheduler.stop_tokens = frozenset()
    return engine


def endless(rules: Any) -> Any:
    """Remove the stop tokens, as --ignore-eos does, so that all completions have the same length."""
    return replace(rules, stop_tokens=())


def report(by_engine: dict[str, list[dict[str, Any]]], o: Any) -> None:
    """Print the table and write the result."""
    rates = {name: Spread([run["rate"] for run in runs]) for name, runs in by_engine.items()}
    base = rates[PEER].median
    whole = o.requests * o.tokens
    lost = {name: sum(run["failed"] or run["tokens"] != whole for run in runs) for name, runs in by_engine.items()}
    if any(lost.values()):
        raise RuntimeError(f"measurements without all {whole} tokens: {lost}")
    rows = [[name, rate.text(), f"{rate.median / base:.2f}"] for name, rate in rates.items()]
    print(f"\n{o.requests} completions of {o.tokens} tokens, {o.running} at once; median [min-max] of {o.repeats}\n")
    print(table(["side", "tokens/s", "ratio"], rows) + "\n")
    ratios = {name: round(rate.median / base, 3) for name, rate in rates.items() if name != PEER}
    through = [ratio for name, ratio in ratios.items() if name != LOCAL]
    result = {"claim": "vllm_throughput", "ratio": max(through), "ratios": ratios}
    result |= {"tokens_per_second": {name: rate.json() for name, rate in rates.items()}, "model": Path(o.model).name}
    kept = {name: getattr(o, name) for name in ("requests", "running", "tokens", "repeats")}
    finish(result | {"settings": kept}, o.json_out)
