"""Sessions: an application from outside opens, plays, rewards and closes episodes by HTTP, with a real client."""

import asyncio
import errno
from contextlib import suppress
from functools import partial
from importlib.util import find_spec

import httpx
import pytest

from proxima.data import FieldError
from proxima.engine.protocol import Request, Sampling
from proxima.environment.agents import AgentJob
from proxima.rollout.episodes.agent_player import AgentEpisodes
from proxima.rollout.episodes.conversation import TurnTemplate
from proxima.rollout.episodes.formats.chat import ChatRefused
from proxima.rollout.episodes.session_kind import Sessions
from proxima.rollout.episodes.sessions import FILE, SessionFile
from proxima.rollout.episodes.settings import EpisodeSettings
from proxima.system.jsonl import read_lines
from tests.rollout.episodes.test_agent_player import TOKENIZER, Scripted, paths_are_what_the_policy_saw, prompt
from tests.uvicorn_ticks import quick_ticks

pytestmark = pytest.mark.slow

KEY = "a-key-of-the-application-0123456789"


class Application:
    """An application in a thread of its own, by plain HTTP."""

    def __init__(self, url, key=KEY):
        self.url = url
        self.http = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=60)

    def post(self, path, body=None, **more):
        answer = self.http.post(path, json={} if body is None else body, **more)
        return answer.status_code, answer.json()

    def open(self, **body):
        status, session = self.post("/v1/sessions", {"wait": 30, **body})
        assert status == 201, session
        return session

    def says(self, session, text="Hello"):
        chat = {"messages": [{"role": "user", "content": text}]}
        headers = {"Authorization": f"Bearer {session['api_key']}"}
        return self.post("/v1/chat/completions", chat, headers=headers)

    def closes(self, session, reward=1.0, **more):
        return self.post(f"/v1/sessions/{session['id']}/close", {"reward": reward, **more})

    def plays(self, reward=1.0, **body):
        session = self.open(**body)
        assert self.says(session)[0] == 200
        status, answer = self.closes(session, reward)
        assert status == 200, answer
        return session


@quick_ticks()
def play(monkeypatch, tmp_path, application, *, uids=(3,), samples=2, settings=None, **fields):
    """The policy, and the completions that the application played, by key; what it raises is raised."""
    monkeypatch.setenv("PROXIMA_SESSIONS_KEY", KEY)
    policy = Scripted(lambda context, request: f"answer {request.turn}")
    agents = Sessions(**{"port": 0} | fields).build()
    agents.listen()
    agents.begin(tmp_path)
    url = f"http://127.0.0.1:{agents.listening.getsockname()[1]}"

    async def run():
        template = partial(TurnTemplate, TOKENIZER, {})
        limits = EpisodeSettings(**{"retries": 1, "seconds": 600} | (settings or {}))
        episodes = AgentEpisodes(policy, agents, template, limits, 2000, "hermes")
        asked = [
            Request(prompt=prompt(uid=uid), sample=i, sampling=Sampling(max_tokens=50))
            for uid in uids
            for i in range(samples)
        ]
        working = asyncio.create_task(asyncio.to_thread(application, Application(url)))
        playing = asyncio.create_task(_all(episodes, asked))
        await asyncio.wait((working, playing), return_when=asyncio.FIRST_COMPLETED)
        if working.done() and working.exception() is not None:
            playing.cancel()
            with suppress(asyncio.CancelledError):
                await playing
        made = {} if playing.cancelled() else await playing
        await working
        await episodes._endpoint.close()
        return made

    try:
        return policy, asyncio.run(run())
    finally:
        agents.close()


async def _all(episodes, asked):
    return {(c.prompt_uid, c.sample): c async for c in episodes.generate(asked)}


def test_sessions_of_a_row_are_its_group(monkeypatch, tmp_path):
    def application(app):
        app.plays(1.0)
        app.plays(0.0)

    policy, made = play(monkeypatch, tmp_path, application)
    assert [made[3, i].episode.reward for i in range(2)] == [1.0, 0.0]
    for completion in made.values():
        paths_are_what_the_policy_saw(policy, completion)
    lines = read_lines(tmp_path / FILE)
    assert [line["event"] for line in lines] == ["listening", "opened", "closed", "opened", "closed"]
    assert [(line["uid"], line["sample"]) for line in lines if line["event"] == "opened"] == [(3, 0), (3, 1)]
    assert KEY not in (tmp_path / FILE).read_text()


def test_what_is_being_stopped_takes_no_session_and_no_reward(monkeypatch, tmp_path):
    """In the same tick of the event loop: the episode is cancelled, and does not know it yet."""
    monkeypatch.setenv("PROXIMA_SESSIONS_KEY", KEY)
    agents = Sessions(port=0).build()
    agents.listen()
    agents.begin(tmp_path)

    async def played(sample):
        job = AgentJob(row={"messages": []}, base_url="", api_key="", group=1, sample=sample)
        task = asyncio.create_task(agents.play(job))
        await asyncio.sleep(0)
        return task

    async def run():
        offered = await played(0)
        offered.cancel()
        with pytest.raises(ChatRefused, match="the run wants no further episode now"):
            await agents.open(None, "", 0.0)
        begun = await played(1)
        session = await agents.open(None, "", 0.0)
        await asyncio.sleep(0)
        begun.cancel()
        with pytest.raises(ChatRefused, match="the session has just ended"):
            agents.give(session.name, 1.0, {})
        await asyncio.gather(offered, begun, return_exceptions=True)

    try:
        asyncio.run(run())
    finally:
        agents.close()
    assert not agents.sessions
    assert [line["event"] for line in read_lines(tmp_path / FILE)] == ["listening", "opened", "ended"]


@pytest.mark.skipif(find_spec("openai") is None, reason="needs openai")
def test_the_official_client(monkeypatch, tmp_path):
    from openai import AuthenticationError, OpenAI

    def application(app):
        session = app.open()
        with OpenAI(base_url=session["base_url"], api_key=session["api_key"], max_retries=0) as client:
            chat = [{"role": "user", "content": "One?"}]
            said = client.chat.completions.create(model=session["model"], messages=chat).choices[0].message.content
            chat += [{"role": "assistant", "content": said}, {"role": "user", "content": "Two?"}]
            parts = client.chat.completions.create(model=session["model"], messages=chat, stream=True)
            assert "".join(part.choices[0].delta.content or "" for part in parts) == "answer 1"
            assert client.responses.create(model="policy", input="Three?").output_text == "answer 2"
            assert app.closes(session, 0.5, parts={"form": 0.25})[0] == 200
            with pytest.raises(AuthenticationError):
                client.chat.completions.create(model=session["model"], messages=chat)

    policy, made = play(monkeypatch, tmp_path, application, samples=1)
    paths_are_what_the_policy_saw(policy, made[3, 0])
    assert made[3, 0].episode.reward == 0.5 and made[3, 0].episode.parts == {"form": 0.25}
    assert len(made[3, 0].paths) == 2


def test_groups_and_rows_that_the_application_names(monkeypatch, tmp_path):
    rows = {}

    def application(app):
        for name in ("a", "b", "a", "b"):
            rows.setdefault(name, []).append(app.plays(group=name)["row"]["row"])
        status, answer = app.post("/v1/sessions", {"group": "a", "wait": 0})
        assert (status, answer["error"]["code"]) == (409, "group_full")
        rows["seven"] = [app.plays(row=7)["row"]["row"], app.plays(row={"answer": "4"})["row"]["row"]]
        status, answer = app.post("/v1/sessions", {"row": 99, "wait": 0})
        assert (status, answer["error"]["code"]) == (503, "no_place")

    _, made = play(monkeypatch, tmp_path, application, uids=(5, 6, 7))
    assert rows == {"a": [5, 5], "b": [6, 6], "seven": [7, 7]}
    assert len(made) == 6 and all(each.episode.reward == 1.0 for each in made.values())


def test_what_is_wrong_has_its_status(monkeypatch, tmp_path):
    def application(app):
        assert app.http.get("/v1/sessions").json()["places"] == 1
        for key in ("none", "wrong", KEY + "x", KEY[:-1]):
            answer = httpx.post(f"{app.url}/v1/sessions", headers={"Authorization": f"Bearer {key}"})
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
        for content in (b"{", b"[]", b'{"rows": 1}', b'{"row": true}', b'{"group": ""}', b'{"wait": 61}', b"\xff"):
            assert app.http.post("/v1/sessions", content=content).status_code == 400, content
        assert app.http.post("/v1/sessions", content=b" " * (2 << 20)).status_code == 413
        session = app.open()
        assert app.says({"api_key": KEY})[0] == 401  # the key of the application is none of an episode
        assert app.says(session)[0] == 200
        for reward in ("NaN", "Infinity", "-Infinity", "true", '"1"', "[1]", "1e39", "9" * 400):
            body = f'{{"reward": {reward}}}'.encode()
            answer = app.http.post(f"/v1/sessions/{session['id']}/close", content=body)
            assert answer.status_code == 400, (reward, answer.text)
        assert app.closes(session, 1.0, parts={"x": True})[0] == 400
        assert app.http.get(f"/v1/sessions/{session['id']}").json()["state"] == "open"
        assert app.closes({"id": "unknown"})[0] == 404
        assert app.closes(session)[0] == 200
        status, answer = app.closes(session, 0.0)
        assert (status, answer["error"]["code"]) == (409, "session_closed")
        assert app.http.get(f"/v1/sessions/{session['id']}").json()["state"] == "closed"

    _, made = play(monkeypatch, tmp_path, application, samples=1)
    assert made[3, 0].episode.reward == 1.0


def test_a_session_that_is_left_ends_and_its_place_is_offered_again(monkeypatch, tmp_path):
    def application(app):
        left = app.open()
        again = app.open()  # waits until the other's time is over
        status, answer = app.closes(left)
        assert status == 410 and "episode.seconds" in answer["error"]["message"]
        assert app.says(again)[0] == 200 and app.closes(again)[0] == 200

    _, made = play(monkeypatch, tmp_path, application, samples=1, settings={"seconds": 0.3, "call_seconds": 0.3})
    assert made[3, 0].episode.reward == 1.0 and made[3, 0].episode.attempts == 2


def test_an_abandoned_session_is_a_failure_without_a_reward(monkeypatch, tmp_path):
    def application(app):
        for _ in range(2):  # one retry
            session = app.open()
            assert app.http.delete(f"/v1/sessions/{session['id']}").json()["state"] == "ended"
            assert app.closes(session)[0] == 410

    _, made = play(monkeypatch, tmp_path, application, samples=1)
    assert "abandoned" in made[3, 0].episode.failure and made[3, 0].episode.reward is None


def test_a_group_that_never_fills_ends(monkeypatch, tmp_path):
    def application(app):
        app.plays(group="mine")

    _, made = play(monkeypatch, tmp_path, application, samples=3, group_seconds=0.2)
    assert made[3, 0].episode.reward == 1.0
    for sample in (1, 2):
        assert "the group ended with 1 sessions" in made[3, sample].episode.failure
        assert made[3, sample].episode.attempts == 1


def test_numbers_are_bounded(monkeypatch, tmp_path):
    def application(app):
        one = app.open()
        status, answer = app.post("/v1/sessions", {"wait": 0})
        assert (status, answer["error"]["code"]) == (429, "too_many_sessions")
        codes = [app.post("/v1/sessions", {"wait": 0})[1]["error"]["code"] for _ in range(30)]
        assert codes[-1] == "rate_limit"
        app.says(one)
        app.closes(one)

    play(monkeypatch, tmp_path, application, samples=1, most_open=1, per_minute=60)


def test_a_full_disk_loses_no_session(monkeypatch, tmp_path):
    original = SessionFile.write

    def application(app):
        def full(self, event, **facts):
            raise OSError(errno.ENOSPC, "No space left on device")

        session = app.open()
        app.says(session)
        SessionFile.write = full
        try:
            status, answer = app.closes(session)
            assert status == 507 and "No space left on device" in answer["error"]["message"]
        finally:
            SessionFile.write = original
        assert app.http.get(f"/v1/sessions/{session['id']}").json()["state"] == "open"
        assert app.closes(session)[0] == 200

    _, made = play(monkeypatch, tmp_path, application, samples=1)
    assert made[3, 0].episode.reward == 1.0


def test_the_journal_after_a_kill(tmp_path):
    file = SessionFile(tmp_path / FILE)
    for name in ("one", "two", "three"):
        file.write("opened", session=name, uid=1, sample=0)
    file.write("closed", session="one", reward=1.0, parts={})
    with (tmp_path / FILE).open("a") as torn:
        torn.write('{"event": "closed", "sess')
    resumed = SessionFile(tmp_path / FILE)
    killed = ("ended", "the run was stopped before it was closed")
    assert dict(resumed.known) == {"one": ("closed", ""), "two": killed, "three": killed}
    assert [line["event"] for line in read_lines(tmp_path / FILE)] == [*["opened"] * 3, "closed", "ended", "ended"]
    assert dict(SessionFile(tmp_path / FILE).known) == dict(resumed.known)
    assert len(read_lines(tmp_path / FILE)) == 6


def test_a_line_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    file = SessionFile(tmp_path / FILE)
    file.write("opened", session="one")
    before = (tmp_path / FILE).read_bytes()
    original = type(tmp_path).open

    class Full:
        def __init__(self, inner):
            self.inner = inner

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.inner.close()

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def write(self, data):
            if len(data) < 10:
                raise OSError(errno.ENOSPC, "full")
            return self.inner.write(data[:-5])

    with monkeypatch.context() as patched:
        patched.setattr(type(tmp_path), "open", lambda self, *a, **k: Full(original(self, *a, **k)))
        with pytest.raises(OSError, match="full"):
            file.write("closed", session="one")
    assert (tmp_path / FILE).read_bytes() == before


@pytest.mark.parametrize("key", ["", "short", "has a space in the middle", "ümläute-sind-kein-ascii"])
def test_keys_that_are_refused(monkeypatch, tmp_path, key):
    monkeypatch.setenv("PROXIMA_SESSIONS_KEY", key)
    with pytest.raises(FieldError, match="key_env"):
        Sessions().key()
    (tmp_path / "key").write_text(key)
    with pytest.raises(FieldError, match="key_file"):
        Sessions(key_file=str(tmp_path / "key")).key()


def test_a_port_in_use_is_one_line(monkeypatch):
    monkeypatch.setenv("PROXIMA_SESSIONS_KEY", KEY)
    first = Sessions(port=0).build()
    first.listen()
    port = first.listening.getsockname()[1]
    try:
        with pytest.raises(FieldError, match=f"port={port}.*in use"):
            Sessions(port=port).build().listen()
    finally:
        first.close()


@pytest.mark.parametrize(
    "fields", [{"port": 65536}, {"host": ""}, {"most_open": 0}, {"per_minute": 0}, {"group_seconds": 0}, {"count": 0}]
)
def test_fields_that_are_refused(fields):
    with pytest.raises(FieldError, match=next(iter(fields))):
        Sessions(**fields)


def test_rows_of_its_own():
    rows = Sessions(count=5)
    assert [row["number"] for row in rows.rows("train", 1, 3)] == [1, 2, 3]
    with pytest.raises(FieldError, match="split"):
        rows.rows("eval", 0, None)
