"""The monitor sections: `tensorboard`, `wandb`, `comet` and `csv_monitor`; rank 0 writes to each that is enabled."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from .model import DeepSpeedConfigModel, PositiveCount, Section

__all__ = ["CSVConfig", "CometConfig", "DeepSpeedMonitorConfig", "TensorBoardConfig", "WandbConfig"]


def _empty_if_null(value: Any) -> Any:
    """DeepSpeed's documentation writes null for the working directory, its code the empty string."""
    return "" if value is None else value


_Folder = Annotated[str, BeforeValidator(_empty_if_null)]


class TensorBoardConfig(Section):
    """Event files for TensorBoard."""

    enabled: bool = Field(False, description="Whether TensorBoard event files are written.")
    output_path: _Folder = Field("", description="Parent folder; empty means the working directory.")
    job_name: str = Field("DeepSpeedJobName", description="Name of the run's folder inside output_path.")


class CSVConfig(Section):
    """One CSV file per metric."""

    enabled: bool = Field(False, description="Whether metrics are appended to CSV files.")
    output_path: _Folder = Field("", description="Parent folder; empty means the working directory.")
    job_name: str = Field("DeepSpeedJobName", description="Name of the run's folder inside output_path.")


class WandbConfig(Section):
    """Weights & Biases."""

    enabled: bool = Field(False, description="Whether metrics are sent to Weights & Biases.")
    group: str | None = Field(None, description="Group under which the run appears.")
    team: str | None = Field(None, description="Entity (team or user) that owns the run.")
    project: str | None = Field("deepspeed", description="Project that the run belongs to.")


class CometConfig(Section):
    """Comet."""

    enabled: bool = Field(False, description="Whether metrics are sent to Comet.")
    samples_log_interval: PositiveCount = Field(
        100, description="Number of training samples between two reports of the same metric."
    )
    project: str | None = Field(None, description="Project that the experiment belongs to.")
    workspace: str | None = Field(None, description="Workspace that owns the project.")
    api_key: str | None = Field(
        None, repr=False, description="Key for the service; null reads it from Comet's own settings."
    )
    experiment_name: str | None = Field(None, description="Name shown for the experiment.")
    experiment_key: str | None = Field(None, description="Identifier of the experiment, to continue one.")
    online: bool | None = Field(None, description="Whether metrics are sent live; false stores them locally.")
    mode: Literal["get", "create", "get_or_create"] | None = Field(
        None, description="Whether an experiment is continued (get), created, or whichever is possible."
    )


class DeepSpeedMonitorConfig(DeepSpeedConfigModel):
    """The four monitors together."""

    tensorboard: TensorBoardConfig = Field(
        default_factory=TensorBoardConfig, description="Event files for TensorBoard."
    )
    comet: CometConfig = Field(default_factory=CometConfig, description="Metrics sent to Comet.")
    wandb: WandbConfig = Field(default_factory=WandbConfig, description="Metrics sent to Weights & Biases.")
    csv_monitor: CSVConfig = Field(default_factory=CSVConfig, description="One CSV file per metric.")

    @property
    def enabled(self) -> bool:
        """Whether any monitor is on."""
        return any(part.enabled for part in (self.tensorboard, self.comet, self.wandb, self.csv_monitor))
