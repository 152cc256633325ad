"""Agents from outside that play as `echo_world` does, in a module that imports no torch and no client."""

import json
import time
import uuid
from urllib.request import Request, urlopen


def said(*asked):
    return answered(*asked)["choices"][0]["message"]["content"]


def answered(messages, base_url, api_key, model, **more):
    body = json.dumps({"model": model, "messages": messages, **more}).encode()
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    with urlopen(Request(f"{base_url}/chat/completions", body, headers)) as answer:
        return json.load(answer)


def evenness(text):
    return sum(ord(char) % 2 == 0 for char in text) / max(1, len(text))


def play(row, base_url, api_key, model):
    """Three turns, each answered by its length; the share of even characters."""
    messages, reward = list(row["messages"]), 0.0
    for _ in range(3):
        text = said(messages, base_url, api_key, model)
        reward += evenness(text)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": str(len(text))}]
    return reward


def play_paid(row, base_url, api_key, model, set_reward):
    """As `play`, with each turn but the last paid by its id, and the last at the end."""
    messages = list(row["messages"])
    for turn in range(3):
        answer = answered(messages, base_url, api_key, model)
        text = answer["choices"][0]["message"]["content"]
        if turn == 2:
            return evenness(text)
        set_reward(answer["id"], evenness(text))
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": str(len(text))}]


def play_at(row, base_url, api_key, model):
    """As `play`, with a clock and a folder of its own in the system prompt."""
    place = {"role": "system", "content": f"It is {time.time_ns()}. Work in /tmp/{uuid.uuid4()}. Be brief."}
    return play(row | {"messages": [place, *row["messages"]]}, base_url, api_key, model)


def play_forms(row, base_url, api_key, model):
    """Two turns, the first of which must be an object; the share of even characters of both."""
    messages, policy = list(row["messages"]), (base_url, api_key, model)
    first = answered(messages, *policy, response_format={"type": "json_object"})["choices"][0]["message"]["content"]
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "go on"}]
    return evenness(first) + evenness(said(messages, *policy))


def play_roles(row, base_url, api_key, model):
    """One picks a text, and after an even one two attempts say it again; each is paid for its own characters."""
    pick = said(row["messages"], base_url, api_key, f"{model}/picker")
    rewards = {"picker": evenness(pick)}
    for attempt in range(2 if len(pick) % 2 == 0 else 0):
        player = f"sayer/{attempt}"
        rewards[player] = evenness(said([{"role": "user", "content": pick}], base_url, api_key, f"{model}/{player}"))
    return rewards
