"""`seatrial schema`: the JSON schema of the job file, for editors."""

from __future__ import annotations

import argparse
import json
from typing import Any

from seatrial.base.errors import EXIT_DONE
from seatrial.hardware.catalogue import gpus
from seatrial.hardware.networks import networks
from seatrial.job.models import model_presets
from seatrial.job.schema import JobFile


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Print the JSON schema of the job file. Editors with a TOML language server complete and check "
        "with it (a file's first line may name it: #:schema ./seatrial.schema.json); --json wraps it in a document with a "
        "schema_version."
    )


def run(args: argparse.Namespace) -> int:
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **JobFile.model_json_schema(),
        "title": "Seatrial job file",
    }
    names = {
        ("ModelSection", "preset"): list(model_presets()),
        ("ClusterSection", "gpu"): [name for gpu in gpus() for name in (gpu.name, *gpu.device_names)],
        ("ClusterSection", "network"): [network.name for network in networks()],
    }
    for (section, key), known in names.items():
        value: dict[str, Any] = schema["$defs"][section]["properties"][key]
        value["anyOf"][0]["enum"] = list(dict.fromkeys(known))
    print(json.dumps({"schema_version": 1, "schema": schema} if args.json else schema, indent=2))
    return EXIT_DONE
