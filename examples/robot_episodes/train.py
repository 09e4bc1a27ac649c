"""Trains a small policy on episodes of a robot, read as LeRobot's trainer reads them.

A plain PyTorch script without a line of stoker's: `python examples/robot_episodes/train.py`. A
sample is a frame of each camera, decoded from its video by PyAV, the joints, and the next actions.
It prints LeRobot's two times: data_s, waiting for the batch, and updt_s, the rest of the step.
"""

import argparse
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

try:
    import av
    from pyarrow import parquet
except ModuleNotFoundError as err:
    raise SystemExit(
        f"this example needs {err.name}: pip install -r examples/robot_episodes/requirements.txt"
    ) from None

from make_episodes import (
    CAMERAS,
    DATA_FILE,
    EPISODES_FILE,
    FRAMES_PER_SECOND,
    JOINTS,
    make_episodes,
    video_key,
)
from policy import Policy

# Actions that are predicted at once, as by ACT: LeRobot makes delta_timestamps of it.
CHUNK = 20
# Of LeRobot: how far a frame may be from the time that is wanted.
TOLERANCE_SECONDS = 1e-3

Sample = dict[str, torch.Tensor | str]
Batch = dict[str, torch.Tensor]


class Episodes(Dataset):
    """What LeRobotDataset is: the frames of all episodes, and for some features a window of frames.

    Args:
        root: Folder with meta, data and videos, in LeRobot's version 3.0.
        delta_timestamps: Seconds from a sample's own frame, by feature: 0.0 is that frame. Those
            beyond an episode are its first or last frame; `FEATURE_is_pad` says so.
        cameras: Features that are videos.
    """

    def __init__(
        self,
        root: Path,
        *,
        delta_timestamps: Mapping[str, Sequence[float]],
        cameras: Sequence[str],
    ) -> None:
        info = json.loads((root / "meta/info.json").read_text())
        self.root = root
        self.fps = info["fps"]
        self.video_path = info["video_path"]
        self.cameras = tuple(cameras)
        self.deltas = {
            feature: np.array([round(each * self.fps) for each in seconds])
            for feature, seconds in delta_timestamps.items()
        }
        table = parquet.read_table(root / DATA_FILE)
        self.columns = {name: _tensor(table.column(name)) for name in table.column_names}
        self.episodes = parquet.read_table(root / EPISODES_FILE).to_pylist()

    def __len__(self) -> int:
        return len(self.columns["index"])

    def __getitem__(self, index: int) -> Sample:
        sample: Sample = {name: column[index] for name, column in self.columns.items()}
        episode = self.episodes[int(self.columns["episode_index"][index])]
        windows = {}
        for feature, deltas in self.deltas.items():
            wanted = index + deltas
            first, last = episode["dataset_from_index"], episode["dataset_to_index"] - 1
            windows[feature] = np.clip(wanted, first, last)
            sample[f"{feature}_is_pad"] = torch.from_numpy(wanted != windows[feature])
        for feature, window in windows.items():
            if feature not in self.cameras:
                sample[feature] = self.columns[feature][window]
        for camera in self.cameras:
            window = windows.get(camera, np.array([index]))
            frames = (window - episode["dataset_from_index"]) / self.fps
            begin = episode[f"videos/{camera}/from_timestamp"]
            sample[camera] = decoded(self._video(episode, camera), frames + begin).squeeze(0)
        sample["task"] = episode["tasks"][0]
        return sample

    def _video(self, episode: Mapping[str, object], camera: str) -> Path:
        places = {
            part: episode[f"videos/{camera}/{part}"] for part in ("chunk_index", "file_index")
        }
        return self.root / self.video_path.format(video_key=camera, **places)


def _tensor(column: object) -> torch.Tensor:
    values = column.to_numpy()
    return torch.from_numpy(np.stack(values) if values.dtype == object else values.copy())


def decoded(file: Path, timestamps: np.ndarray) -> torch.Tensor:
    """Returns the frames of a video at some times, as uint8 of shape (times, 3, height, width).

    Raises:
        ValueError: If the video has no frame there.
    """
    last = timestamps.max() - TOLERANCE_SECONDS
    times, pictures = [], []
    with av.open(str(file)) as container:
        # One thread: as many samples are decoded at once as there are workers.
        stream = container.streams.video[0]
        stream.thread_count = 1
        # To the key frame before.
        container.seek(round(timestamps.min() / stream.time_base), stream=stream)
        for frame in container.decode(stream):
            if frame.time > timestamps.min() - TOLERANCE_SECONDS:
                times.append(frame.time)
                pictures.append(frame.to_ndarray(format="rgb24"))
            if frame.time > last:
                break
    if not times:
        raise ValueError(f"{file} has no frame at {timestamps.min():.3f} s")
    misses = np.abs(timestamps[:, None] - np.array(times))
    nearest = misses.argmin(1)
    for seconds, miss in zip(timestamps, misses.min(1), strict=True):
        if miss > TOLERANCE_SECONDS:
            raise ValueError(f"{file} has no frame at {seconds:.3f} s")
    return torch.from_numpy(np.stack([pictures[i] for i in nearest])).permute(0, 3, 1, 2)


def endless(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Yields batches of one epoch after the other, as LeRobot's `cycle`."""
    while True:
        yield from batches


def to_device(batch: Mapping[str, object], device: torch.device) -> Batch:
    """Returns the tensors of a batch there; this policy needs no words of the task."""
    return {
        name: value.to(device, non_blocking=True)
        for name, value in batch.items()
        if isinstance(value, torch.Tensor)
    }


def loss_of(policy: Policy, batch: Batch, cameras: Sequence[str]) -> torch.Tensor:
    """Returns the mean distance to the actions that the episode has."""
    pictures = torch.stack([batch[camera] for camera in cameras], dim=1)
    actions = policy(pictures.float() / 255, batch["observation.state"])
    distances = nn.functional.l1_loss(actions, batch["action"], reduction="none")
    return (distances * ~batch["action_is_pad"][..., None]).mean()


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    has_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description="Trains a policy on episodes of a robot.")
    parser.add_argument("--data", type=Path, help="folder of episodes; default: made in .cache")
    parser.add_argument("--episodes", type=int, default=8, help="that are made")
    parser.add_argument("--frames", type=int, default=60, help="of an episode that is made")
    parser.add_argument("--cameras", type=int, default=3, choices=(1, 2, 3))
    parser.add_argument("--device", default="cuda" if has_gpu else "cpu")
    parser.add_argument("--width", type=int, default=512 if has_gpu else 64, help="of the policy")
    parser.add_argument("--batch-size", type=int, default=64 if has_gpu else 8)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--log-freq", type=int, default=50, help="steps of a printed line")
    parser.add_argument("--workers", type=int, default=4, help="loader workers")
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--record", type=Path, help="write seconds and losses to this JSON file")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    name = f"robot-{options.episodes}-{options.frames}"
    folder = options.data or Path(".cache") / name
    make_episodes(folder, count=options.episodes, frames=options.frames)
    torch.manual_seed(options.seed)
    device = torch.device(options.device)
    cameras = [video_key(camera) for camera in CAMERAS[: options.cameras]]
    chunk = [number / FRAMES_PER_SECOND for number in range(CHUNK)]
    dataset = Episodes(folder, delta_timestamps={"action": chunk}, cameras=cameras)
    if len(dataset) < options.batch_size:
        least = f"--batch-size {options.batch_size}"
        raise SystemExit(f"{folder} has {len(dataset)} frames: fewer than {least}")
    loader = DataLoader(
        dataset,
        batch_size=options.batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=options.workers,
        pin_memory=device.type == "cuda",
    )
    policy = Policy(joints=JOINTS, chunk=CHUNK, width=options.width).to(device)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4)
    batches = endless(loader)
    losses: list[float] = []
    data_seconds: list[float] = []
    update_seconds: list[float] = []
    began = time.perf_counter()
    for step in range(1, options.steps + 1):
        asked = time.perf_counter()
        batch = to_device(next(batches), device)
        received = time.perf_counter()
        loss = loss_of(policy, batch, cameras)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 10.0)
        optimizer.step()
        # LeRobot reads the loss in each step, which waits for the device.
        losses.append(loss.item())
        data_seconds.append(received - asked)
        update_seconds.append(time.perf_counter() - received)
        if step % options.log_freq == 0 or step == options.steps:
            print(
                f"step:{step} loss:{np.mean(losses[-options.log_freq :]):.3f}"
                f" updt_s:{np.mean(update_seconds[-options.log_freq :]):.3f}"
                f" data_s:{np.mean(data_seconds[-options.log_freq :]):.3f}",
                flush=True,
            )
    if options.record:
        record = {
            "seconds": time.perf_counter() - began,
            "steps": len(losses),
            "losses": [loss.hex() for loss in losses],
            "data_s": float(np.mean(data_seconds)),
            "updt_s": float(np.mean(update_seconds)),
        }
        options.record.write_text(json.dumps(record))


if __name__ == "__main__":
    main()
