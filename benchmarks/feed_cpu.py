"""Measures CPU time of the trainer's process per GB that it takes, at three sizes of batches."""

import multiprocessing
import os
import time
from collections.abc import Iterator

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from cases import Case
from measuring import Comparison, Row, alone, can_import, rotated, say, spread, times, trained
from stoker.feed.engine.records import KEY_BYTES, TAG_BYTES, records

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
_FLAT_STEPS = 600
_FIGURE = "CPU-s/GB"
_NONCE = bytes(12)
_BATCHES_BYTES = 100_000_000


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


def flat_rows(*, repetitions: int, is_quick: bool) -> Iterator[Row]:
    """Returns one row for each loader: one worker, no pauses, batches of 4.8 MB."""
    steps = _FLAT_STEPS // (3 if is_quick else 1)
    case = Case(
        workers=1, batch_size=32, warmup=50, steps=steps, step_seconds=0.0, cost_seconds=0.0
    )
    seen: dict[str, list[dict[str, float]]] = {}
    for turn in range(repetitions):
        for loader in rotated(LOADERS, turn):
            found = trained(loader, case)
            cpu, speed = found["cpu_seconds_per_gb"], found["megabytes_per_second"]
            say(f"flat {loader}: {speed:.0f} MB/s, {cpu:.2f} CPU-s/GB")
            seen.setdefault(loader, []).append(found)
    for loader, found in seen.items():
        for figure, name in (("MB/s", "megabytes_per_second"), (_FIGURE, "cpu_seconds_per_gb")):
            mine, raw = ([each[name] for each in which] for which in (found, seen["raw"]))
            yield Row(
                part="flat",
                case="1 worker, batches of 4.8 MB",
                loader=loader,
                figure=figure,
                value=spread(mine),
                comparisons=() if loader == "raw" else (times(mine, raw, beside="raw"),),
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


def decryption_cpu_seconds(nbytes: int) -> float:
    """Returns CPU-seconds per GB of batches of `nbytes`, decrypted in records of the feed's size.

    A feed that encrypts cannot leave this out.

    Another process encrypts meanwhile, as a data host on this machine does: two cores that are
    threads of one are slower when both are busy.
    """
    cipher = AESGCM(bytes(KEY_BYTES))
    sizes = [end - start for start, end in records(nbytes)]
    sealed = {size: cipher.encrypt(_NONCE, bytes(size), None) for size in sizes}
    plain = memoryview(bytearray(sizes[0]))
    beside = multiprocessing.get_context("fork").Process(target=_encrypt, args=(sizes[0],))
    beside.start()
    try:
        count = max(1, _BATCHES_BYTES // nbytes)
        begun = time.thread_time()
        for _ in range(count):
            for size in sizes:
                cipher.decrypt_into(_NONCE, sealed[size], None, plain[:size])
        return (time.thread_time() - begun) / (count * nbytes / 1e9)
    finally:
        beside.kill()
        beside.join()


def _encrypt(nbytes: int) -> None:
    cipher, parent = AESGCM(bytes(KEY_BYTES)), os.getppid()
    plain, sealed = bytes(nbytes), bytearray(nbytes + TAG_BYTES)
    while os.getppid() == parent:
        cipher.encrypt_into(_NONCE, plain, None, sealed)
