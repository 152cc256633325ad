"""An agent that shows the model a picture, in each API."""

import base64
import io

from tests.rollout.episodes.agent_habits import Plain, user


async def play(row, base_url, api_key):
    """Two turns in each: the picture is in the first, and stays in the chat."""
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (32, 32), (row["number"] * 40, 0, 0)).save(file, "PNG")
    data = base64.b64encode(file.getvalue()).decode()
    shown = {
        "chat": {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
        "responses": {"type": "input_image", "image_url": f"data:image/png;base64,{data}"},
        "messages": {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}},
    }
    total = 0
    for api, image in shown.items():
        speaker = Plain(api, base_url, api_key)
        text = {"type": "input_text" if api == "responses" else "text", "text": "What <image> is it?"}
        chat = [user([text, image])]
        for more in ("And now?", ""):
            body = speaker.body(chat)
            first = (body.get("messages") or body["input"])[0]
            first["content"] = [text, image]
            answer = speaker.read(await speaker.answer(body))
            total += len(answer["text"])
            chat += [answer, user(more)]
    return float(total % 3)
