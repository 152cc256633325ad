"""An environment for `test_episode_images`."""

import io

from PIL import Image

from proxima.environment.protocol import Reply


class Drawing:
    """Shows two images at the beginning, and one with each of two answers."""

    def __init__(self):
        self.turn = 0

    def reset(self, row, seed):
        self.shade = seed % 7 * 30
        return Reply(" Look: <image> and <image>.", images=[self._image(), self._image(100)])

    def _image(self, red=0):
        return Image.new("RGB", (20 + self.turn * 4, 16), (red, self.shade, self.turn * 40))

    def respond(self, text):
        self.turn += 1
        if self.turn == 1:
            return self._image()
        if self.turn == 2:
            self._image().save(file := io.BytesIO(), "PNG")
            return Reply("and the last", images=(file.getvalue(),), reward=float(len(text) % 3))
        return Reply("over", done=True)
