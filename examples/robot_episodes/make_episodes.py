"""Makes a dataset of robot episodes as LeRobot stores it: tables, and a video for each camera.

    meta/info.json                                         features, frames per second, file names
    meta/tasks.parquet, meta/stats.json                    what is done; means and deviations
    meta/episodes/chunk-000/file-000.parquet               where each episode is in table and videos
    data/chunk-000/file-000.parquet                        states and actions of all frames
    videos/observation.images.CAMERA/chunk-000/file-000.mp4

LeRobot calls that version 3.0. One file of each is enough here; large datasets have more.
"""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pyarrow as pa
from pyarrow import parquet

CAMERAS = ("top", "wrist", "side")
TASK = "Follow the waves."
FRAMES_PER_SECOND = 30
JOINTS = 6
WIDTH, HEIGHT = 320, 240
DATA_FILE = "data/chunk-000/file-000.parquet"
EPISODES_FILE = "meta/episodes/chunk-000/file-000.parquet"
VIDEO_FILE = "videos/{video_key}/chunk-000/file-000.mp4"
# LeRobot writes a key frame every second frame, so that a random frame is near one.
_FRAMES_BETWEEN_KEYS = 2
# Statistics of pictures are of so many at most, and of each second pixel.
_MAX_PICTURES = 100
_QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}


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
    episodes = [joint_angles(number, frames) for number in range(count)]
    table = table_of(episodes)
    write_data(part, table)
    write_meta(part, episodes)
    write_stats(part, table)
    for view, camera in enumerate(CAMERAS):
        file = part / VIDEO_FILE.format(video_key=video_key(camera))
        file.parent.mkdir(parents=True)
        write_video(file, table["observation.state"], view=view)
    part.rename(folder)


def video_key(camera: str) -> str:
    return f"observation.images.{camera}"


def joint_angles(episode: int, frames: int) -> np.ndarray:
    """Returns smooth angles of the joints, -1 to 1, of shape (frames, joints)."""
    random = np.random.default_rng(episode)
    phase = random.uniform(0, 2 * np.pi, JOINTS)
    speed = random.uniform(0.5, 2.0, JOINTS)
    seconds = np.arange(frames)[:, None] / FRAMES_PER_SECOND
    return np.sin(phase + speed * seconds).astype(np.float32)


def actions_of(states: np.ndarray) -> np.ndarray:
    """Returns the action of each frame: the angles of the next one."""
    return np.concatenate([states[1:], states[-1:]])


def table_of(episodes: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the columns of all frames."""
    lengths = [len(states) for states in episodes]
    frame_index = np.concatenate([np.arange(length) for length in lengths])
    num_frames = sum(lengths)
    return {
        "observation.state": np.concatenate(episodes),
        "action": np.concatenate([actions_of(states) for states in episodes]),
        "timestamp": (frame_index / FRAMES_PER_SECOND).astype(np.float32),
        "frame_index": frame_index,
        "episode_index": np.repeat(np.arange(len(episodes)), lengths),
        "index": np.arange(num_frames),
        "task_index": np.zeros(num_frames, dtype=np.int64),
    }


def write_data(folder: Path, table: Mapping[str, np.ndarray]) -> None:
    """Writes the table of all frames."""
    columns = {name: _rows(column) if column.ndim > 1 else column for name, column in table.items()}
    _write(folder / DATA_FILE, pa.table(columns))


def write_meta(folder: Path, episodes: Sequence[np.ndarray]) -> None:
    """Writes what describes the dataset."""
    ends = np.cumsum([len(states) for states in episodes]).tolist()
    rows = []
    for number, states in enumerate(episodes):
        first = ends[number] - len(states)
        row: dict[str, object] = {
            "episode_index": number,
            "tasks": [TASK],
            "length": len(states),
            "dataset_from_index": first,
            "dataset_to_index": ends[number],
            "data/chunk_index": 0,
            "data/file_index": 0,
        }
        for camera in CAMERAS:
            row |= {
                f"videos/{video_key(camera)}/chunk_index": 0,
                f"videos/{video_key(camera)}/file_index": 0,
                f"videos/{video_key(camera)}/from_timestamp": first / FRAMES_PER_SECOND,
                f"videos/{video_key(camera)}/to_timestamp": ends[number] / FRAMES_PER_SECOND,
            }
        rows.append(row)
    _write(folder / EPISODES_FILE, pa.Table.from_pylist(rows))
    # The task is the index, as pandas writes it.
    kind = {"pandas_type": "unicode", "numpy_type": "str", "metadata": None}
    columns = [{"name": "task", "field_name": "task", **kind}]
    index = {"index_columns": ["task"], "column_indexes": [], "columns": columns}
    tasks = pa.table({"task_index": [0], "task": [TASK]})
    tasks = tasks.replace_schema_metadata({"pandas": json.dumps(index)})
    _write(folder / "meta/tasks.parquet", tasks)
    (folder / "meta/info.json").write_text(json.dumps(_info(ends), indent=2))


def _info(ends: Sequence[int]) -> dict[str, object]:
    joints = {"dtype": "float32", "shape": [JOINTS], "names": [f"joint_{i}" for i in range(JOINTS)]}
    number = {"dtype": "int64", "shape": [1], "names": None}
    picture = {
        "dtype": "video",
        "shape": [HEIGHT, WIDTH, 3],
        "names": ["height", "width", "channels"],
    }
    features: dict[str, object] = {"observation.state": joints, "action": joints}
    features |= {video_key(camera): picture for camera in CAMERAS}
    features["timestamp"] = {"dtype": "float32", "shape": [1], "names": None}
    features |= dict.fromkeys(("frame_index", "episode_index", "index", "task_index"), number)
    return {
        "codebase_version": "v3.0",
        "robot_type": "drawn",
        "total_episodes": len(ends),
        "total_frames": ends[-1],
        "total_tasks": 1,
        "chunks_size": 1000,
        "data_files_size_in_mb": 100,
        "video_files_size_in_mb": 200,
        "fps": FRAMES_PER_SECOND,
        "splits": {"train": f"0:{len(ends)}"},
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
        "features": features,
    }


def _rows(values: np.ndarray) -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(values.ravel(), values.shape[1])


def write_stats(folder: Path, table: Mapping[str, np.ndarray]) -> None:
    """Writes what LeRobot normalises by: of each column, and of each camera's colours."""
    stats = {name: _stats(column.reshape(len(column), -1)) for name, column in table.items()}
    states = table["observation.state"]
    places = np.linspace(0, len(states) - 1, min(len(states), _MAX_PICTURES)).round().astype(int)
    for view, camera in enumerate(CAMERAS):
        seen = [picture[::2, ::2] for picture in pictures_of(states[places], view=view)]
        colours = _stats(np.stack(seen) / 255)
        # Each figure of a channel is that of all its rows and columns: of shape (3, 1, 1).
        of_channels = {kind: [[[each]] for each in figures] for kind, figures in colours.items()}
        stats[video_key(camera)] = of_channels | {"count": [len(places)]}
    (folder / "meta/stats.json").write_text(json.dumps(stats, indent=2))


def _stats(values: np.ndarray) -> dict[str, list[float]]:
    """Returns what is known of the numbers in each place of the last axis."""
    rows = values.reshape(-1, values.shape[-1])
    kinds = {"min": rows.min(0), "max": rows.max(0), "mean": rows.mean(0), "std": rows.std(0)}
    kinds |= {name: np.quantile(rows, share, axis=0) for name, share in _QUANTILES.items()}
    return {kind: figures.tolist() for kind, figures in kinds.items()} | {"count": [len(rows)]}


def _write(file: Path, table: pa.Table) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(table, file)


def pictures_of(states: np.ndarray, *, view: int) -> Iterator[np.ndarray]:
    """Yields what a camera sees: a table, and a gripper where two of the joints put it."""
    random = np.random.default_rng(view)
    table = random.integers(60, 190, (HEIGHT // 8, WIDTH // 8, 3), dtype=np.uint8)
    background = table.repeat(8, axis=0).repeat(8, axis=1)
    for state in states:
        picture = background.copy()
        x = round((state[view] + 1) / 2 * (WIDTH - 40))
        y = round((state[view + 1] + 1) / 2 * (HEIGHT - 40))
        picture[y : y + 40, x : x + 40] = (220, 60, 40)
        yield picture


def write_video(file: Path, states: np.ndarray, *, view: int) -> None:
    """Writes the video of a camera."""
    with av.open(str(file), "w") as container:
        stream = container.add_stream("libx264", rate=FRAMES_PER_SECOND)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        stream.time_base = Fraction(1, FRAMES_PER_SECOND)
        stream.options = {"preset": "veryfast", "crf": "23", "g": str(_FRAMES_BETWEEN_KEYS)}
        for picture in pictures_of(states, view=view):
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
