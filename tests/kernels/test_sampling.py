"""Sampling: filters against a slow reference, draws against their distribution, the right to be captured."""

import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.graphs import CaptureOptions, graphed
from ostinato.kernels.sampling import filters, torch_reference
from ostinato.kernels.sampling.plain import PlainSettings, return_plain
from ostinato.kernels.sampling.token_lines import LINE_HEAD, TokenLines

VOCAB = 40


class Chosen(NamedTuple):
    """How each row is sampled."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seeds: torch.Tensor

    def is_kept(self, logits):
        """What the filters leave."""
        return filters.is_kept(logits, *filters.reference(logits, *self[:4]))


def make_settings(n, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0):
    return Chosen(
        temperature=torch.full((n,), temperature),
        top_k=torch.full((n,), top_k, dtype=torch.int32),
        top_p=torch.full((n,), top_p),
        min_p=torch.full((n,), min_p),
        seeds=torch.full((n,), seed, dtype=torch.int64),
    )


def sample(logits, chosen, positions):
    return torch_reference.sample(logits, *chosen, positions)


def random_logits(n, vocab=VOCAB, seed=0, spread=3.0):
    return torch.randn(n, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def chi_square_limit(degrees):
    """About the 1 - 1e-5 quantile (Wilson and Hilferty)."""
    return degrees * (1 - 2 / (9 * degrees) + 4.265 * math.sqrt(2 / (9 * degrees))) ** 3


def assert_follows(counts, probabilities):
    expected = probabilities.double() * counts.sum()
    tail = expected < 5
    assert not counts[probabilities == 0].any()
    observed = torch.cat([counts[~tail].double(), counts[tail].sum().double().view(1)])
    expected = torch.cat([expected[~tail], expected[tail].sum().view(1)])
    if expected[-1] < 5:
        observed, expected = observed[:-1], expected[:-1]
    statistic = ((observed - expected) ** 2 / expected).sum().item()
    assert statistic < chi_square_limit(max(len(expected) - 1, 1))


# -- filters ---------------------------------------------------------------------------------------


def slow_filter(logits, top_k, top_p, min_p):
    """Kept token ids of one row, in the obvious way."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if top_k > 0:
        order = order[:top_k]
    weights = [math.exp(logits[token] - logits[order[0]]) for token in order]
    total = sum(weights)
    kept, before = [], 0.0
    for token, weight in zip(order, weights, strict=True):
        if kept and top_p < 1 and before >= top_p:
            break
        kept.append((token, weight))
        before += weight / total
    return {token for token, weight in kept if weight >= min_p * kept[0][1]}


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_filters_equal_a_slow_reference(data):
    n = data.draw(st.integers(1, 3))
    levels = data.draw(st.sampled_from([3, 1000]))  # 3: many ties
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 10_000)))
    logits = torch.randint(-levels, levels, (n, 12), generator=generator) / (levels / 4)
    # Fractions that no sum of these probabilities comes close to, so that rounding decides nothing.
    top_k = data.draw(st.lists(st.integers(-1, 15), min_size=n, max_size=n))
    top_p = data.draw(
        st.lists(st.sampled_from([0.0, 0.1234, 0.4321, 0.8765, 0.9876, 1.0]), min_size=n, max_size=n)
    )
    min_p = data.draw(st.lists(st.sampled_from([0.0, 0.01234, 0.2345, 0.6543]), min_size=n, max_size=n))
    chosen = Chosen(
        torch.ones(n), torch.tensor(top_k, dtype=torch.int32), torch.tensor(top_p), torch.tensor(min_p), None
    )
    left = chosen.is_kept(logits)
    for row in range(n):
        kept = slow_filter(logits[row].tolist(), top_k[row], top_p[row], min_p[row])
        assert set(left[row].nonzero().flatten().tolist()) == kept


def test_filters_that_are_off_drop_nothing_from_a_large_flat_vocabulary():
    logits = torch.zeros(1, 50_000)
    assert make_settings(1).is_kept(logits).all()


def test_top_k_of_one_is_greedy_and_takes_the_first_of_equal_logits():
    logits = random_logits(20).round()
    tokens = sample(logits, make_settings(20, temperature=5.0, top_k=1), torch.arange(20))
    assert torch.equal(tokens, logits.argmax(-1))
    assert (logits == logits.amax(-1, keepdim=True)).sum() > 25  # there were ties


# -- draws -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.7, "top_k": 7},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    ],
    ids=str,
)
def test_draws_follow_the_filtered_distribution(options):
    n = 20_000
    chosen = make_settings(n, seed=1234, **options)
    one = make_settings(1, **options)
    row = random_logits(1, seed=5)
    left = one.is_kept(row)
    wanted = (row / one.temperature).masked_fill(~left, float("-inf")).softmax(-1)[0]
    tokens = sample(row.expand(n, -1), chosen, torch.arange(n))
    assert_follows(torch.bincount(tokens, minlength=VOCAB), wanted)


def test_uniform_numbers_are_uniform_in_every_direction():
    n, width = 256, 256
    position, seed = torch.arange(n), torch.full((n,), 7)
    for keys in ((seed, position), (position, seed), (position * (1 << 32), seed), (-position, seed)):
        numbers = torch_reference.uniform(*keys, width)
        assert ((numbers > 0) & (numbers < 1)).all()
        flat = torch.full((16,), 1 / 16)
        assert_follows(torch.histc(numbers, 16, 0, 1), flat)
        pairs = torch.full((16,), 1 / 16)
        for near in (numbers.roll(1, 0), numbers.roll(1, 1)):
            assert_follows(torch.histc((numbers * 4).floor() * 4 + (near * 4).floor(), 16, 0, 16), pairs)
        assert_follows(torch.histc(numbers[:, 3], 8, 0, 1), torch.full((8,), 1 / 8))
        assert_follows(torch.histc(numbers[5], 8, 0, 1), torch.full((8,), 1 / 8))


def test_gumbel_noise_has_its_mean_and_variance_and_no_infinities():
    noise = torch_reference.gumbel_noise(torch.arange(300), torch.arange(300), 2000)
    assert noise.isfinite().all()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.02)


def test_every_seed_and_position_draws_anew():
    numbers = torch_reference.uniform(torch.arange(50).repeat_interleave(50), torch.arange(50).repeat(50), 1)
    # Of 2,500 values with 24 digits, by chance none or one pair is equal.
    assert numbers.unique().numel() >= 2498
    swapped = torch_reference.uniform(torch.tensor([3, 8]), torch.tensor([8, 3]), 4)
    assert not torch.equal(swapped[0], swapped[1])


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 12))
def test_a_draw_depends_on_its_own_row_only(seed, n):
    generator = torch.Generator().manual_seed(seed)
    logits = random_logits(n, seed=seed)
    chosen = Chosen(
        temperature=torch.rand(n, generator=generator) * 1.5,
        top_k=torch.randint(0, VOCAB, (n,), generator=generator, dtype=torch.int32),
        top_p=torch.rand(n, generator=generator),
        min_p=torch.rand(n, generator=generator) / 4,
        seeds=torch.randint(-(1 << 63), (1 << 63) - 1, (n,), generator=generator),
    )
    positions = torch.randint(0, 10_000, (n,), generator=generator)
    together = sample(logits, chosen, positions)

    def select(rows):
        return Chosen(*(value[rows] for value in chosen))

    order = torch.randperm(n, generator=generator)
    assert torch.equal(sample(logits[order], select(order), positions[order]), together[order])
    for row in range(n):
        alone = sample(logits[row : row + 1], select(slice(row, row + 1)), positions[row : row + 1])
        assert alone.item() == together[row].item()


def test_temperature_zero_is_greedy_and_a_tiny_one_does_not_overflow():
    logits = random_logits(6) * 1000
    for temperature in (0.0, 1e-6, 2e-5):
        tokens = sample(logits, make_settings(6, temperature=temperature), torch.arange(6))
        assert torch.equal(tokens, logits.argmax(-1))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 12))
def test_plain_requests_get_what_filtered_sampling_draws_and_others_are_passed_over(seed, n):
    generator = torch.Generator().manual_seed(seed)
    num_rows = n + 5
    rows = (torch.randperm(num_rows - 1, generator=generator)[:n] + 1).int()
    off = make_settings(num_rows)
    temperature = (torch.rand(num_rows, generator=generator) * 3 - 1.5).clamp(min=0)
    seeds = torch.randint(-(1 << 63), (1 << 63) - 1, (num_rows,), generator=generator)
    chosen = Chosen(temperature, off.top_k, off.top_p, off.min_p, seeds)
    lengths = torch.randint(0, 10_000, (num_rows,), generator=generator, dtype=torch.int32)
    is_plain = torch.randint(0, 3, (num_rows,), generator=generator, dtype=torch.int32)
    logits = random_logits(n, seed=seed)
    filtered = sample(logits, Chosen(*(value[rows.long()] for value in chosen)), lengths[rows.long()])
    lines = TokenLines.of(torch.full((num_rows,), -1), torch.zeros(1, dtype=torch.int64), n, 2)
    plain = PlainSettings(is_plain, temperature, seeds, lengths)
    return_plain(logits, rows, plain, lines)
    wanted = torch.where(is_plain[rows.long()] != 0, filtered, 0)
    assert lines.ring[0, LINE_HEAD:].tolist() == wanted.tolist()
    assert lines.last_tokens[rows.long()].tolist() == wanted.tolist()
    assert lines.last_tokens[0] == -1


def test_forbidden_tokens_are_never_drawn():
    logits = torch.full((500, VOCAB), float("-inf"))
    logits[:, 17] = -50.0
    tokens = sample(logits, make_settings(500, temperature=1.5, top_p=0.9), torch.arange(500))
    assert (tokens == 17).all()


# -- penalties, bias, logprobs ---------------------------------------------------------------------


def test_penalties_equal_their_definitions():
    n = 3
    logits = random_logits(n)
    generator = torch.Generator().manual_seed(1)
    generated = torch.randint(0, 3, (n, VOCAB), generator=generator, dtype=torch.int32)
    in_prompt = torch.rand(n, VOCAB, generator=generator) < 0.3
    repetition, presence, frequency = [1.0, 1.3, 0.8], [0.0, 0.5, -0.4], [0.0, 0.2, 1.5]
    penalties = (torch.tensor(repetition), torch.tensor(presence), torch.tensor(frequency))
    out = torch_reference.apply_penalties(logits, *penalties, generated, in_prompt)
    for row in range(n):
        for token in range(VOCAB):
            wanted, count = logits[row, token].item(), generated[row, token].item()
            if count or in_prompt[row, token]:
                wanted = wanted / repetition[row] if wanted > 0 else wanted * repetition[row]
            wanted -= frequency[row] * count + presence[row] * (count > 0)
            assert out[row, token].item() == pytest.approx(wanted, abs=1e-5)
    assert torch.equal(out[0], logits[0])
    nothing = (torch.zeros_like(generated), torch.zeros_like(in_prompt))
    assert torch.equal(torch_reference.apply_penalties(logits, *penalties, *nothing), logits)


def test_penalties_keep_forbidden_tokens_forbidden():
    logits = torch.full((1, 4), float("-inf"))
    penalties = (torch.tensor([1.5]), torch.tensor([1.0]), torch.tensor([1.0]))
    counts = torch.ones(1, 4, dtype=torch.int32)
    changed = torch_reference.apply_penalties(logits, *penalties, counts, counts > 0)
    assert (changed == float("-inf")).all()


def test_counting_tokens_leaves_the_padding_row_alone():
    counts = torch.zeros(4, VOCAB, dtype=torch.int32)
    rows = torch.tensor([2, 0, 1, 2, 0], dtype=torch.int32)
    torch_reference.count_tokens(counts, rows, torch.tensor([5, 5, 6, 5, 7]))
    assert counts[2, 5] == 2
    assert counts[1, 6] == 1
    assert counts.sum() == 3


def test_bias_reaches_its_tokens_and_padding_reaches_none():
    logits = random_logits(2)
    ids, values = torch.tensor([[3, 0, 0], [0, 9, 0]]), torch.tensor([[5.0, 0.0, 0.0], [1.0, -100.0, 0.0]])
    wanted = logits.clone()
    wanted[0, 3] += 5
    wanted[1, 0] += 1
    wanted[1, 9] -= 100
    assert torch.equal(torch_reference.add_bias(logits, ids, values), wanted)


def test_logprobs_of_the_chosen_and_the_best():
    logits = random_logits(5)
    tokens = torch.tensor([0, 7, 39, 12, 3])
    result = torch_reference.token_logprobs(logits, tokens, 4)
    wanted = logits.double().log_softmax(-1)
    torch.testing.assert_close(result.chosen.double(), wanted[range(5), tokens], atol=1e-5, rtol=1e-5)
    assert torch.equal(result.top_tokens, wanted.argsort(-1, descending=True)[:, :4])
    torch.testing.assert_close(result.top.double(), wanted.gather(1, result.top_tokens), atol=1e-5, rtol=1e-5)
    assert result.rank.tolist() == [int((wanted[i] > wanted[i, t]).sum()) + 1 for i, t in enumerate(tokens)]


# -- capture ---------------------------------------------------------------------------------------


def test_the_whole_of_sampling_is_captured():
    n, max_rows = 4, 9
    counts = torch.zeros(max_rows, VOCAB, dtype=torch.int32)
    in_prompt = torch.zeros(max_rows, VOCAB, dtype=torch.bool)

    def step(
        logits, rows, positions, temperature, top_k, top_p, min_p, seeds, penalty, bias_ids, bias_values
    ):
        chosen = Chosen(temperature, top_k, top_p, min_p, seeds)
        penalties = (penalty + 1, penalty, penalty)
        biased = torch_reference.add_bias(logits, bias_ids, bias_values)
        changed = torch_reference.apply_penalties(
            biased, *penalties, counts.index_select(0, rows), in_prompt.index_select(0, rows)
        )
        tokens = sample(changed, chosen, positions)
        torch_reference.count_tokens(counts, rows, tokens)
        logprobs = torch_reference.token_logprobs(logits, tokens, 3)
        return tokens, logprobs.chosen, logprobs.rank, logprobs.top_tokens, logprobs.top

    def arguments(seed):
        generator = torch.Generator().manual_seed(seed)
        return (
            random_logits(n, seed=seed),
            torch.tensor([3, 8, 1, 0], dtype=torch.int32),
            torch.randint(0, 99, (n,), generator=generator),
            torch.tensor([0.0, 0.7, 1.0, 1.5]),
            torch.tensor([0, 5, 0, 20], dtype=torch.int32),
            torch.tensor([1.0, 0.9, 0.5, 1.0]),
            torch.tensor([0.0, 0.0, 0.05, 0.1]),
            torch.randint(0, 99, (n,), generator=generator),
            torch.rand(n, generator=generator),
            torch.randint(0, VOCAB, (n, 2), generator=generator),
            torch.rand(n, 2, generator=generator),
        )

    function = graphed(step, ladder=[n], options=CaptureOptions(strict=True))
    function.capture(*arguments(0))
    for seed in range(1, 6):
        before = counts.clone()
        out = [part.clone() for part in function(*arguments(seed))]
        after = counts.clone()
        counts.copy_(before)
        for part, wanted in zip(out, step(*arguments(seed)), strict=True):
            assert torch.equal(part, wanted)
        assert torch.equal(counts, after)
    assert counts.sum() == 3 * 5
    assert not function.report().eager_steps


def test_plain_sampling_is_captured_and_looks_at_the_temperatures_of_each_replay():
    n, num_rows = 4, 9
    temperature, seeds = torch.zeros(num_rows), torch.arange(num_rows)
    is_plain, lengths = torch.ones(num_rows, dtype=torch.int32), seeds.int()
    plain = PlainSettings(is_plain, temperature, seeds, lengths)
    began = torch.zeros(1, dtype=torch.int64)

    def lines():
        return TokenLines.of(torch.zeros(num_rows, dtype=torch.int64), began, n, 3)

    captured, eager = lines(), lines()

    def step(logits, rows):
        return_plain(logits, rows, plain, captured)
        return ()

    function = graphed(step, ladder=[n], pads={"rows": 0}, options=CaptureOptions(strict=True))
    rows = torch.tensor([3, 8, 1, 0], dtype=torch.int32)
    function.capture(random_logits(n), rows)
    assert captured.counts.tolist() == [0, 0], "capturing writes no line"
    for seed in range(7):
        temperature.copy_(torch.tensor([0.0, 0.9, 1.4])[(torch.arange(num_rows) * seed) % 3])
        is_plain[8] = seed % 2
        function(random_logits(n, seed=seed), rows)
        return_plain(random_logits(n, seed=seed), rows, plain, eager)
        assert torch.equal(captured.last_tokens, eager.last_tokens)
        assert torch.equal(captured.ring, eager.ring)
        assert captured.ring[seed % 3, 0] == seed
    assert captured.counts.tolist() == [7, 0]
    assert captured.last_tokens[0] == 0
    assert not function.report().eager_steps
