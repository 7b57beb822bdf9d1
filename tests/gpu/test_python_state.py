from contract.test_python_state import *  # noqa: F403
