"""Draws the pictures in this folder: digits as pens of many hands write them, 28 x 28 pixels.

Each digit is a few strokes, in one of several ways to write it. A picture bends their points at
random, leans, turns, stretches and shifts the whole, and draws it with a pen of another width.
Same seed, same files:

    python examples/mnist/data/draw.py FOLDER
"""

import argparse
import gzip
from pathlib import Path

import numpy as np

SIDE = 28
COUNT = 10_000
SEED = 28

# Ways to write each digit: strokes of points (x to the right, y down, 0 to 1), joined by curves.
# A stroke of two points is a straight line.
ROUND = [(0.5, 0.05), (0.22, 0.2), (0.17, 0.55), (0.32, 0.9), (0.6, 0.93), (0.8, 0.65)]
ROUND += [(0.8, 0.3), (0.62, 0.08), (0.45, 0.06)]
WAYS: dict[int, list[list[list[tuple[float, float]]]]] = {
    0: [[ROUND], [[(x * 0.7 + 0.15, y) for x, y in ROUND]]],
    1: [
        [[(0.52, 0.05), (0.48, 0.95)]],
        [[(0.3, 0.25), (0.52, 0.05)], [(0.52, 0.05), (0.5, 0.95)]],
        [[(0.32, 0.25), (0.52, 0.05)], [(0.52, 0.05), (0.5, 0.93)], [(0.28, 0.94), (0.74, 0.93)]],
    ],
    2: [
        [[(0.2, 0.25), (0.4, 0.06), (0.7, 0.12), (0.72, 0.4), (0.45, 0.68), (0.18, 0.92)],
         [(0.18, 0.92), (0.82, 0.9)]],
        [[(0.22, 0.22), (0.45, 0.05), (0.74, 0.18), (0.66, 0.5), (0.35, 0.85), (0.2, 0.86),
          (0.25, 0.72), (0.45, 0.78), (0.82, 0.93)]],
    ],
    3: [
        [[(0.22, 0.15), (0.5, 0.05), (0.74, 0.2), (0.64, 0.42), (0.42, 0.47)],
         [(0.42, 0.47), (0.72, 0.55), (0.78, 0.76), (0.55, 0.94), (0.2, 0.86)]],
        [[(0.2, 0.08), (0.76, 0.08)], [(0.76, 0.08), (0.44, 0.42)],
         [(0.44, 0.42), (0.74, 0.52), (0.78, 0.76), (0.52, 0.94), (0.2, 0.84)]],
    ],
    4: [
        [[(0.6, 0.05), (0.18, 0.62)], [(0.18, 0.62), (0.84, 0.6)], [(0.64, 0.3), (0.6, 0.95)]],
        [[(0.26, 0.06), (0.22, 0.48)], [(0.22, 0.48), (0.74, 0.48)], [(0.74, 0.06), (0.68, 0.95)]],
        [[(0.66, 0.05), (0.16, 0.66)], [(0.16, 0.66), (0.84, 0.66)], [(0.66, 0.05), (0.66, 0.95)]],
    ],
    5: [
        [[(0.76, 0.07), (0.32, 0.08)], [(0.32, 0.08), (0.28, 0.44)],
         [(0.28, 0.44), (0.58, 0.38), (0.78, 0.6), (0.66, 0.88), (0.38, 0.95), (0.18, 0.84)]],
        [[(0.78, 0.06), (0.4, 0.12), (0.3, 0.4), (0.62, 0.46), (0.74, 0.7), (0.52, 0.93),
          (0.2, 0.88)]],
    ],
    6: [
        [[(0.68, 0.06), (0.38, 0.24), (0.22, 0.6), (0.32, 0.9), (0.6, 0.94), (0.76, 0.74),
          (0.62, 0.54), (0.36, 0.58), (0.26, 0.74)]],
        [[(0.5, 0.05), (0.28, 0.4), (0.24, 0.74), (0.44, 0.95), (0.7, 0.84), (0.66, 0.6),
          (0.44, 0.56), (0.28, 0.7)]],
    ],
    7: [
        [[(0.18, 0.1), (0.8, 0.08)], [(0.8, 0.08), (0.42, 0.95)]],
        [[(0.2, 0.22), (0.2, 0.08)], [(0.2, 0.08), (0.8, 0.1)],
         [(0.8, 0.1), (0.56, 0.46), (0.42, 0.95)]],
        [[(0.18, 0.1), (0.8, 0.08)], [(0.8, 0.08), (0.42, 0.95)], [(0.34, 0.5), (0.76, 0.48)]],
    ],
    8: [
        [[(0.66, 0.14), (0.38, 0.08), (0.28, 0.28), (0.5, 0.46), (0.74, 0.66), (0.64, 0.92),
          (0.36, 0.92), (0.26, 0.7), (0.5, 0.48), (0.72, 0.28), (0.6, 0.08)]],
        [[(0.5, 0.06), (0.28, 0.16), (0.32, 0.4), (0.54, 0.44), (0.72, 0.28), (0.64, 0.08),
          (0.48, 0.06)],
         [(0.5, 0.45), (0.24, 0.6), (0.3, 0.9), (0.58, 0.95), (0.78, 0.74), (0.68, 0.5),
          (0.5, 0.45)]],
    ],
    9: [
        [[(0.72, 0.28), (0.56, 0.06), (0.3, 0.14), (0.26, 0.4), (0.5, 0.5), (0.72, 0.3)],
         [(0.74, 0.12), (0.7, 0.55), (0.6, 0.95)]],
        [[(0.72, 0.24), (0.5, 0.05), (0.26, 0.22), (0.34, 0.46), (0.62, 0.44), (0.74, 0.2),
          (0.74, 0.6), (0.58, 0.92), (0.28, 0.92)]],
    ],
}  # fmt: skip


def curve(points: np.ndarray, steps: int = 6) -> np.ndarray:
    """Returns points of a smooth curve through `points` (Catmull and Rom's), ends included."""
    if len(points) == 2:
        return points
    around = np.concatenate([2 * points[:1] - points[1:2], points, 2 * points[-1:] - points[-2:-1]])
    before, start, end, after = around[:-3], around[1:-2], around[2:-1], around[3:]
    t = np.linspace(0, 1, steps, endpoint=False)[:, None, None]
    made = 0.5 * (
        2 * start
        + (end - before) * t
        + (2 * before - 5 * start + 4 * end - after) * t**2
        + (3 * start - before - 3 * end + after) * t**3
    )
    return np.concatenate([made.transpose(1, 0, 2).reshape(-1, 2), points[-1:]])


def picture(digit: int, hand: np.random.Generator) -> np.ndarray:
    """Draws one picture of the digit, as this hand writes it now."""
    ways = WAYS[digit]
    strokes = [np.array(stroke) for stroke in ways[hand.integers(len(ways))]]
    bend = 0.045 * hand.uniform(0.5, 1.8)
    # Strokes that meet in a point bend it alike.
    moved: dict[tuple[float, float], np.ndarray] = {}
    lines = []
    for stroke in strokes:
        bent = [
            moved.setdefault((float(x), float(y)), np.array([x, y]) + hand.normal(0, bend, 2))
            for x, y in stroke
        ]
        lines.append(curve(np.array(bent)))
    turn, lean = hand.normal(0, 0.15), hand.normal(0.1, 0.2)
    wide, high = hand.uniform(0.62, 1.05), hand.uniform(0.85, 1.05)
    rotation = np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]])
    shape = rotation @ np.array([[wide, -lean * high], [0.0, high]])
    shift = SIDE / 2 + hand.normal(0, 0.7, 2)
    starts, ends = [], []
    for line in lines:
        placed = (line - 0.5) @ shape.T * 20 + shift
        starts.append(placed[:-1])
        ends.append(placed[1:])
    pen = hand.uniform(0.85, 1.75)
    return ink(np.concatenate(starts), np.concatenate(ends), pen=pen)


def ink(starts: np.ndarray, ends: np.ndarray, *, pen: float) -> np.ndarray:
    """Returns the pixels that a pen of this radius blackens between starts and ends."""
    y, x = np.mgrid[0:SIDE, 0:SIDE] + 0.5
    pixels = np.stack([x, y], axis=-1).reshape(-1, 1, 2)
    along = ends - starts
    length = np.maximum((along**2).sum(-1), 1e-9)
    share = np.clip(((pixels - starts) * along).sum(-1) / length, 0, 1)[..., None]
    distance = np.sqrt((((pixels - starts) - share * along) ** 2).sum(-1)).min(1)
    # One pixel wide, the edge goes from ink to paper.
    grey = np.clip(pen + 0.5 - distance, 0, 1)
    return np.round(255 * grey).astype(np.uint8).reshape(SIDE, SIDE)


def draw(first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Draws `count` pictures with labels; each depends on the seed and on its number alone."""
    hands = [np.random.default_rng([SEED, number]) for number in range(first, first + count)]
    labels = np.array([hand.integers(10) for hand in hands], np.uint8)
    pictures = [picture(int(label), hand) for label, hand in zip(labels, hands, strict=True)]
    return np.stack(pictures), labels


def write_idx(path: Path, values: np.ndarray) -> None:
    """Writes a gzipped IDX file of bytes, the format that MNIST comes in."""
    sizes = np.array(values.shape, ">u4").tobytes()
    content = bytes([0, 0, 8, values.ndim]) + sizes + values.tobytes()
    path.write_bytes(gzip.compress(content, 9, mtime=0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    pictures, labels = draw(0, COUNT)
    write_idx(folder / "t10k-images-idx3-ubyte.gz", pictures)
    write_idx(folder / "t10k-labels-idx1-ubyte.gz", labels)


if __name__ == "__main__":
    main()
