"""The job file: what is to be trained, on what, how. Reading one gives a checked Job or every problem at once."""

from seatrial.job.job import Job
from seatrial.job.loading import job_from_text, load_job
from seatrial.job.models import model_presets
from seatrial.job.preset_files import preset_summary, preset_text, presets

__all__ = ["Job", "job_from_text", "load_job", "model_presets", "preset_summary", "preset_text", "presets"]
