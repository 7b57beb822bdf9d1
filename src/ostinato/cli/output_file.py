"""Files that a command writes at its end: whether it can is checked at its beginning."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import typer


def writable(context: typer.Context, option: Any, file: Path | None) -> Path | None:
    """The file, if it can be written; missing folders are made in the end."""
    if file is None:
        return None
    if file.is_dir():
        raise typer.BadParameter(f"{file} is a folder; give the name of a file in it")
    there = next(folder for folder in [file, *file.absolute().parents] if folder.exists())
    is_right = there == file or there.is_dir()
    if not is_right or not os.access(there, os.W_OK):
        raise typer.BadParameter(f"{file} cannot be written: {there} is no folder that can be written to")
    return file
