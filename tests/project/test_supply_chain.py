"""What Ostinato is made of is locked with hashes, audited, and listed with its licence."""

import datetime
import importlib.util
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("supply_chain", ROOT / "requirements" / "supply_chain.py")
assert SPEC is not None
assert SPEC.loader is not None
supply_chain: Any = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(supply_chain)

TODAY = datetime.date(2026, 11, 1)


def test_every_package_but_torch_is_locked_with_hashes() -> None:
    lines = supply_chain.LOCK.read_text().replace("\\\n", " ").splitlines()
    pinned = [line for line in lines if line and not line.lstrip().startswith("#")]
    assert len(pinned) > 50
    for line in pinned:
        assert re.match(r"[A-Za-z0-9._-]+==\S+ ", line), line
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", line), line
    assert supply_chain.TORCH.read_text().count("==") == 1


def test_the_lock_has_what_the_project_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = [
        *project["dependencies"],
        *(text for name in ("dev", "server", "bench", "plots") for text in extras[name]),
    ]
    locked = supply_chain.locked()
    for text in asked:
        wanted = Requirement(text)
        if wanted.name != "ostinato":
            version = locked.get(str(canonicalize_name(wanted.name)))
            assert version is not None, f"{text}: run `requirements/supply_chain.py lock`"
            assert wanted.specifier.contains(version), (text, version)


def test_ci_installs_from_the_lock() -> None:
    readme = (ROOT / "README.md").read_text()
    [command] = re.findall(r"<!-- command: test -->\n```sh\n(.*)\n```", readme)
    assert "--require-hashes -r requirements/ci.txt" in command
    assert "'.[dev]'" not in command


def known(id: str, *aliases: str) -> Any:
    return supply_chain.Vulnerability("jinja2", id, aliases, ("9.9",), "it runs code")


def run_audit(found: list[Any], *accepted: dict[str, Any]) -> int:
    def ask(name: str, version: str) -> list[Any]:
        return found if name == "jinja2" else []

    status: int = supply_chain.audit({"anyio": "1", "jinja2": "2"}, list(accepted), TODAY, ask)
    return status


def test_a_known_vulnerability_fails_the_audit(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_audit([]) == 0
    assert run_audit([known("PYSEC-1")]) == 1
    assert "jinja2 2: PYSEC-1, fixed in 9.9" in capsys.readouterr().out


def test_one_is_accepted_until_its_day_alone() -> None:
    entry = {"id": "CVE-1", "reason": "not called", "until": TODAY}
    assert run_audit([known("PYSEC-1", "CVE-1")], entry) == 0
    assert run_audit([known("PYSEC-1", "CVE-1"), known("PYSEC-2")], entry) == 1
    assert run_audit([known("PYSEC-1", "CVE-1")], entry | {"until": TODAY - datetime.timedelta(1)}) == 1


def test_an_audit_without_an_answer_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    def nobody(name: str, version: str) -> list[Any]:
        raise supply_chain.NoAnswer("no network")

    def some(name: str, version: str) -> list[Any]:
        return [] if name == "anyio" else nobody(name, version)

    packages = {"anyio": "1", "jinja2": "2"}
    assert supply_chain.audit(packages, [], TODAY, nobody) == 0
    assert "NOT DONE" in capsys.readouterr().out
    assert supply_chain.audit(packages, [], TODAY, some) == 0
    said = capsys.readouterr().out
    assert "NOT DONE for 1 packages, without an answer: jinja2" in said
    assert "1 packages asked about" in said


def test_what_is_accepted_has_a_reason_and_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    supply_chain.accepted()
    monkeypatch.setattr(supply_chain, "ACCEPTED", tmp_path / "accepted.toml")
    (tmp_path / "accepted.toml").write_text('[[vulnerability]]\nid = "CVE-1"\nreason = "because"\n')
    with pytest.raises(SystemExit, match="until"):
        supply_chain.accepted()


def test_the_sbom_lists_all_that_is_installed() -> None:
    listed = supply_chain.sbom()
    components = {each["name"]: each for each in listed["components"]}
    installed = supply_chain.installed()
    assert {*components, "ostinato"} == installed.keys()
    for name, each in components.items():
        assert each["purl"] == f"pkg:pypi/{name}@{installed[name].version}"
    below = {each["ref"]: each["dependsOn"] for each in listed["dependencies"]}
    own = below[listed["metadata"]["component"]["bom-ref"]]
    assert components["torch"]["bom-ref"] in own
    assert components["fastapi"]["bom-ref"] in own, "extras count"
    assert components["starlette"]["bom-ref"] in below[components["fastapi"]["bom-ref"]]
    assert supply_chain.sbom() == listed, "the same for the same environment"


def test_licences_are_known_and_wanted() -> None:
    """Of what is installed in the locked version: another one may have another licence."""
    page = supply_chain.LICENCES.read_text()
    rows = dict(re.findall(r"^\| ([a-z0-9-]+) \| (.*?) \|", page, re.MULTILINE))
    locked, installed = supply_chain.locked(), supply_chain.installed()
    current = {
        name: told
        for name, told in supply_chain.licences().items()
        if installed[name].version == locked[name]
    }
    assert len(current) > 30
    assert supply_chain.denied(supply_chain.licences()) == []
    assert {name: rows.get(name) for name in current} == current, (
        "run `requirements/supply_chain.py licences`"
    )


@pytest.mark.parametrize(
    ("told", "is_allowed"),
    [
        ("MIT", True),
        ("GNU Lesser General Public License v3 (LGPLv3)", True),
        ("LGPL-3.0-or-later", True),
        ("AGPL-3.0-only", False),
        ("GNU Affero General Public License v3", False),
        ("GPL-3.0-or-later", False),
        ("GNU General Public License v2 (GPLv2)", False),
        ("MIT OR GPL-2.0", True),
        ("MIT AND GPL-2.0", False),
        ("SSPL-1.0", False),
        ("", False),
    ],
)
def test_licences_that_bind_who_serves_are_denied(told: str, is_allowed: bool) -> None:
    assert (supply_chain.denied({"some-package": told}) == []) == is_allowed
