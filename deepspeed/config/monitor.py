"""The sections that watch a training: monitors, `comms_logger`, profilers, `timers` and `hangs`."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from annotated_types import Ge
from pydantic import AfterValidator, BeforeValidator

from .model import ConfigModel, Count, Folder, Lower, Names, NoEffect, Number, PositiveCount, Section, Whole, key

# DeepSpeed's documentation writes null for the working directory, its code the empty string.
_Folder = Annotated[str, BeforeValidator(lambda value: "" if value is None else value)]


class TensorBoardConfig(Section):
    """Event files for TensorBoard."""

    enabled: bool = key(False, "Whether TensorBoard event files are written.")
    output_path: _Folder = key("", "Parent folder; empty means the working directory.")
    job_name: str = key("DeepSpeedJobName", "Name of the run's folder inside output_path.")


class CSVConfig(TensorBoardConfig):
    """One CSV file per metric."""

    enabled: bool = key(False, "Whether metrics are appended to CSV files.")


class WandbConfig(Section):
    """Weights & Biases."""

    enabled: bool = key(False, "Whether metrics are sent to Weights & Biases.")
    group: str | None = key(None, "Group under which the run appears.")
    team: str | None = key(None, "Entity (team or user) that owns the run.")
    project: str | None = key("deepspeed", "Project that the run belongs to.")


class CometConfig(Section):
    """Comet."""

    enabled: bool = key(False, "Whether metrics are sent to Comet.")
    samples_log_interval: PositiveCount = key(100, "Number of training samples between two reports of the same metric.")
    project: str | None = key(None, "Project that the experiment belongs to.")
    workspace: str | None = key(None, "Workspace that owns the project.")
    api_key: str | None = key(None, "Key for the service; null reads it from Comet's own settings.", repr=False)
    experiment_name: str | None = key(None, "Name shown for the experiment.")
    experiment_key: str | None = key(None, "Identifier of the experiment, to continue one.")
    online: bool | None = key(None, "Whether metrics are sent live; false stores them locally.")
    mode: Literal["get", "create", "get_or_create"] | None = key(
        None, "Whether an experiment is continued (get), created, or whichever is possible."
    )


class DeepSpeedMonitorConfig(ConfigModel):
    """The four monitors together."""

    tensorboard: TensorBoardConfig = key(TensorBoardConfig, "Event files for TensorBoard.")
    comet: CometConfig = key(CometConfig, "Metrics sent to Comet.")
    wandb: WandbConfig = key(WandbConfig, "Metrics sent to Weights & Biases.")
    csv_monitor: CSVConfig = key(CSVConfig, "One CSV file per metric.")

    @property
    def enabled(self) -> bool:
        return any(part.enabled for part in (self.tensorboard, self.comet, self.wandb, self.csv_monitor))


class CommsLoggerConfig(Section):
    """Sizes, counts, latency and bandwidth of collectives."""

    enabled: bool = key(False, "Whether collectives are recorded; each is then synchronised.")
    prof_all: bool = key(True, "Whether every operation is recorded, rather than those of prof_ops.")
    prof_ops: Names = key([], "Names of the operations that are recorded when prof_all is false.")
    verbose: bool = key(False, "Whether each operation is logged when it happens.")
    debug: bool = key(False, "Whether the name of the caller is added to the operation's name.")


class CommsConfig(ConfigModel):
    """Everything in the config that concerns the recording of communication."""

    comms_logger: CommsLoggerConfig = key(CommsLoggerConfig, "Sizes, counts, latency and bandwidth of collectives.")

    @property
    def comms_logger_enabled(self) -> bool:
        """Whether collectives are recorded."""
        return self.comms_logger.enabled


class FlopsProfilerConfig(Section):
    """Floating-point operations, parameters and latency per module, measured in one step."""

    enabled: bool = key(False, "Whether rank 0 profiles one step; this also turns on wall_clock_breakdown.")
    recompute_fwd_factor: Annotated[Number, Ge(0)] = key(
        0.0, "Share of forward that backward repeats; backward counts as 2 plus this times forward."
    )
    profile_step: Count = key(1, "Number of the optimizer step that is profiled.")
    module_depth: Annotated[Whole, Ge(-1)] = key(
        -1, "Depth of the module tree for which totals are shown; -1 is the deepest."
    )
    top_modules: PositiveCount = key(1, "Number of modules listed per depth.")
    detailed: bool = key(True, "Whether the profile of every single module is shown.")
    output_file: str | None = key(None, "File that receives the report; null is standard output.")


class MemoryProfilerConfig(Section):
    """Memory by kind when one step needs most of it, and the module that was running."""

    enabled: bool = key(False, "Whether rank 0 profiles one step.")
    profile_step: Count = key(1, "Number of the optimizer step that is profiled.")
    top_modules: PositiveCount = key(10, "Number of modules listed whose activations were alive.")
    output_file: str | None = key(None, "File that receives the report; null is standard output.")


class ThroughputTimerConfig(Section):
    """Samples per second, reported every steps_per_print steps."""

    enabled: bool = key(True, "Whether throughput is measured.")
    synchronized: bool = key(
        True,
        "Whether the device is synchronised around each measurement.",
        NoEffect(
            "steps_per_print is not given, so that no throughput is measured",
            lambda c: c.steps_per_print in (None, math.inf),
        ),
    )


class TimersConfig(Section):
    """Timers that run during training."""

    throughput: ThroughputTimerConfig = key(ThroughputTimerConfig, "Measurement of samples per second.")


class EventsConfig(Section):
    """What happens in training as lines of JSON, one file per rank."""

    file: Folder = key(
        None, "Path without the rank: rank 3 appends to FILE.rank00003.jsonl; null: DS_EVENTS has it, or nothing."
    )
    every: PositiveCount = key(1, "Number of optimizer steps between two records of a step.")
    max_file_bytes: Annotated[Count, Ge(1 << 16)] = key(
        64 << 20, "Size at which a file is put aside and a new one begins."
    )
    max_files: Annotated[Count, Ge(2)] = key(8, "Number of files kept per rank; the oldest go.")


def _two_steps(value: list[int]) -> list[int]:
    if value and (len(value) != 2 or value[0] > value[1]):
        raise ValueError(f"found {value}; give the first and the last step, such as [10, 12]")
    return value


class TraceConfig(Section):
    """Traces of torch's profiler over a few steps, merged over ranks."""

    steps: Annotated[list[Count], AfterValidator(_two_steps)] = key(
        [], "First and last optimizer step that are traced, counted from 0; empty: none."
    )
    ranks: list[Count] = key([0], "Ranks that are traced.")
    folder: str = key("traces", "Where each rank's trace and the merged one are written.")
    memory: bool = key(True, "Whether the trace has a timeline of memory.")
    stack: bool = key(False, "Whether operations tell the line of Python that called them.")


class HangsConfig(Section):
    """Who keeps the others waiting is found out when a collective does not complete; times are in seconds."""

    enabled: bool = key(True, "Whether ranks report to each other where they are when a collective hangs.")
    timeout: float | None = key(
        None,
        "How long a collective may take, in every process group; null leaves what each was made with.",
        gt=0,
        allow_inf_nan=False,
    )
    warn_after: float | None = key(
        None,
        "After how long a slow rank is warned of; null is a minute, or half of a shorter timeout.",
        gt=0,
        allow_inf_nan=False,
    )
    patience: float = key(3.0, "How long other ranks get to report where they are.", gt=0, allow_inf_nan=False)
    folder: Folder = key(None, "Where stacks of hanging ranks are written; null is the folder for temporary files.")


class VerifyConfig(Section):
    """Checks of running training: copies that must be equal, and sampled updates that are computed a second time."""

    every: PositiveCount | None = key(None, "Number of optimizer steps between two checks; null is no checks.")
    parameters: Count = key(2, "Number of parameters whose update is computed again in a check; others in each.")
    replay: Folder = key(None, "Where a step with a difference is recorded for `deepspeed.replay`; null records none.")
    action: Annotated[Literal["warn", "stop", "save"], Lower] = key(
        "warn",
        "What follows a difference: a warning and a record (`warn`), an error on all ranks (`stop`), or a record and "
        "an error (`save`).",
    )
