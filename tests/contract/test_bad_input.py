"""Bad input is a clear error of ours, and the next good call works."""

import numpy as np
import pytest
import torch

from contract.steps import WIDTH, key, make_runner, randn, same, x_field
from ostinato.graphs import (
    BatchDescriptor,
    BatchError,
    BatchShape,
    CaptureOptions,
    ConfigError,
    CudaGraphRunner,
    Decision,
    Dispatcher,
    Field,
    GraphMode,
    GraphPool,
    InputBuffers,
    Ladder,
    OstinatoError,
    Reason,
    capture_keys,
    graphed,
    step_mode,
)


@pytest.fixture(scope="module")
def runner(device):
    fields = [x_field(), Field("ids", torch.int64), Field("fixed", torch.float32, (2,), per="fixed")]
    return make_runner(device, lambda x, ids, fixed: x + ids[:, None] + fixed.sum(), [2, 4], fields=fields)


def good(device, n=3):
    return {
        "x": randn(n, WIDTH, device=device),
        "ids": torch.arange(n, device=device),
        "fixed": torch.ones(2, device=device),
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": [[0.0] * WIDTH] * 3}, "x: expected a tensor or array, got list"),
        ({"ids": 3}, "ids: expected a tensor or array, got int"),
        ({"ids": None}, "ids: expected a tensor or array, got NoneType"),
        ({"ids": torch.zeros(3, dtype=torch.int32)}, "ids: expected torch.int64, got torch.int32"),
        ({"ids": torch.zeros(3)}, "ids: expected torch.int64, got torch.float32"),
        ({"x": np.zeros((3, WIDTH))}, "x: expected float32, got float64"),
        ({"x": np.zeros((3, WIDTH + 1), np.float32)}, "x: expected shape"),
        ({"x": torch.zeros(3, WIDTH - 1)}, "x: expected shape"),
        ({"ids": torch.zeros(2, dtype=torch.int64)}, "ids: expected shape"),
        ({"fixed": torch.zeros(3)}, "fixed: expected shape"),
        ({"x": torch.zeros(3, 1, WIDTH)}, "x: expected 2 dimensions"),
        ({"x": torch.zeros(3, WIDTH, device="meta")}, "x: expected .* got meta"),
        ({"unheard_of": torch.zeros(3)}, "unknown unheard_of"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_batch_that_does_not_match_its_fields_is_refused_by_name(runner, device, change, message):
    shape = None if "dimensions" in message else BatchShape.decode(3)
    with pytest.raises(BatchError, match=message):
        runner.run(good(device) | change, shape)
    assert runner.run(good(device)).shape == (3, WIDTH)


def test_an_eager_step_checks_its_batch_in_the_same_way(runner, device):
    steps = runner.eager_steps.copy()
    for change, message in (
        ({"x": None}, "x: expected a tensor or array, got NoneType"),
        ({"ids": torch.zeros(9)}, "ids: expected torch.int64, got torch.float32"),
        ({"ids": torch.zeros(8, dtype=torch.int64)}, "ids: expected shape"),
        ({"x": torch.zeros(9, WIDTH, device="meta")}, "x: expected .* got meta"),
        ({"unheard_of": torch.zeros(9)}, "unknown unheard_of"),
    ):
        with pytest.raises(BatchError, match=message):
            runner.run(good(device, 9) | change, BatchShape.decode(9))
    assert runner.eager_steps == steps
    assert runner.run(good(device, 9)).shape == (9, WIDTH)


@pytest.mark.parametrize("name", ["x", "ids", "fixed"])
def test_a_missing_field_is_named(runner, device, name):
    batch = good(device)
    del batch[name]
    with pytest.raises(BatchError, match=f"missing {name}"):
        runner.run(batch, BatchShape.decode(3))
    with pytest.raises(BatchError, match=f"missing {name}"):
        runner.run(batch)
    misspelt = batch | {name + "_": torch.zeros(1)}
    with pytest.raises(BatchError, match=f"missing {name}; unknown {name}_"):
        runner.run(misspelt, BatchShape.decode(3))
    assert runner.run(good(device)).shape == (3, WIDTH)


def test_an_empty_batch_is_refused(runner, device):
    with pytest.raises(BatchError, match="at least one"):
        runner.run(good(device, 0))
    with pytest.raises(BatchError, match="at least one"):
        BatchShape.decode(0)
    assert runner.run(good(device)).shape == (3, WIDTH)


def test_an_empty_dictionary_and_a_thing_that_is_no_mapping_are_refused(runner, device):
    with pytest.raises(BatchError):
        runner.run({})
    assert runner.run(good(device)).shape == (3, WIDTH)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (lambda: BatchShape(3, 4), "4 requests cannot share 3 tokens"),
        (lambda: BatchShape(6, 4, 2), "4 requests of 2 tokens are 8"),
        (lambda: BatchShape.decode(1, 0), "at least"),
        (lambda: BatchShape.decode(1, lora=-1), "negative"),
        (lambda: BatchShape.decode(1, context=-1), "negative"),
    ],
)
def test_an_impossible_shape_is_refused(shape, message):
    with pytest.raises(BatchError, match=message):
        shape()


def test_a_shape_that_is_not_the_batchs_is_refused(runner, device):
    with pytest.raises(BatchError, match="expected shape"):
        runner.run(good(device, 3), BatchShape.decode(2))
    assert runner.run(good(device)).shape == (3, WIDTH)


def test_a_batch_larger_than_the_graph_or_the_buffers_is_refused(runner, device):
    batch = good(device, 4)
    with pytest.raises(BatchError, match="does not fit"):
        runner.buffers.fill(batch, BatchShape.decode(4), BatchDescriptor.decode(2))
    with pytest.raises(BatchError, match="do not fit"):
        runner.buffers.views(BatchDescriptor.decode(5))


def test_an_eager_decision_cannot_be_replayed(runner, device):
    eager = Decision(GraphMode.NONE, None, Reason.LARGER_THAN_MAX)
    with pytest.raises(BatchError, match="larger-than-max"):
        runner.replay(good(device), BatchShape.decode(3), eager)


@pytest.mark.parametrize("text", ["fast", "", "full_", None, 3])
def test_an_unknown_mode_is_refused_with_the_modes_there_are(text):
    with pytest.raises(ConfigError, match=r"unknown graph mode.*FULL_AND_PIECEWISE"):
        GraphMode.parse(text)
    with pytest.raises(ConfigError, match="unknown graph mode"):
        graphed(torch.relu, ladder=[1], mode=text)
    with pytest.raises(ConfigError, match="unknown graph mode"), step_mode(text):
        pass


def test_a_mode_that_no_single_step_has_is_refused():
    with pytest.raises(ConfigError, match="FULL_AND_PIECEWISE"):
        graphed(torch.relu, ladder=[1], mode="full-and-piecewise")
    with pytest.raises(ConfigError, match="FULL_DECODE_ONLY"), step_mode("full_decode_only"):
        pass


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([], "at least one size"),
        ([0, 1], "positive integer, not 0"),
        ([-2], "positive integer, not -2"),
        ([1.5], "positive integer, not 1.5"),
        ([True], "positive integer, not True"),
        ([2, 2], "2 is listed twice"),
        (8, "list of sizes, not 8"),
    ],
)
def test_a_bad_ladder_is_refused(sizes, message):
    for make in (Ladder, lambda sizes: graphed(torch.relu, ladder=sizes)):
        with pytest.raises(ConfigError, match=message):
            make(sizes)


def test_what_is_no_function_cannot_be_graphed():
    with pytest.raises(ConfigError, match="not a Tensor"):
        graphed(torch.zeros(1), ladder=[1])
    with pytest.raises(ConfigError, match="negative"):
        graphed(torch.relu, ladder=[1], batch_dim=-1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "not a name"}, "identifier"),
        ({"name": ""}, "identifier"),
        ({"name": "x", "dtype": "float32"}, "torch.dtype"),
        ({"name": "x", "per": "page"}, "token, request, fixed"),
        ({"name": "x", "shape": (2,), "dim": 2}, "dim 2"),
        ({"name": "x", "dim": -1}, "dim -1"),
    ],
)
def test_a_bad_field_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        Field(**{"dtype": torch.float32} | arguments)


@pytest.mark.parametrize(
    ("dtype", "pad"),
    [(torch.int32, 1 << 40), (torch.uint8, 256), (torch.uint8, -1), (torch.int64, "one"), (torch.int64, 0.5)],
)
def test_a_padding_value_its_type_cannot_hold_is_refused(device, dtype, pad):
    with pytest.raises(ConfigError, match=r"padding|pad"):
        InputBuffers([Field("x", dtype, pad=pad)], max_tokens=2, device=device)
    with pytest.raises(ConfigError, match=r"padding|pad|poison"):
        InputBuffers([Field("x", dtype, poison=pad)], max_tokens=2, device=device)


def test_duplicated_names_no_fields_and_no_rows_are_refused(device):
    with pytest.raises(ConfigError, match=r"must be unique.*x, y, x"):
        InputBuffers([x_field(), Field("y", torch.int64), x_field()], max_tokens=2, device=device)
    with pytest.raises(ConfigError, match="at least one"):
        InputBuffers([], max_tokens=2, device=device)
    for sizes in ({"max_tokens": 0}, {"max_tokens": 2, "max_reqs": 0}, {"max_tokens": -1}):
        with pytest.raises(ConfigError, match="1 or more"):
            InputBuffers([x_field()], device=device, **sizes)


def test_only_fixed_fields_need_a_shape(device):
    buffers = InputBuffers([Field("t", torch.float32, (2,), per="fixed")], max_tokens=2, device=device)
    runner = CudaGraphRunner(lambda t: t * 2, buffers, [key(2)])
    runner.capture(progress=False)
    batch = {"t": torch.ones(2, device=device)}
    with pytest.raises(BatchError, match="shape"):
        runner.run(batch)
    assert runner.run(batch, BatchShape.decode(2)).tolist() == [2, 2]


def test_a_device_without_a_backend_is_refused_by_pool_and_buffers(device):
    with pytest.raises(ConfigError, match="meta"):
        GraphPool("meta")
    with pytest.raises(ConfigError, match="meta"):
        InputBuffers([x_field()], max_tokens=2, device="meta")


def test_a_pool_on_another_device_is_refused(device):
    buffers = InputBuffers([x_field()], max_tokens=2, device=device)
    pool = GraphPool(device)
    buffers.device = torch.device("meta")
    with pytest.raises(ConfigError, match=r"pool is on .* buffers are on meta"):
        CudaGraphRunner(lambda x: x, buffers, [key(2)], pool=pool)


def test_modes_are_parsed_wherever_they_are_given(device):
    for call in (lambda: Dispatcher("bogus"), lambda: capture_keys("bogus", None, None, max_reqs=1)):
        with pytest.raises(ConfigError, match="bogus"):
            call()


def test_a_key_larger_than_the_buffers_is_refused_at_once(device):
    buffers = InputBuffers([x_field()], max_tokens=2, device=device)
    with pytest.raises(ConfigError, match="does not fit into buffers"):
        CudaGraphRunner(lambda x: x, buffers, [key(4)])


def test_a_decision_about_a_graph_that_is_gone_is_refused(device):
    runner = make_runner(device, lambda x: x * 2, [2])
    shape = BatchShape.decode(2)
    decision = runner.decide(shape)
    runner.drop()
    with pytest.raises(BatchError, match="no full graph"):
        runner.replay({"x": randn(2, WIDTH, device=device)}, shape, decision)


@pytest.mark.parametrize("budget", [0, -5])
def test_a_budget_that_is_no_number_of_bytes_is_refused(device, budget):
    with pytest.raises(ConfigError, match="budget"):
        GraphPool(device, budget=budget)


@pytest.mark.parametrize(
    ("setting", "message"),
    [({"warmups": -1}, "warmups"), ({"error_mode": "lenient"}, "lenient.*thread_local")],
)
def test_a_bad_capture_option_is_refused(setting, message):
    with pytest.raises(ConfigError, match=message):
        CaptureOptions(**setting)


def test_compile_up_to_is_refused_where_nothing_compiles(device):
    with pytest.raises(ConfigError, match="0 or more"):
        make_runner(device, lambda x: x, [2], compile_up_to=-1)
    if device.type == "cpu":
        with pytest.raises(ConfigError, match="CUDA"):
            make_runner(device, lambda x: x, [2], compile_up_to=2)
        with pytest.raises(ConfigError, match="CUDA"):
            graphed(torch.relu, ladder=[2], compile_up_to=2)(torch.zeros(2))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_cuda_device_is_refused():
    with pytest.raises(OstinatoError, match="no CUDA device"):
        GraphPool("cuda")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"decode_ladder": None}, "decode ladder"),
        ({"token_ladder": None}, "token ladder"),
        ({"max_reqs": 0}, "max_reqs"),
        ({"max_reqs": 2}, "never more than 2"),
        ({"lora_cases": []}, "lora_cases"),
        ({"context_buckets": [1, 1]}, "context_buckets"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(arguments, message):
    given = {"decode_ladder": Ladder([1, 4]), "token_ladder": Ladder([8]), "max_reqs": 4} | arguments
    decode, tokens = given.pop("decode_ladder"), given.pop("token_ladder")
    with pytest.raises(ConfigError, match=message):
        capture_keys(GraphMode.FULL_AND_PIECEWISE, decode, tokens, **given)


def test_arguments_of_another_device_are_refused_or_moved(device):
    f = graphed(lambda x: x * 2, ladder=[2])
    x = randn(2, WIDTH, device=device)
    f(x)
    with pytest.raises(BatchError, match="meta"):
        f(torch.zeros(2, WIDTH, device="meta"))
    assert same(f(x), x * 2)
