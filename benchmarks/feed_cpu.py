"""Measures CPU time of the trainer's process per GB that it takes, at three sizes of batches."""

from collections.abc import Iterator

from cases import Case
from decryption import decryption_cpu_seconds
from measuring import can_import, rotated, say, spread, trained
from rows import Comparison, Row, alone, times

LOADERS = ("raw", "stoker encrypted", "torch local")
# Name, the module it needs, and how it comes.
OTHERS = {
    "grpc raw": ("grpc", "grpcio"),
    "grpc protobuf": ("grpc", "grpcio"),
    "ray": ("ray, psutil", "'ray[data]' psutil"),
}
# Images of 0.15 MB a batch: 0.6, 4.8 and 19 MB.
SIZES = {4: "0.6 MB", 32: "4.8 MB", 128: "19 MB"}
_MEASURED_IMAGES = 4800
_FIGURE = "CPU-s/GB"


def rows(*, repetitions: int, is_quick: bool, python: str) -> Iterator[Row]:
    """Returns the rows of all sizes.

    Args:
        python: Interpreter that has gRPC and Ray.
    """
    missing = {
        name: f"not installed: pip install {package}"
        for name, (module, package) in OTHERS.items()
        if not can_import(module, python)
    }
    loaders = (*LOADERS, *(name for name in OTHERS if name not in missing))
    seen: dict[tuple[int, str], list[dict[str, float]]] = {}
    decryption: dict[int, list[float]] = {}
    turn = 0
    for _ in range(repetitions):
        for size in SIZES:
            steps = _MEASURED_IMAGES // size // (3 if is_quick else 1)
            case = Case(
                workers=2,
                batch_size=size,
                warmup=max(10, steps // 3),
                steps=steps,
                step_seconds=0.0,
                cost_seconds=0.0,
            )
            for loader in rotated(loaders, turn):
                found = trained(loader, case, python=python)
                say(f"cpu {SIZES[size]} {loader}: {found['cpu_seconds_per_gb']:.2f} CPU-s/GB")
                seen.setdefault((size, loader), []).append(found)
            decryption.setdefault(size, []).append(decryption_cpu_seconds(case.batch_bytes))
            turn += 1
    for size in SIZES:
        raw = _cpu(seen[size, "raw"])
        floor = [cpu + each for cpu, each in zip(raw, decryption[size], strict=True)]
        for loader in loaders:
            yield _row(size, loader, seen[size, loader], raw=raw, decrypted=floor)
        yield Row(
            part="cpu",
            case=_case(size),
            loader="raw + AES-GCM",
            figure=_FIGURE,
            value=spread(floor),
            comparisons=(times(floor, raw, beside="raw"),),
            note=f"{spread(decryption[size])['median']:.2f} of it the decryption",
        )
        for name, note in missing.items():
            yield Row(
                part="cpu", case=_case(size), loader=name, figure=_FIGURE, value=None, note=note
            )


def _cpu(found: list[dict[str, float]]) -> list[float]:
    return [each["cpu_seconds_per_gb"] for each in found]


def _row(
    size: int,
    loader: str,
    mine: list[dict[str, float]],
    *,
    raw: list[float],
    decrypted: list[float],
) -> Row:
    cpu = _cpu(mine)
    comparisons: list[Comparison] = []
    if loader != "raw":
        comparisons.append(times(cpu, raw, beside="raw"))
    if loader == "stoker encrypted":
        comparisons.append(times(cpu, decrypted, beside="raw + AES-GCM"))
        comparisons.append(alone(cpu, at_most=0.35 if size == 32 else 0.7))
    speed = spread([found["megabytes_per_second"] for found in mine])
    note = f"{speed['median']:.0f} MB/s"
    details: dict[str, object] = {"batch_size": size, "megabytes_per_second": speed}
    if loader == "ray":
        beside = spread([found["cpu_seconds_per_gb_beside"] for found in mine])
        details["cpu_seconds_per_gb_of_raylet"] = beside
        note += f"; and {beside['median']:.2f} in the raylet that receives"
    return Row(
        part="cpu",
        case=_case(size),
        loader=loader,
        figure=_FIGURE,
        value=spread(cpu),
        comparisons=tuple(comparisons),
        details=details,
        note=note,
    )


def _case(size: int) -> str:
    return f"flat out, batches of {SIZES[size]}, k=2"
