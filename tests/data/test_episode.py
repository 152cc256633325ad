"""Episodes as JSON: what is written is read back."""

from proxima.data import Episode, Span, ToolCall


def test_an_episode_survives_json() -> None:
    call = ToolCall(name="add", arguments={"a": 1, "b": [2.5, "\u2028\ud800"]})
    spans = (
        Span(role="assistant", tokens=5, text="x", sampled=True, reward=0.5, calls=(call,), unreadable=("no JSON",)),
        Span(role="tool", tokens=3, text="3", state="s"),
    )
    episode = Episode(spans=spans, reward=1.5, cut="turns", failure="", attempts=2, forks=1)
    assert Episode.from_json(episode.to_json()) == episode
    assert episode.turns == spans[:1]
    assert Episode.from_json(Episode(reward=None).to_json()).reward is None
