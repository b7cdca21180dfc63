"""`csvMonitor`: one CSV file per metric in `<output_path>/<job_name>`."""

from __future__ import annotations

import csv
import os
from typing import TYPE_CHECKING

from deepspeed.monitor.base import Backend, Entry, folder_of

if TYPE_CHECKING:
    from deepspeed.config.monitor import CSVConfig

__all__ = ["csvMonitor"]


class csvMonitor(Backend):
    """Rows of step and value, appended; `Train/Samples/lr` goes to `Train_Samples_lr.csv` with header `step,lr`.

    The header is written once per file, not once per run: a resumed run leaves no text between the numbers.
    """

    key = "csv_monitor"

    def __init__(self, csv_config: CSVConfig) -> None:
        self.output_path = csv_config.output_path
        self.job_name = csv_config.job_name
        self.log_dir = folder_of(self.key, self.output_path, self.job_name)
        super().__init__(csv_config)

    def _open(self) -> None:
        os.makedirs(self.log_dir, exist_ok=True)

    def _write(self, entries: list[Entry]) -> None:
        labels = dict.fromkeys(entry.label for entry in entries)
        for label in labels:
            name = label.replace("/", "_").replace(" ", "_") + ".csv"
            with open(os.path.join(self.log_dir, name), "a", newline="", encoding="utf-8") as file:
                rows = csv.writer(file)
                if file.tell() == 0:
                    rows.writerow(("step", label.rpartition("/")[2]))
                rows.writerows((entry.step, entry.value) for entry in entries if entry.label == label)

    def _close(self) -> None:
        """Every file was closed when it was written."""
