"""Trains a small policy on episodes of a robot, read as LeRobot's trainer reads them.

A plain PyTorch script without a line of stoker's: `python examples/robot_episodes/train.py`. A
sample is a frame of each camera, decoded from its video by PyAV, the joints, and the next actions.
It prints LeRobot's two times: data_s, waiting for the batch, and updt_s, the rest of the step.
"""

import argparse
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

try:
    import av
except ModuleNotFoundError:
    raise SystemExit(
        "this example needs PyAV: pip install -r examples/robot_episodes/requirements.txt"
    ) from None

from make_episodes import CAMERAS, FRAMES_PER_SECOND, JOINTS, make_episodes, video_name
from policy import Policy

CHUNK = 20

Sample = dict[str, torch.Tensor]
Batch = dict[str, torch.Tensor]


class Episodes(Dataset):
    """Frames of all episodes; a frame's pictures are decoded when it is read."""

    def __init__(self, folder: Path, *, cameras: Sequence[str], chunk: int) -> None:
        self.folder = folder
        self.cameras = tuple(cameras)
        self.chunk = chunk
        self.states = [np.load(file) for file in sorted(folder.glob("episode-*.npy"))]
        self.frames = [
            (episode, frame)
            for episode, states in enumerate(self.states)
            for frame in range(len(states))
        ]

    def __len__(self) -> int:
        return len(self.frames)

    def __getitem__(self, index: int) -> Sample:
        episode, frame = self.frames[index]
        states = self.states[episode]
        wanted = np.arange(frame + 1, frame + 1 + self.chunk)
        sample = {
            "observation.state": torch.from_numpy(states[frame]),
            "action": torch.from_numpy(states[np.minimum(wanted, len(states) - 1)]),
            "action_is_pad": torch.from_numpy(wanted >= len(states)),
        }
        for camera in self.cameras:
            file = self.folder / video_name(episode, camera)
            sample[f"observation.images.{camera}"] = decoded(file, frame / FRAMES_PER_SECOND)
        return sample


def decoded(file: Path, seconds: float) -> torch.Tensor:
    """Returns the frame of a video at a time, as uint8 of shape (3, height, width).

    Raises:
        ValueError: If the video ends before.
    """
    tolerance = 0.5 / FRAMES_PER_SECOND
    with av.open(str(file)) as container:
        # One thread: as many samples are decoded at once as there are workers.
        stream = container.streams.video[0]
        stream.thread_count = 1
        container.seek(round(seconds / stream.time_base), stream=stream)
        for frame in container.decode(stream):
            if frame.time > seconds - tolerance:
                return torch.from_numpy(frame.to_ndarray(format="rgb24")).permute(2, 0, 1)
    raise ValueError(f"{file} has no frame at {seconds:.3f} s")


def endless(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Yields batches of one epoch after the other, as LeRobot's `cycle`."""
    while True:
        yield from batches


def to_device(batch: Batch, device: torch.device) -> Batch:
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}


def loss_of(policy: Policy, batch: Batch, cameras: Sequence[str]) -> torch.Tensor:
    """Returns the mean distance to the actions that the episode has."""
    pictures = torch.stack([batch[f"observation.images.{camera}"] for camera in cameras], dim=1)
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
    cameras = CAMERAS[: options.cameras]
    dataset = Episodes(folder, cameras=cameras, chunk=CHUNK)
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
