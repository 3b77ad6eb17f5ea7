"""The job file. Reading one returns a validated Job or raises InputError with all problems."""

from seatrial.job.job import Job
from seatrial.job.loading import job_from_text, load_job
from seatrial.job.models import model_presets
from seatrial.job.preset_files import preset_summary, preset_text, presets

__all__ = ["Job", "job_from_text", "load_job", "model_presets", "preset_summary", "preset_text", "presets"]
