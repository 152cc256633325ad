"""An agent from outside that plays as `echo_world` does, in a module that imports no torch and no client."""

import json
from urllib.request import Request, urlopen


def play(row, base_url, api_key, model):
    """Three turns, each answered by its length; the share of even characters."""
    messages, reward = list(row["messages"]), 0.0
    for _ in range(3):
        body = json.dumps({"model": model, "messages": messages}).encode()
        headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
        with urlopen(Request(f"{base_url}/chat/completions", body, headers)) as answer:
            text = json.load(answer)["choices"][0]["message"]["content"]
        reward += sum(ord(char) % 2 == 0 for char in text) / max(1, len(text))
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": str(len(text))}]
    return reward
