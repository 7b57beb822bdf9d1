"""Clients and agent frameworks of others against a real server, each in a process of its own.

python -m venv clients
clients/bin/pip install -r tests/server/clients/requirements.txt
OSTINATO_CLIENTS_PYTHON=clients/bin/python pytest -m slow tests/server/test_clients.py
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .server_process import ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SCRIPTS = Path(__file__).parent / "clients"
PYTHON = os.environ.get("OSTINATO_CLIENTS_PYTHON", sys.executable)
PACKAGES = {
    "use_litellm.py": "litellm",
    "use_langchain.py": "langchain_openai",
    "use_instructor.py": "instructor",
    "use_pydantic_ai.py": "pydantic_ai",
    "use_openai_agents.py": "agents",
}


@pytest.mark.parametrize("script", PACKAGES)
def test_a_client_gets_what_it_expects(server: ServerProcess, script: str) -> None:
    find = f"import importlib.util as u, sys; sys.exit(u.find_spec({PACKAGES[script]!r}) is None)"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if subprocess.run([PYTHON, "-c", find], env=environment, check=False).returncode:
        pytest.skip(f"{PACKAGES[script]} is not installed: see the top of this file")
    command = [PYTHON, str(SCRIPTS / script), server.url]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]


def test_every_script_is_run() -> None:
    assert {file.name for file in SCRIPTS.glob("use_*.py")} == set(PACKAGES)
