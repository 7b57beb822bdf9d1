"""What Ostinato is made of: locked, audited, listed.

    python requirements/supply_chain.py lock [--upgrade]   writes ci.txt: versions and hashes (needs `uv`)
    python requirements/supply_chain.py audit              known vulnerabilities of what is locked
    python requirements/supply_chain.py sbom FILE          a CycloneDX list of what is installed
    python requirements/supply_chain.py licences           writes docs/licences.md, where ci.txt is installed

`audit` asks PyPI. It fails for a vulnerability that `accepted.toml` does not list with a reason and a date
until which that holds; without an answer from PyPI it says so and passes.
"""

import argparse
import datetime
import email.message
import json
import re
import subprocess
import sys
import tomllib
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

HERE = Path(__file__).parent
LOCK, TORCH, ACCEPTED = HERE / "ci.txt", HERE / "torch.txt", HERE / "accepted.toml"
LICENCES = HERE.parent / "docs" / "licences.md"
OWN = "ostinato"
SERVICE = "https://pypi.org/pypi/{name}/{version}/json"
SECONDS = 10
_PINNED = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", re.MULTILINE)
DENIED = re.compile(
    r"AGPL|(?<!L)GPL-?v?[23]|(?<!Lesser )General Public License|SSPL|Server Side Public|BUSL|Business Source"
    r"|Elastic|Commons Clause|Non-?Commercial|CC-BY-NC",
    re.IGNORECASE,
)
"""Licences under which Ostinato takes nothing: they would bind who serves it, or forbid a use."""


# -- the lock ----------------------------------------------------------------------------------------


def locked() -> dict[str, str]:
    """Returns the version of every locked package."""
    return {
        str(canonicalize_name(name)): version
        for file in (LOCK, TORCH)
        for name, version in _PINNED.findall(file.read_text())
    }


def lock(upgrade: bool) -> int:
    """Resolves the development dependencies, with the hashes of every file of each version."""
    command = [
        *("uv", "pip", "compile", "pyproject.toml", "--extra", "dev", "--universal", "--generate-hashes"),
        *("--python-version", "3.11", "--no-emit-package", "torch", "--constraint", str(TORCH)),
        *("--custom-compile-command", "python requirements/supply_chain.py lock", "--quiet"),
        *("--output-file", str(LOCK), *(["--upgrade"] if upgrade else [])),
    ]
    return subprocess.run(command, cwd=HERE.parent).returncode


# -- known vulnerabilities ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Vulnerability:
    """One that is known of a locked version."""

    package: str
    id: str
    aliases: tuple[str, ...]
    fixed_in: tuple[str, ...]
    summary: str


class NoAnswer(Exception):
    """The service did not say anything about a package."""


def ask(name: str, version: str) -> list[Vulnerability]:
    """Returns what PyPI knows of a version. Raises NoAnswer."""
    try:
        with urllib.request.urlopen(SERVICE.format(name=name, version=version), timeout=SECONDS) as answer:
            known = json.load(answer)["vulnerabilities"]
    except (OSError, ValueError, KeyError) as error:
        raise NoAnswer(f"{type(error).__name__}: {error}") from error
    return [
        Vulnerability(
            name,
            each["id"],
            tuple(each.get("aliases") or ()),
            tuple(each.get("fixed_in") or ()),
            (each.get("summary") or each.get("details") or "").split("\n")[0][:200],
        )
        for each in known
        if not each.get("withdrawn")
    ]


def audit(
    packages: dict[str, str],
    accepted: list[dict[str, Any]],
    today: datetime.date,
    ask: Callable[[str, str], list[Vulnerability]] = ask,
) -> int:
    """Prints what is known of all packages; returns the exit status."""
    first, *others = sorted(packages.items())
    try:
        found = ask(*first)
    except NoAnswer as error:
        print(f"audit: NOT DONE: no answer from {SERVICE.format(name=first[0], version=first[1])}: {error}")
        return 0

    def answered(package: tuple[str, str]) -> list[Vulnerability] | str:
        try:
            return ask(*package)
        except NoAnswer:
            return package[0]

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(answered, others))
    unanswered = [answer for answer in answers if isinstance(answer, str)]
    found = [*found, *(each for answer in answers if not isinstance(answer, str) for each in answer)]
    is_bad = False
    for each in found:
        entry = next(
            (entry for entry in accepted if entry["id"] in (each.id, *each.aliases)),
            {"until": datetime.date.min, "reason": ""},
        )
        is_accepted = entry["until"] >= today
        is_bad |= not is_accepted
        expired = f"accepted until {entry['until']} only: " if entry["reason"] else ""
        verdict = (
            f"accepted until {entry['until']}: {entry['reason']}" if is_accepted else f"{expired}NOT accepted"
        )
        fix = f"fixed in {', '.join(each.fixed_in)}" if each.fixed_in else "no fix is known"
        print(f"audit: {each.package} {packages[each.package]}: {each.id}, {fix}; {verdict}; {each.summary}")
    if unanswered:
        print(f"audit: NOT DONE for {len(unanswered)} packages, without an answer: {', '.join(unanswered)}")
    print(
        f"audit: {len(packages) - len(unanswered)} packages asked about, {len(found)} vulnerabilities known"
    )
    return int(is_bad)


def accepted() -> list[dict[str, Any]]:
    """Returns the listed vulnerabilities, each with its id, reason and last day."""
    entries = tomllib.loads(ACCEPTED.read_text()).get("vulnerability", [])
    for entry in entries:
        if not (entry.get("id") and entry.get("reason") and isinstance(entry.get("until"), datetime.date)):
            raise SystemExit(f"{ACCEPTED.name}: {entry} needs an id, a reason, and until = a date")
    return list(entries)


# -- what is installed -------------------------------------------------------------------------------


def installed() -> dict[str, metadata.Distribution]:
    """Returns every distribution of this environment by its name."""
    found: dict[str, metadata.Distribution] = {}
    for each in metadata.distributions():
        found.setdefault(str(canonicalize_name(each.metadata["Name"])), each)
    return dict(sorted(found.items()))


def needs(distribution: metadata.Distribution, extras: Iterable[str] = ("",)) -> set[tuple[str, str]]:
    """Returns the names that it needs here, each with one of the extras that are asked of them, or none."""
    found = set()
    for text in distribution.requires or ():
        wanted = Requirement(text)
        if wanted.marker is None or any(wanted.marker.evaluate({"extra": extra}) for extra in extras):
            found |= {(str(canonicalize_name(wanted.name)), extra) for extra in ("", *wanted.extras)}
    return found


def needed_by(extras: Iterable[str]) -> set[str]:
    """Returns the installed packages that Ostinato with these extras needs, directly or not."""
    known, seen = installed(), set()
    waiting = [(OWN, extra) for extra in ("", *extras)]
    while waiting:
        package = waiting.pop()
        if package not in seen and package[0] in known:
            seen.add(package)
            waiting += needs(known[package[0]], [package[1]])
    return {name for name, _ in seen} - {OWN}


def licence(fields: email.message.Message | metadata.PackageMetadata) -> str:
    """Returns the licence that a distribution states, or nothing."""
    if expression := fields["License-Expression"]:
        return str(expression)
    prefix = "License :: "
    classifiers = [each for each in fields.get_all("Classifier") or () if each.startswith(prefix)]
    told = [each.rpartition(" :: ")[2] for each in classifiers if each != f"{prefix}OSI Approved"]
    lines = (fields["License"] or "").strip().splitlines()
    return "; ".join(told) or (lines[0].strip() if lines and len(lines[0]) < 100 else "")


def sbom() -> dict[str, Any]:
    """Returns what is installed as CycloneDX 1.6; the same for the same environment."""
    known = installed()
    references = {name: f"pkg:pypi/{name}@{each.version}" for name, each in known.items()}

    def component(name: str) -> dict[str, Any]:
        told = licence(known[name].metadata)
        return {
            "type": "application" if name == OWN else "library",
            "bom-ref": references[name],
            "name": name,
            "version": known[name].version,
            "purl": references[name],
            **({"licenses": [{"license": {"name": told}}]} if told else {}),
        }

    def below(name: str) -> list[str]:
        extras = ("", *(known[name].metadata.get_all("Provides-Extra") or ())) if name == OWN else ("",)
        return sorted(references[other] for other, _ in needs(known[name], extras) if other in references)

    parts = {
        "metadata": {"component": component(OWN)},
        "components": [component(name) for name in known if name != OWN],
        "dependencies": [
            {"ref": references[name], "dependsOn": list(dict.fromkeys(below(name)))} for name in known
        ],
    }
    number = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(parts, sort_keys=True))
    head = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{number}",
        "version": 1,
    }
    return head | parts


# -- licences ----------------------------------------------------------------------------------------

STATED = {
    "nvidia-cuda-nvrtc": "NVIDIA proprietary, redistributable; only tests of kernels use it",
    "torch": "BSD-3-Clause, with parts under Apache-2.0, BSD-2-Clause, BSL-1.0 and MIT",
}
"""Where a distribution's own fields say nothing, or not enough."""


def licences() -> dict[str, str]:
    """Returns the licence of each locked package that is installed."""
    known = installed()
    return {
        name: STATED.get(name) or licence(known[name].metadata) for name in sorted(locked()) if name in known
    }


def denied(licences: dict[str, str]) -> list[str]:
    """Returns what is wrong: a licence that is not wanted, or none at all."""
    return [
        f"{name}: {told or 'states no licence'}"
        for name, told in licences.items()
        if not told or not allowed(told)
    ]


def allowed(told: str) -> bool:
    """Of alternatives one is enough."""
    return not all(DENIED.search(part) for part in re.split(r"\bOR\b", told))


def licence_page() -> str:
    """Returns docs/licences.md."""
    told, serving = licences(), needed_by(["server"])
    if wrong := denied(told):
        raise SystemExit("licences: " + "; ".join(wrong))
    rows = [f"| {name} | {text} | {'x' if name in serving else ''} |" for name, text in told.items()]
    head = [
        "# Licences of dependencies",
        "",
        "Written by `python requirements/supply_chain.py licences` from what each package states. Ostinato "
        "itself is under Apache-2.0. What is marked comes with `ostinato[server]`; the others are for tests, "
        "benchmarks and development. Builds of torch for CUDA bring NVIDIA's libraries, proprietary "
        "and redistributable.",
        "",
        "| package | licence | serves |",
        "|---|---|---|",
    ]
    return "\n".join([*head, *rows]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("lock").add_argument("--upgrade", action="store_true", help="to the newest versions")
    commands.add_parser("audit")
    commands.add_parser("sbom").add_argument("file", type=Path)
    commands.add_parser("licences")
    given = parser.parse_args()
    if given.command == "lock":
        return lock(given.upgrade)
    if given.command == "audit":
        return audit(locked(), accepted(), datetime.datetime.now(datetime.UTC).date())
    if given.command == "sbom":
        given.file.parent.mkdir(parents=True, exist_ok=True)
        given.file.write_text(json.dumps(sbom(), indent=1) + "\n")
        return 0
    LICENCES.write_text(licence_page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
