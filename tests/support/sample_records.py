"""Builds records of a run as they come out of the main job: digits on two one-core hosts."""

import random
from pathlib import Path

import msgspec

from stoker.figures.intervals import GpuRate, Interval
from stoker.figures.measured import gpu_loads
from stoker.figures.progress import StepProgress
from stoker.records import (
    Action,
    Advice,
    Answer,
    Check,
    Cluster,
    Constraints,
    Decision,
    EpochPause,
    EpochTimes,
    Evaluation,
    Event,
    Fix,
    Gate,
    GateResult,
    Host,
    Job,
    Measured,
    Observed,
    Performance,
    Plan,
    Predicted,
    Prices,
    Profile,
    ProfiledHost,
    Spread,
    StepCost,
    TodaysGroup,
    Training,
    TrainingSize,
    Workload,
)
from stoker.report import ReportedRun, write_report
from support import builders

BASELINE_SECONDS = 0.062
WAIT_SECONDS = 0.040
PREDICTED_SECONDS = 0.034
MEASURED_SECONDS = 0.036
USD_PER_HOST_HOUR = 0.04


def workload() -> Workload:
    return Workload(
        name="mnist",
        command=("python", "examples/mnist/train.py", "--epochs", "3"),
        cluster=Cluster(dnn=TodaysGroup(instance_type="local.c1")),
        constraints=Constraints(objective="time", max_data_hosts=4),
        training=TrainingSize(epochs=3, samples_per_epoch=8000, global_batch_size=32),
        gate=(Gate(metric="accuracy", min=0.94),),
    )


def profile() -> Profile:
    return builders.profile(
        host=ProfiledHost(instance_type="local.c1", vcpus=1, accelerators=0),
        step_seconds=BASELINE_SECONDS,
        wait_seconds=WAIT_SECONDS,
        accelerator_step_seconds=0.0214,
        loader_cpu_seconds=0.0386,
        loader_wall_seconds=0.0391,
        trainer_cpu_seconds=0.0219,
        num_workers=2,
        global_batch_size=32,
        batch_bytes=32 * 96 * 96,
        spread={
            "step_seconds": Spread(low=0.0597, high=0.0651, samples=212),
            "wait_seconds": Spread(low=0.0379, high=0.0433, samples=212),
            "accelerator_step_seconds": Spread(low=0.0209, high=0.0222, samples=240),
        },
        check=Check(predicted_step_seconds=0.0605, error=-0.0242, explained=True),
        fixes=(Fix(id="uint8", text="Send images as uint8.", saves_seconds=0.0011, cost="small"),),
        what={"command": "python examples/mnist/train.py", "seed": 7},
    )


def decision() -> Decision:
    keep = _plan("keep", data_hosts=0, step=BASELINE_SECONDS)
    chosen = _plan("heterogeneous", data_hosts=1, step=PREDICTED_SECONDS)
    tune = _plan("tune", data_hosts=0, step=0.0609)
    others = tuple(
        msgspec.structs.replace(
            _plan("heterogeneous", data_hosts=hosts, step=step),
            feasible=False,
            reason=f"needs {hosts + 1} cores, this machine has 2",
        )
        for hosts, step in ((2, 0.0247), (3, 0.0223), (4, 0.0223))
    )
    return Decision(
        bottleneck="cpu",
        action="heterogeneous",
        verdict="sure",
        plan=chosen,
        plans=(chosen, tune, keep, *others),
        path=(
            Answer(
                question="Is the CPU the limit?",
                answer="yes",
                because="the trainer waits 40.0 ms of a 62.0 ms step",
            ),
            Answer(question="Do data hosts pay?", answer="yes", because="34.0 ms a step"),
        ),
        advice=(Advice(id="offload-gpu", text="Rotate and blur on the accelerator (kornia)."),),
        warnings=("Prices are nominal: local hosts are not billed.",),
        prices=Prices(date="2026-11-20", purchase="nominal", source="stoker's local catalog"),
        objective="time",
        constraints=workload().constraints,
    )


def training() -> Training:
    return Training(
        status="succeeded",
        exit_code=0,
        groups=decision().plan.groups,
        hosts=(Host(host="algo-1", group="dnn"), Host(host="algo-2", group="data")),
        strategy="none",
        measured=Measured(
            step_seconds=MEASURED_SECONDS,
            wait_seconds=0.0116,
            compute_seconds=0.0244,
            samples_per_second=872.0,
            steps=750,
            usd_per_1000_steps=_usd(MEASURED_SECONDS, hosts=2),
            spread={"step_seconds": Spread(low=0.0338, high=0.0391, samples=750)},
            timeline_file="timeline-rank0.csv",
        ),
        metrics={"accuracy": 0.967, "loss": 0.1084},
        job=Job(platform="local", name="mnist-20261120-081500"),
        events=(
            Event(when="2026-11-20T08:15:03Z", what="data host registered", host="algo-2"),
            Event(when="2026-11-20T08:15:41Z", what="training ended, data host released"),
        ),
    )


def training_of_epochs() -> Training:
    """A run whose epochs of 42 steps begin with 0.7 s of waiting, with 3 s between them."""
    record = training()
    start, between = (
        EpochPause(seconds=seconds, low_seconds=seconds, high_seconds=seconds, count=17)
        for seconds in (0.7, 3.0)
    )
    times = EpochTimes(steps=42.0, start=start, between=between, inside_seconds=0.0)
    measured = msgspec.structs.replace(
        record.measured,
        epochs=times,
        whole_step_seconds=times.whole_step_seconds(MEASURED_SECONDS),
    )
    return msgspec.structs.replace(record, measured=measured)


def evaluation() -> Evaluation:
    return Evaluation(
        passed=True,
        gates=(GateResult(metric="accuracy", value=0.967, min=0.94, passed=True),),
        performance=Performance(
            baseline=StepCost(step_seconds=BASELINE_SECONDS, cpu_seconds=BASELINE_SECONDS),
            predicted=StepCost(step_seconds=PREDICTED_SECONDS, cpu_seconds=2 * PREDICTED_SECONDS),
            measured=StepCost(step_seconds=MEASURED_SECONDS, cpu_seconds=2 * MEASURED_SECONDS),
            prediction_error=MEASURED_SECONDS / PREDICTED_SECONDS - 1,
            speedup=BASELINE_SECONDS / MEASURED_SECONDS,
            cost_change=2 * MEASURED_SECONDS / BASELINE_SECONDS - 1,
        ),
    )


def write_page(folder: Path, **changes: object) -> str:
    """Writes the report of the whole run, or of one with changed records; returns its text."""
    records: dict[str, object] = {
        "run_id": "mnist-1",
        "workload": workload(),
        "profile": profile(),
        "decision": decision(),
        "training": training(),
        "evaluation": evaluation(),
        "before_timeline": None,
        "after_timeline": None,
        "environment": {"command": "stoker run configs/mnist.yaml", "torch": "2.13.0+cpu"},
    }
    path = folder / "report.html"
    write_report(path, ReportedRun(**(records | changes)))
    return path.read_text(encoding="utf-8")


def write_timeline(path, *, wait_seconds, compute_seconds, epochs, steps) -> Path:
    """Writes a timeline with the noise of a real one, and a validation loader between epochs."""
    noise = random.Random(7)
    lines = ["loader,epoch,batch,start_seconds,wait_seconds,compute_seconds,samples,steps"]
    now = 0.0
    for epoch in range(epochs):
        for loader, batches in ((0, steps), (1, steps // 8)):
            for batch in range(batches):
                first = 0.3 if batch == 0 and loader == 0 else 0.0
                wait = first + wait_seconds * noise.lognormvariate(0, 0.12)
                wait += 0.06 if noise.random() < 0.01 else 0.0
                compute = compute_seconds * noise.lognormvariate(0, 0.05) / (1 + loader)
                lines.append(f"{loader},{epoch},{batch},{now:.6f},{wait:.6f},{compute:.6f},32,1")
                now += wait + compute
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def write_timelines(folder: Path) -> tuple[Path, Path]:
    before, after = folder / "before.csv", folder / "after.csv"
    return (
        write_timeline(before, wait_seconds=0.040, compute_seconds=0.022, epochs=1, steps=212),
        write_timeline(after, wait_seconds=0.0116, compute_seconds=0.0244, epochs=3, steps=250),
    )


def with_gpus(folder: Path, *, seconds: int = 300) -> dict[str, object]:
    """Returns the records of a page about a GPU that was busier afterwards, and one unused."""
    found: dict[str, object] = {}
    loads = []
    for name, share in (("before", 0.28), ("intervals", 0.86)):
        rows = []
        for second in range(0, seconds, 2):
            rates = [
                GpuRate(
                    host="algo-1",
                    index=number,
                    model="NVIDIA H100 80GB HBM3",
                    utilization=share * (second >= 20) * (number == 0),
                    memory_bytes=12.5e9,
                )
                for number in range(2)
            ]
            steps = StepProgress(steps=second, step_seconds=0.1, wait_seconds=0.05)
            rows.append(
                Interval(
                    start_seconds=float(second),
                    seconds=2.0,
                    steps=steps if second >= 18 else None,
                    gpu_utilization=share * (second >= 20),
                    gpus=tuple(rates),
                )
            )
        file = folder / f"{name}.jsonl"
        file.write_bytes(msgspec.json.Encoder().encode_lines(rows))
        loads.append(gpu_loads(rows))
        if name == "intervals":
            found[name] = file
    before, after = loads
    seen = Observed(cpu_utilization=0.9, gpu_utilization=0.28, gpus=before)
    found["profile"] = msgspec.structs.replace(profile(), observed=seen)
    found["training"] = msgspec.structs.replace(training(), gpus=after)
    return found


def _usd(step_seconds: float, *, hosts: int) -> float:
    return step_seconds * 1000 / 3600 * USD_PER_HOST_HOUR * hosts


def _plan(action: Action, *, data_hosts: int, step: float) -> Plan:
    groups = [builders.group("dnn", workers_per_host=1)]
    if data_hosts:
        groups.append(builders.group("data", count=data_hosts, workers_per_host=1))
    limit, second = ("cpu", "accelerator") if data_hosts < 3 else ("accelerator", "cpu")
    usd = _usd(step, hosts=1 + data_hosts)
    return Plan(
        action=action,
        groups=tuple(groups),
        remote_share={0: 0.0, 1: 0.71}.get(data_hosts, 1.0),
        predicted=Predicted(
            step_seconds=step,
            step_seconds_low=step if action == "keep" else step * 0.9,
            step_seconds_high=step if action == "keep" else step * 1.1,
            limit=limit,
            second_limit=second,
            second_limit_seconds=0.022,
            accelerator_utilization=min(1.0, 0.0214 / step),
            usd_per_hour=USD_PER_HOST_HOUR * (1 + data_hosts),
            usd_per_1000_steps=usd,
            speedup=BASELINE_SECONDS / step,
            cost_change=usd / _usd(BASELINE_SECONDS, hosts=1) - 1,
            cpu_seconds=step * (1 + data_hosts),
        ),
    )
