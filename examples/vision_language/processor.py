"""A processor of pictures and text, called as those of Hugging Face are.

Like Qwen-VL's: a picture keeps its shape and is resized to a whole number of patches; the text has
a placeholder for each picture, which becomes a token for each of its patches; texts are padded to
the longest. Its tokenizer knows bytes, so that nothing has to be downloaded.
"""

import re
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from PIL import Image

PATCH = 28
PATCH_NUMBERS = 3 * PATCH * PATCH
# Tokens: bytes, and four more.
PAD, PICTURE, USER, ASSISTANT = 256, 257, 258, 259
VOCABULARY = 260
_SPECIAL = {"<|image|>": PICTURE, "<|user|>": USER, "<|assistant|>": ASSISTANT}
_SPLIT = re.compile("|".join(map(re.escape, _SPECIAL)).join("()"))
_MEAN = np.array((0.481, 0.458, 0.408), np.float32)
_STD = np.array((0.269, 0.261, 0.276), np.float32)

Message = Mapping[str, object]


class Processor:
    """Makes a batch of texts and pictures: token numbers, and the patches of all pictures.

    Args:
        max_patches: Of a picture.
    """

    pad_token_id = PAD
    image_token_id = PICTURE

    def __init__(self, *, max_patches: int) -> None:
        self.max_patches = max_patches

    def apply_chat_template(self, messages: Sequence[Message]) -> str:
        """Returns a conversation as one text."""
        words = []
        for message in messages:
            words.append(f"<|{message['role']}|>")
            words += [part.get("text", "<|image|>") for part in message["content"]]
        return "".join(words)

    def __call__(
        self, *, text: Sequence[str], images: Sequence[Sequence[Image.Image]], max_length: int
    ) -> dict[str, torch.Tensor]:
        """Returns input_ids, attention_mask and pixel_values.

        Args:
            text: With a placeholder for each picture.
            images: Of each text.
            max_length: Tokens of a text; what is beyond is cut.

        Raises:
            ValueError: If pictures would be cut off.
        """
        rows: list[torch.Tensor] = []
        patches: list[np.ndarray] = []
        for words, pictures in zip(text, images, strict=True):
            of_text = [self.patches_of(picture) for picture in pictures]
            rows.append(torch.tensor(tokens_of(words, of_text, max_length=max_length)))
            patches.extend(of_text)
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)
        return {
            "input_ids": ids,
            "attention_mask": ids != PAD,
            "pixel_values": torch.from_numpy(np.concatenate(patches)),
        }

    def patches_of(self, picture: Image.Image) -> np.ndarray:
        """Returns the patches of a picture, normalised, of shape (patches, 3 * 28 * 28)."""
        columns, rows = self.grid_of(picture.width, picture.height)
        size = (columns * PATCH, rows * PATCH)
        pixels = np.asarray(picture.resize(size, Image.Resampling.BICUBIC), np.float32) / 255
        pixels = (pixels - _MEAN) / _STD
        parts = pixels.reshape(rows, PATCH, columns, PATCH, 3).transpose(0, 2, 4, 1, 3)
        return parts.reshape(rows * columns, PATCH_NUMBERS)

    def grid_of(self, width: int, height: int) -> tuple[int, int]:
        """Returns columns and rows of patches: of the picture's shape, as many as are allowed."""
        scale = (self.max_patches / (width * height)) ** 0.5
        columns = min(self.max_patches, max(1, int(width * scale)))
        rows = max(1, min(int(height * scale), self.max_patches // columns))
        return columns, rows


def tokens_of(text: str, pictures: Sequence[np.ndarray], *, max_length: int) -> list[int]:
    """Returns a text's tokens, with one for each patch of its pictures in their places."""
    left = iter(pictures)
    tokens: list[int] = []
    for words in _SPLIT.split(text):
        special = _SPECIAL.get(words)
        if special == PICTURE:
            tokens += [PICTURE] * len(next(left))
        elif special is not None:
            tokens.append(special)
        else:
            tokens += words.encode()
    if PICTURE in tokens[max_length:]:
        raise ValueError(f"the pictures of a text are beyond its {max_length} tokens")
    return tokens[:max_length]
