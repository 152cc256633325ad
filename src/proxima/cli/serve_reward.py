"""Serve a reward model over HTTP, for the reward `http` of other machines and processes.

proxima serve-reward models/reward --port 8000
proxima train quickstart reward='{kind: http, url: "http://localhost:8000/score"}'
"""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="FOLDER", help="a reward model: Hugging Face folder or hub name")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; default: this machine alone")
    parser.add_argument("--port", type=int, default=8000, help="default: 8000; 0 takes a free one")
    parser.add_argument("--normalize", action="store_true", help="scores with mean 0 and deviation 1 on held-out data")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="most tokens of prompt and completion")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1")


def run(arguments: argparse.Namespace) -> int:
    from proxima.data import UserError, require
    from proxima.reward import ModelReward
    from proxima.reward.reward_server import RewardServer
    from proxima.runtime.interrupt import quiet_transformers

    require(0 <= arguments.port <= 65535, "--port", arguments.port, "must be in [0, 65535]; 0 takes a free one")
    reward = ModelReward(
        path=arguments.model,
        encode="text",
        normalize=arguments.normalize,
        max_tokens=arguments.max_tokens,
        device=arguments.device,
    )
    with quiet_transformers():
        reward.check()
        reward.load()
    try:
        server = RewardServer(reward, (arguments.host, arguments.port))
    except OSError as error:
        reason = f"can't listen on {arguments.host}:{arguments.port}: {error.strerror or error}"
        raise UserError(reason, remedy="choose another --port") from None
    with server:
        place = f"http://{arguments.host}:{server.server_address[1]}/score"
        try:
            print(f"{arguments.model} on {place}  Ctrl-C ends it", flush=True)
            server.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0
