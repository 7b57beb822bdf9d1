import pytest

from ostinato.graphs.dispatching.mode import Capability, GraphMode, Lowered, lower, needed_capability
from ostinato.graphs.errors import ConfigError

NONE, PIECEWISE, FULL = GraphMode.NONE, GraphMode.PIECEWISE, GraphMode.FULL
FULL_DECODE_ONLY, FULL_AND_PIECEWISE = GraphMode.FULL_DECODE_ONLY, GraphMode.FULL_AND_PIECEWISE
NEVER, ALWAYS = Capability.NEVER, Capability.ALWAYS
SINGLE, UNIFORM = Capability.UNIFORM_SINGLE_TOKEN_DECODE, Capability.UNIFORM_BATCH
HEIGHT = {NONE: 0, PIECEWISE: 1, FULL: 2}


@pytest.mark.parametrize(
    ("mode", "decode", "mixed"),
    [
        (NONE, NONE, NONE),
        (PIECEWISE, PIECEWISE, PIECEWISE),
        (FULL, FULL, FULL),
        (FULL_DECODE_ONLY, FULL, NONE),
        (FULL_AND_PIECEWISE, FULL, PIECEWISE),
    ],
)
def test_a_mode_is_a_pair_of_paths(mode: GraphMode, decode: GraphMode, mixed: GraphMode) -> None:
    assert (mode.decode, mode.mixed) == (decode, mixed)


def test_only_none_piecewise_and_full_can_be_one_step() -> None:
    assert {mode for mode in GraphMode if mode.is_runtime} == {NONE, PIECEWISE, FULL}


@pytest.mark.parametrize("mode", list(GraphMode))
def test_parse_takes_any_case_and_both_separators(mode: GraphMode) -> None:
    for text in (mode.name, mode.name.lower(), mode.name.replace("_", "-"), mode.value, str(mode), mode):
        assert GraphMode.parse(text) is mode


@pytest.mark.parametrize("text", ["", "ful", "full and piecewise", None, 2])
def test_parse_lists_the_modes_when_the_name_is_unknown(text: object) -> None:
    with pytest.raises(ConfigError, match="NONE, PIECEWISE, FULL, FULL_DECODE_ONLY, FULL_AND_PIECEWISE"):
        GraphMode.parse(text)  # type: ignore[arg-type]


def test_needed_capability() -> None:
    assert [needed_capability(query_len) for query_len in (1, 2, 8, None)] == [
        SINGLE,
        UNIFORM,
        UNIFORM,
        ALWAYS,
    ]


@pytest.mark.parametrize(
    ("mode", "capability", "query_len", "possible"),
    [
        (FULL, ALWAYS, 1, FULL),
        (FULL, UNIFORM, 1, FULL_AND_PIECEWISE),
        (FULL, UNIFORM, 3, FULL_AND_PIECEWISE),
        (FULL, SINGLE, 1, FULL_AND_PIECEWISE),
        (FULL, SINGLE, 3, PIECEWISE),
        (FULL, NEVER, 1, PIECEWISE),
        (FULL_AND_PIECEWISE, ALWAYS, 3, FULL_AND_PIECEWISE),
        (FULL_AND_PIECEWISE, SINGLE, 1, FULL_AND_PIECEWISE),
        (FULL_AND_PIECEWISE, SINGLE, 2, PIECEWISE),
        (FULL_AND_PIECEWISE, NEVER, 1, PIECEWISE),
        (FULL_DECODE_ONLY, SINGLE, 1, FULL_DECODE_ONLY),
        (FULL_DECODE_ONLY, SINGLE, 2, NONE),
        (FULL_DECODE_ONLY, NEVER, 1, NONE),
        (PIECEWISE, NEVER, 1, PIECEWISE),
        (NONE, NEVER, 1, NONE),
    ],
)
def test_lower(mode: GraphMode, capability: Capability, query_len: int, possible: GraphMode) -> None:
    assert lower(mode, capability, query_len).mode is possible


@pytest.mark.parametrize("mode", list(GraphMode))
@pytest.mark.parametrize("capability", list(Capability))
@pytest.mark.parametrize("query_len", [1, 2])
def test_lowering_never_raises_a_path_and_explains_itself(
    mode: GraphMode, capability: Capability, query_len: int
) -> None:
    lowered = lower(mode, capability, query_len)
    assert HEIGHT[lowered.mode.decode] <= HEIGHT[mode.decode]
    assert HEIGHT[lowered.mode.mixed] <= HEIGHT[mode.mixed]
    assert lower(lowered.mode, capability, query_len) == Lowered(lowered.mode, None)
    if lowered.mode is mode:
        assert lowered.explanation is None
    else:
        assert lowered.explanation is not None
        assert lowered.explanation.startswith(f"{mode.name} was lowered to {lowered.mode.name}: ")
        assert lowered.explanation.count(".") == 1


def test_the_explanation_names_what_is_missing() -> None:
    explanation = lower(FULL, UNIFORM).explanation or ""
    assert "mixed batches need ALWAYS" in explanation
    assert "UNIFORM_BATCH" in explanation
    assert "use PIECEWISE" in (lower(FULL_DECODE_ONLY, NEVER).explanation or "")


def test_a_query_length_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="query length"):
        lower(FULL, ALWAYS, 0)
