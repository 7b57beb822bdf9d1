"""The places of the repository that benchmarks use: shapes of models, committed results, tests."""

from pathlib import Path

from ..tools.results import BenchError

ROOT = Path(__file__).parents[3]
"""Of the repository, where the package was installed from one (`pip install -e .`)."""
MODELS = ROOT / "benchmarks" / "models"
"""Folders with the configurations of models, without weights."""
RESULTS = ROOT / "benchmarks" / "results"


def needs_repository() -> None:
    """Raises for a benchmark that cannot run from an installed wheel."""
    if not MODELS.is_dir():
        raise BenchError(
            f"this benchmark needs the repository, and {ROOT} is none: clone it, and run "
            "`pip install -e .` in it"
        )
