"""An application that runs by itself, and whose model is the policy of a run: it opens a session for each task that it
works on, talks to the policy by OpenAI's client, gives a reward and closes the session. See running_application.yaml.

Needs openai. The run may be stopped and resumed meanwhile: the application waits for it.
"""

import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from openai import APIConnectionError, APIStatusError, OpenAI

KEY = os.environ["PROXIMA_SESSIONS_KEY"]
WORKERS = 8
PATIENCE = 600.0  # seconds without the run after which the application ends


def asked(url: str, body: dict | None = None) -> dict:
    """The run's answer to a POST."""
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    with urlopen(Request(url, json.dumps(body or {}).encode(), headers), timeout=90) as answer:
        return json.load(answer)


def played(run: str) -> None:
    """One session, from its opening to its end."""
    session = asked(f"{run}/v1/sessions")
    row = session["row"]
    with OpenAI(base_url=session["base_url"], api_key=session["api_key"], max_retries=0) as client:
        answer = client.chat.completions.create(model=session["model"], messages=row["messages"])
    words = (answer.choices[0].message.content or "").split()
    reward = float(words[-1:] == [str(row["answer"])])
    asked(f"{run}/v1/sessions/{session['id']}/close", {"reward": reward})


def work(run: str) -> int:
    """Play sessions until the run has been away for PATIENCE; return their number."""
    done = 0
    seen = time.monotonic()
    while time.monotonic() - seen < PATIENCE:
        try:
            played(run)
            done += 1
            seen = time.monotonic()
        except (HTTPError, APIStatusError) as error:
            status = error.code if isinstance(error, HTTPError) else error.status_code
            if status in (400, 401, 403) and isinstance(error, HTTPError):
                raise SystemExit(error.read().decode()) from None
            seen = time.monotonic()  # it is there, and has no place now, or the session has ended
            time.sleep(0.2)
        except (URLError, OSError, APIConnectionError):
            time.sleep(0.5)
    return done


if __name__ == "__main__":
    address = sys.argv[1].rstrip("/")
    if len(sys.argv) > 2:
        PATIENCE = float(sys.argv[2])
    with ThreadPoolExecutor(WORKERS) as threads:
        print(f"{sum(threads.map(work, [address] * WORKERS))} sessions")
