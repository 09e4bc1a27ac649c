"""The jobs of engines.py are an example each, on today's cluster and next to a data group."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
EXAMPLES = REPO / "examples"
HOMOGENEOUS = ("dnn=local.c1:1",)
HETEROGENEOUS = ("dnn=local.c1:1", "data=local.c1:1")
# The training's host loads, too, what the data host does not.
HYBRID = ("dnn=local.c1:1:1", "data=local.c1:1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A variant is one way to run a job.

    Attributes:
        name: In words.
        workload: File in configs/.
        command: Of the training.
        groups: As `--group`.
        data_command: Of the engine on data hosts; empty: the workload's own.
    """

    name: str
    workload: str
    command: tuple[str, ...]
    groups: tuple[str, ...]
    data_command: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job is trained in each of its variants by turns; the others are compared with the first.

    Attributes:
        part: Name for --only.
        about: In words.
        unit: What a second brings.
        module: That its interpreter has to have.
        venv: Folder of that interpreter; empty: this one's.
        install: What to do where the module is missing.
    """

    part: str
    about: str
    unit: str
    module: str
    venv: str
    install: str
    variants: tuple[Variant, ...]

    def python(self) -> str:
        """Returns the interpreter it runs under, unless another is named."""
        return str(REPO / self.venv / "bin" / "python") if self.venv else sys.executable


def jobs(*, is_quick: bool) -> tuple[Job, ...]:
    """Returns all jobs.

    Args:
        is_quick: So short that it only shows that they run.
    """
    updates = 10 if is_quick else 60
    return (
        _simulators("rl", "CartPole-v1", updates=updates),
        _simulators("rl", "Acrobot-v1", updates=updates),
        _spoken(epochs=1 if is_quick else 4, copies=1 if is_quick else 4),
        _keras(samples=512 if is_quick else 4096),
        _ray(samples=512 if is_quick else 4096),
    )


def _command(script: str, *arguments: object) -> tuple[str, ...]:
    return ("python", str(EXAMPLES / script), *map(str, arguments))


def _simulators(part: str, environment: str, *, updates: int) -> Job:
    command = _command(
        "rl_simulators/learner.py", "--environment", environment, "--updates", updates
    )
    simulator = _command(
        "rl_simulators/simulator.py",
        "--listen={address:simulator}",
        "--secret-file={secret_file}",
        "--processes={workers}",
    )

    def variant(name: str, groups: tuple[str, ...]) -> Variant:
        return Variant(
            name=name,
            workload="rl-simulators.yaml",
            command=command,
            groups=groups,
            data_command=simulator,
        )

    return Job(
        part=part,
        about=f"simulators, {environment}",
        unit="environment steps",
        module="gymnasium",
        venv=".venv-ray",
        install="make .venv-ray/.installed",
        variants=(variant("homogeneous", HOMOGENEOUS), variant("data group", HETEROGENEOUS)),
    )


def _spoken(*, epochs: int, copies: int) -> Job:
    arguments = ("--workers", 0, "--epochs", epochs, "--copies", copies)
    command = _command("spoken_digits/train.py", *arguments)
    return Job(
        part="spoken",
        about="spoken digits, Lightning, feed",
        unit="recordings",
        module="lightning",
        venv="",
        install="make setup",
        variants=_variants(
            "spoken-digits.yaml",
            command,
            {
                "homogeneous": HOMOGENEOUS,
                "data group": HETEROGENEOUS,
                "data group and a local worker": HYBRID,
            },
        ),
    )


def _keras(*, samples: int) -> Job:
    command = _command("tf_mnist/train.py", "--epochs", 2, "--samples", samples)
    return Job(
        part="tf",
        about="MNIST, Keras, tf.data service",
        unit="digits",
        module="tensorflow",
        venv=".venv-tf",
        install="make .venv-tf/.installed",
        variants=_variants(
            "mnist-tf.yaml",
            command,
            {"homogeneous": HOMOGENEOUS, "data group": HETEROGENEOUS},
        ),
    )


def _ray(*, samples: int) -> Job:
    arguments = ("--epochs", 2, "--samples", samples)
    feed = _command("mnist/train.py", "--workers", 0, *arguments)
    ray = _command("ray_digits/train.py", *arguments)
    pairs = {"homogeneous": HOMOGENEOUS, "data group": HETEROGENEOUS}
    of_feed = _variants("mnist.yaml", feed, pairs, of="DataLoader, feed")
    of_ray = _variants("mnist-ray.yaml", ray, pairs, of="Ray Data")
    return Job(
        part="ray",
        about="MNIST, PyTorch: Ray Data or the feed",
        unit="digits",
        module="ray",
        venv=".venv-ray",
        install="make .venv-ray/.installed",
        variants=(*of_feed, *of_ray),
    )


def _variants(
    workload: str, command: Sequence[str], groups: dict[str, tuple[str, ...]], *, of: str = ""
) -> tuple[Variant, ...]:
    return tuple(
        Variant(
            name=f"{of}: {name}" if of else name,
            workload=workload,
            command=tuple(command),
            groups=each,
        )
        for name, each in groups.items()
    )
