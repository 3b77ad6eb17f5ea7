"""`seatrial schema`: print the JSON schema of the job file."""

from __future__ import annotations

import argparse
import json

from seatrial.base.errors import EXIT_DONE
from seatrial.job.schema import JobFile


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Print the JSON schema of the job file. Editors with a TOML language server complete and check "
        "with it; --json wraps it in a document with a schema_version."
    )


def run(args: argparse.Namespace) -> int:
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **JobFile.model_json_schema(),
        "title": "Seatrial job file",
    }
    print(json.dumps({"schema_version": 1, "schema": schema} if args.json else schema, indent=2))
    return EXIT_DONE
