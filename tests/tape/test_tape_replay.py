"""A replay gives what the eager step gives, for the kinds of steps people capture."""

import pytest
import torch
import torch.nn.functional as F
from tape_recording import check_replays, copies, record, same
from torch import nn


def rand(*size, dtype=torch.float32):
    return torch.randn(*size).to(dtype)


def attention(x, wq, wk, wv, keys, values, slots):
    q, k, v = x @ wq, x @ wk, x @ wv
    keys.index_put_((slots,), k)
    values[slots] = v
    scores = (q @ keys.T) * 0.25 + 1e-6
    mask = torch.arange(keys.shape[0]) > slots.max()
    return F.softmax(scores.masked_fill(mask, float("-inf")), dim=-1) @ values


def in_place_on_views(x):
    y = x.clone()
    y[1:3].mul_(2)
    y.t()[0].zero_()
    y.view(-1)[::5] += 1
    y[0, 0] = 3.0
    return y, y[1], y.T


def scaled_constant(x):
    total = torch.tensor(1.0)
    total += x.sum()
    total *= 2
    return total


def out_of_wrong_size(x):
    out = torch.empty(0)
    torch.mul(x, 2, out=out)
    grown = torch.empty(0)
    grown.resize_(3, 4)
    grown.copy_(x.T[:3, :4] if x.shape[0] >= 4 else x[:3, :4])
    return out + 1, grown


def metadata_in_place(x):
    y = x * 2
    y.unsqueeze_(0)
    z = y + 1
    y.squeeze_(0).t_()
    return y.contiguous(), z


def bf16_region(x, w):
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        y = F.linear(x, w)
        return y, F.softmax(y.float(), -1)


def expand_and_stride(x):
    wide = x[:, None, :].expand(-1, 3, -1)
    diagonal = torch.as_strided(x, (3,), (x.shape[1] + 1,))
    return wide.reshape(-1, x.shape[1]) + 1, diagonal * 2, wide.sum(1)


def complex_rotation(x):
    z = torch.view_as_complex(x.view(x.shape[0], -1, 2))
    turned = z * torch.polar(torch.ones(z.shape), torch.ones(z.shape))
    return torch.view_as_real(turned.conj() * z), turned.conj().imag + 1


def foreach(x, y):
    sums = torch._foreach_add([x, y], 1.0)
    torch._foreach_mul_(sums, 2.0)
    norms = torch._foreach_norm(sums)
    torch._foreach_copy_([x], [sums[1]])
    return sums, norms


STEPS = {
    "mlp": (lambda x, w, v: F.silu(x @ w) @ v + x, lambda: (rand(4, 8), rand(8, 16), rand(16, 8))),
    "mlp_3d": (lambda x, w, b: F.gelu(F.linear(x, w, b)), lambda: (rand(2, 3, 8), rand(5, 8), rand(5))),
    "attention": (
        attention,
        lambda: (
            *(rand(*s) for s in [(3, 8), (8, 8), (8, 8), (8, 8), (6, 8), (6, 8)]),
            torch.tensor([1, 3, 5]),
        ),
    ),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (8,), w, b), lambda: (rand(4, 8), rand(8), rand(8))),
    "rms_norm": (lambda x, w: F.rms_norm(x, (8,), w, 1e-6), lambda: (rand(4, 8), rand(8))),
    "rms_norm_by_hand": (
        lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)),
        lambda: (rand(4, 8), rand(8)),
    ),
    "batch_norm": (
        lambda x, w, m, v: F.batch_norm(F.conv2d(x, w, padding=1), m, v.abs_(), training=True),
        lambda: (rand(2, 3, 6, 6), rand(4, 3, 3, 3), rand(4), rand(4)),
    ),
    "batch_norm_eval": (
        lambda x, m, v: F.batch_norm(x, m, v.abs() + 1),
        lambda: (rand(2, 3, 6, 6), rand(3), rand(3)),
    ),
    "cat_stack_split": (
        lambda x, y: [torch.cat(torch.stack([x, y]).split(1)), *torch.cat([x, y], -1).chunk(2, -1)],
        lambda: (rand(4, 6), rand(4, 6)),
    ),
    "in_place_on_views": (in_place_on_views, lambda: (rand(4, 6),)),
    "expand_and_stride": (expand_and_stride, lambda: (rand(4, 6),)),
    "transposes": (
        lambda x: (x.permute(2, 0, 1) + 1, x.mT @ x, x.swapaxes(0, 2).clone()),
        lambda: (rand(2, 3, 4),),
    ),
    "several_results": (
        lambda x: (x.topk(2), x.sort(-1, descending=True), torch.var_mean(x, 1), x.max(0), x.aminmax()),
        lambda: (rand(4, 6),),
    ),
    "casts": (
        lambda x, i: (x.to(torch.bfloat16) * 2, x.double(), (x > 0).long() + i, i.float() / 3, x.int()),
        lambda: (rand(4, 6), torch.arange(6)),
    ),
    "autocast": (bf16_region, lambda: (rand(4, 8), rand(6, 8))),
    "sdpa": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        lambda: tuple(rand(1, 2, 5, 8) for _ in range(3)),
    ),
    "sdpa_mask": (
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m > 0, enable_gqa=True),
        lambda: (rand(1, 4, 5, 8), rand(1, 2, 5, 8), rand(1, 2, 5, 8), rand(1, 1, 5, 5)),
    ),
    "dropout": (lambda x: F.dropout(x, 0.3), lambda: (rand(40, 6),)),
    "sampling": (
        lambda x: (
            torch.multinomial(x.softmax(-1), 2),
            (x.softmax(-1) / torch.empty_like(x).exponential_(1)).argmax(-1),
            torch.rand(3, 4),
            torch.rand_like(x),
            torch.randn(20, dtype=torch.float64),
            torch.randint(0, 9, (5,)),
            torch.bernoulli(x.sigmoid()),
            torch.normal(x, 1.0),
            torch.randperm(9),
        ),
        lambda: (rand(4, 6),),
    ),
    "foreach": (foreach, lambda: (rand(4, 6), rand(4, 6))),
    "constants": (scaled_constant, lambda: (rand(4),)),
    "out_of_wrong_size": (out_of_wrong_size, lambda: (rand(3, 4),)),
    "metadata_in_place": (metadata_in_place, lambda: (rand(3, 4),)),
    "complex": (complex_rotation, lambda: (rand(3, 4),)),
    "indexing": (
        lambda x, i: (x[i], x[:, i], x.index_select(0, i), x.gather(1, i.expand(4, 3)), F.embedding(i, x)),
        lambda: (rand(4, 6), torch.tensor([2, 0, 3])),
    ),
    "factories": (
        lambda x: (
            torch.zeros(3) + torch.ones(3, dtype=torch.float64) + x.new_full((3,), 2.5),
            torch.full((2,), 7),
            torch.full_like(x, -1.0),
            x.new_zeros(2),
            torch.arange(2, 9, 3),
            torch.linspace(0, 1, 5),
            torch.eye(3),
            torch.scalar_tensor(4.0),
        ),
        lambda: (rand(4),),
    ),
    "cross_entropy": (lambda x, i: F.cross_entropy(x, i), lambda: (rand(6, 6), torch.arange(6))),
    "pooling": (
        lambda x: (F.max_pool2d(x, 2), F.avg_pool2d(x, 2), F.interpolate(x, scale_factor=2)),
        lambda: (rand(1, 2, 4, 4),),
    ),
    "empty_tensors": (lambda x: (x[:0] + 1, x[:0].sum(), torch.cat([x[:0], x])), lambda: (rand(3, 2),)),
    "einsum_cumsum": (
        lambda x, y: (torch.einsum("ij,kj->ik", x, y), x.cumsum(1), x.logsumexp(1), x.tril()),
        lambda: (rand(4, 6), rand(3, 6)),
    ),
    "gru": (
        lambda x, h, w, u, b, c: torch.gru_cell(x, h, w, u, b, c),
        lambda: (rand(2, 4), rand(2, 3), rand(9, 4), rand(9, 3), rand(9), rand(9)),
    ),
    "scatter": (
        lambda x, i: (x.scatter(1, i, 1.0), x.scatter_add(1, i, x), x.index_add(0, i[0], x)),
        lambda: (rand(4, 4), torch.arange(4).repeat(4, 1)),
    ),
    "partial_index_put": (
        lambda x, i: (x.__setitem__((slice(None), i), x[:, :3] * 2), 1 - x),
        lambda: (rand(4, 6), torch.tensor([2, 0, 3])),
    ),
    "scalars": (
        lambda x, i, h: (
            [x + 0.1, x * 3, x / 7, x - 1e-9, x > 0.1, x.eq(1), x + True, 2 - x, 1 / x],
            [i + 1, i * 2, i / 3, i + 0.5, i > 2, i >= 2.5, i - 16777217],
            [
                h + 0.1,
                h * 3.3,
                h / 7,
                h > 0.1,
                x.sum() * 0.3,
                i.sum() + 2,
                x.clone().mul_(0.7).add_(1, alpha=3),
            ],
        ),
        lambda: (rand(4, 6), torch.arange(6), rand(5, dtype=torch.bfloat16)),
    ),
    "input_passed_through": (lambda x: (x, x[1:], x + 1), lambda: (rand(4),)),
}


@pytest.mark.parametrize("name", STEPS)
def test_replay_equals_eager(name):
    step, inputs = STEPS[name]
    torch.manual_seed(11)
    check_replays(step, *inputs())


def test_nested_outputs_keep_their_structure():
    def step(x):
        y = x + 1
        return {"a": (y, [y, None]), "n": 3, "s": "text", "view": y[0]}

    x = torch.randn(4)
    recorded = check_replays(step, x)
    out = recorded.out
    assert out["n"] == 3
    assert out["s"] == "text"
    assert out["a"][1][1] is None
    assert out["a"][0] is out["a"][1][0]
    assert out["view"].data_ptr() == out["a"][0].data_ptr()


def test_strides_are_kept():
    recorded = record(lambda x: (x.T * 2, (x + 1)[:, ::2]), torch.randn(4, 6))
    assert recorded.out[0].stride() == (1, 6)
    assert recorded.out[1].stride() == (6, 2)


def test_python_does_not_run_at_replay():
    runs = []

    def step(x):
        runs.append(1)
        return x * 2

    recorded = record(step, torch.ones(3))
    for _ in range(4):
        recorded.replay()
    assert len(runs) == 1


def test_inputs_are_read_at_their_address_and_stay_stale_otherwise():
    x = torch.ones(3)
    recorded = record(lambda x: x * 2, x)
    x = torch.full((3,), 5.0)
    assert recorded.replay().tolist() == [2, 2, 2]


def test_a_moved_parameter_gives_the_stale_answer():
    layer = nn.Linear(3, 3, bias=False)
    x, old = torch.randn(2, 3), layer.weight.detach().clone()
    recorded = record(layer, x)
    layer.weight.data = torch.randn(3, 3)
    assert torch.equal(recorded.replay(), x @ old.T)


def test_a_parameter_updated_in_place_gives_the_new_answer():
    layer = nn.Linear(3, 3, bias=False)
    x = torch.randn(2, 3)
    recorded = record(layer, x)
    with torch.no_grad():
        layer.weight.mul_(2)
        assert torch.equal(recorded.replay(), layer(x))


def test_seeded_replays_repeat_and_unseeded_ones_differ():
    recorded = record(lambda: torch.rand(8))
    torch.manual_seed(1)
    first, second = recorded.replay().clone(), recorded.replay().clone()
    torch.manual_seed(1)
    assert torch.equal(recorded.replay(), first)
    assert not torch.equal(first, second)


def test_a_generator_of_the_step_is_restored_and_drawn_from():
    generator = torch.Generator().manual_seed(3)
    before = generator.get_state()
    recorded = record(lambda: torch.rand(4, generator=generator))
    assert torch.equal(generator.get_state(), before)
    expected = torch.rand(4, generator=torch.Generator().manual_seed(3))
    assert torch.equal(recorded.replay(), expected)
    assert not torch.equal(recorded.replay(), expected)


def test_replay_under_other_modes_is_unchanged():
    x, w = torch.randn(4, 8), torch.randn(8, 8)
    recorded = record(lambda: x @ w + torch.arange(8))
    expected = recorded.replay().clone()
    for context in (torch.autocast("cpu", torch.bfloat16), torch.inference_mode(), torch.enable_grad()):
        with context:
            autocast = torch.is_autocast_enabled("cpu")
            assert torch.equal(recorded.replay(), expected)
            assert torch.is_autocast_enabled("cpu") == autocast
    with torch.device("meta"):
        assert torch.equal(recorded.replay(), expected)


def test_results_may_change_shape_in_the_hands_of_their_holder():
    recorded = record(lambda x: (x + 1) * 2, torch.ones(2, 3))
    recorded.out.t_()
    assert recorded.replay().tolist() == [[4, 4]] * 3


def test_custom_op_that_mutates():
    @torch.library.custom_op("tape_tests::bump", mutates_args=("x",))
    def bump(x: torch.Tensor, by: float) -> torch.Tensor:
        x += by
        return x * 2

    def step(x):
        y = x.clone()
        return bump(y, 3.0), bump(x, 1.0), y

    check_replays(step, torch.randn(4))


def test_raw_lists_readable_calls():
    recorded = record(lambda x: (x + 1).relu(), torch.ones(2), keep_graph=True)
    assert recorded.tape.nodes == 2
    assert "aten.add.Tensor" in recorded.tape.raw[0][0]
    assert "aten.relu" in recorded.tape.raw[0][1]
    assert record(lambda x: x + 1, torch.ones(2)).tape.raw is None


def test_views_and_allocations_cost_no_call():
    recorded = record(
        lambda x: torch.empty(3, 2).t().T[1:].view(-1).detach() if x is None else x.view(-1)[1:],
        torch.ones(4),
    )
    assert recorded.tape.nodes == 0


def test_repeated_leaves_and_two_records_of_one_step_agree():
    step, inputs = STEPS["attention"]
    args = inputs()
    first, second = record(step, *args), record(step, *copies(args))
    assert same(first.replay(), second.replay())
