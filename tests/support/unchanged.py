"""Scripts as users have them, which no line of stoker's is in, with what they read."""

import io
import re
import shutil
import tarfile
from dataclasses import dataclass
from pathlib import Path

import numpy

from stoker.figures.intervals import read_intervals

SCRIPTS = Path(__file__).parents[1] / "e2e" / "scripts"
EPOCHS = 4
BATCH_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A script: `loader` is the class that a profile has to name, `shards` those over all ranks."""

    name: str
    needs: str = "torch"
    launcher: tuple[str, ...] = ("python",)
    loader: str = "torch.utils.data.dataloader.DataLoader"
    shards: int | None = None
    ranks: int = 1
    epochs: int = EPOCHS

    @property
    def command(self) -> list[str]:
        return [*self.launcher, f"{self.name}.py", str(self.epochs)]

    @property
    def steps(self) -> int:
        return 24 * self.epochs

    def write(self, folder: Path, *, name: str = "") -> None:
        shutil.copy(SCRIPTS / f"{self.name}.py", folder / (name or f"{self.name}.py"))
        if self.shards:
            _write_shards(folder / "shards")


PLAIN = Script(name="plain_loop")
STREAM = Script(name="tar_stream", shards=2)


def losses(log: str) -> list[str]:
    return re.findall(r"loss (\d+\.\d+)", log)


def batches_of_data_hosts(rows: Path) -> float:
    return sum(
        host.batches_per_second * interval.seconds
        for interval in read_intervals(rows)
        for host in interval.hosts
    )


def _write_shards(folder: Path) -> None:
    """Writes four tar files of 96 samples: NAME.x.npy and NAME.y.cls, as WebDataset has them."""
    folder.mkdir()
    for shard in range(4):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for index in range(96 * shard, 96 * shard + 96):
                point = io.BytesIO()
                numpy.save(point, numpy.full(8, index % 2 - 0.5, dtype="float32"))
                for name, content in (("x.npy", point.getvalue()), ("y.cls", b"%d" % (index % 2))):
                    told = tarfile.TarInfo(f"{index:04}.{name}")
                    told.size = len(content)
                    tar.addfile(told, io.BytesIO(content))
