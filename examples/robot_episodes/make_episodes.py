"""Makes episodes of a robot as LeRobot stores them: a table of frames, a video for each camera."""

import shutil
from fractions import Fraction
from pathlib import Path

import av
import numpy as np

CAMERAS = ("top", "wrist", "side")
FRAMES_PER_SECOND = 30
JOINTS = 6
WIDTH, HEIGHT = 320, 240
# LeRobot writes a key frame every second frame, so that a random frame is near one.
_FRAMES_BETWEEN_KEYS = 2


def make_episodes(folder: Path, *, count: int, frames: int) -> None:
    """Makes `count` episodes, the same every time, unless `folder` is there already.

    Args:
        folder: Gets its name last: one that is there is whole.
        count: Number of episodes.
        frames: Frames of an episode, in each camera.
    """
    if folder.exists():
        return
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    for number in range(count):
        states = joint_angles(number, frames)
        np.save(part / f"episode-{number:03}.npy", states)
        for camera in CAMERAS:
            write_video(part / video_name(number, camera), states, view=CAMERAS.index(camera))
    part.rename(folder)


def video_name(episode: int, camera: str) -> str:
    return f"episode-{episode:03}-{camera}.mp4"


def joint_angles(episode: int, frames: int) -> np.ndarray:
    """Returns smooth angles of the joints, -1 to 1, of shape (frames, joints)."""
    random = np.random.default_rng(episode)
    phase = random.uniform(0, 2 * np.pi, JOINTS)
    speed = random.uniform(0.5, 2.0, JOINTS)
    seconds = np.arange(frames)[:, None] / FRAMES_PER_SECOND
    return np.sin(phase + speed * seconds).astype(np.float32)


def write_video(file: Path, states: np.ndarray, *, view: int) -> None:
    """Writes what a camera sees: a table, and a gripper where two of the joints put it."""
    random = np.random.default_rng(view)
    table = random.integers(60, 190, (HEIGHT // 8, WIDTH // 8, 3), dtype=np.uint8)
    background = table.repeat(8, axis=0).repeat(8, axis=1)
    with av.open(str(file), "w") as container:
        stream = container.add_stream("libx264", rate=FRAMES_PER_SECOND)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        stream.time_base = Fraction(1, FRAMES_PER_SECOND)
        stream.options = {"preset": "veryfast", "crf": "23", "g": str(_FRAMES_BETWEEN_KEYS)}
        for state in states:
            picture = background.copy()
            x = round((state[view] + 1) / 2 * (WIDTH - 40))
            y = round((state[view + 1] + 1) / 2 * (HEIGHT - 40))
            picture[y : y + 40, x : x + 40] = (220, 60, 40)
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
