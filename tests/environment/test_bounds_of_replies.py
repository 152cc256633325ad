"""What an environment may return at most, to the last character, byte and image, in the numbers of the errors."""

import pytest

from proxima.environment.host_process import BadAnswer, opening_of
from proxima.environment.protocol import Reply

MESSAGE = {"role": "user", "content": "Look: "}


def opening(content, images=()):
    (message,) = opening_of(Reply(content=content, images=images), {"messages": [MESSAGE]})["opening"]
    return message


@pytest.mark.slow
def test_an_image_has_at_most_32_mib():
    (image,) = opening("a", [bytes(1 << 25)])["images"]
    assert len(image) == -(-(1 << 25) // 3) * 4
    with pytest.raises(BadAnswer, match="or at most 33,554,432 bytes"):
        opening("a", [bytes((1 << 25) + 1)])


def test_a_message_has_at_most_64_images():
    assert len(opening("a", [b"x"] * 64)["images"]) == 64
    with pytest.raises(BadAnswer, match="expected a list of at most 64"):
        opening("a", [b"x"] * 65)


def test_a_message_has_at_most_a_mega_of_characters():
    assert opening("é" * (1 << 20))["content"] == "Look: " + "é" * (1 << 20)
    with pytest.raises(BadAnswer, match="a text of 1,048,577 characters; at most 1,048,576 are allowed"):
        opening("é" * ((1 << 20) + 1))
