"""What clients are told when the engine ends their request."""

import pytest

from ostinato.server.openai.errors import engine_error, without_places


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("[12:30:01] /project/cpp/grammar_parser.cc:73: EBNF error at line 1", "EBNF error at line 1"),
        ("CUDA error: no memory\nException raised from x at ../c10/y.cpp:12 (most", "CUDA error: no memory"),
        ("/opt/x/json_schema_converter.h:9:4 bad\n", "bad"),
        ("C:\\src\\a.cu:1:\n  real reason", "real reason"),
        ("no.such file and 12:30 stay", "no.such file and 12:30 stay"),
    ],
)
def test_where_in_its_source_a_library_failed_is_not_told(said: str, told: str) -> None:
    assert without_places(said) == told


def test_a_step_that_failed_may_be_tried_again() -> None:
    """503 and when to come back, unless the request itself is at fault."""
    error = engine_error("the step failed on cuda:0: RuntimeError: at /a/b.cpp:12: x", refused=False)
    assert error.status == 503
    assert int(error.headers["Retry-After"]) > 0
    assert "b.cpp" not in str(error)
    assert engine_error("no", refused=True, param="tools").status == 400
