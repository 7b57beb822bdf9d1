"""Kernels are chosen by shape alone, and steps of one class run the same compiled kernels."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from ostinato.kernels import variants
from ostinato.kernels.attention.choice import MAX_SPLITS, decode_tile, num_splits_of
from ostinato.kernels.cuda import compiled
from ostinato.kernels.gpu import Gpu, gpu_of
from ostinato.kernels.linear import choice, few_tokens, products, scaled_rows
from ostinato.kernels.linear.rules import gemv_tile
from ostinato.kernels.linear.tables import Choice, KernelTable
from ostinato.kernels.linear.tiles import (
    FUSED,
    IN_CUDA,
    CudaGemvTile,
    FragmentsTile,
    GemvTile,
    Library,
    MatrixShape,
    PromptTile,
    SkinnyTile,
)
from ostinato.kernels.linear.weight import Weight
from ostinato.kernels.norms import rows
from ostinato.kernels.variants import kernel_class

GPU = torch.device("cuda", 0)
H200 = choice.package_table(Gpu((9, 0), 132))
QWEN3 = [
    MatrixShape(4096, 1024),
    MatrixShape(1024, 2048),
    MatrixShape(3072, 1024, True),
    MatrixShape(1024, 3072),
]


QWEN3_4B = [
    MatrixShape(6144, 2560),
    MatrixShape(2560, 4096),
    MatrixShape(9728, 2560, True),
    MatrixShape(2560, 9728),
]
LLAMA_3B = [
    MatrixShape(5120, 3072),
    MatrixShape(3072, 3072),
    MatrixShape(8192, 3072, True),
    MatrixShape(3072, 8192),
]


@pytest.fixture
def _on_h200(monkeypatch):
    yield from _on(monkeypatch, Gpu((9, 0), 132))


@pytest.fixture
def _on_another_gpu(monkeypatch):
    yield from _on(monkeypatch, Gpu((10, 0), 148))


def _on(monkeypatch, gpu):
    for module in (choice, variants):
        monkeypatch.setattr(module, "gpu_of", lambda _: gpu)
    monkeypatch.setattr(compiled, "is_supported", lambda _: True)
    monkeypatch.setattr(compiled, "has_warpgroup_products", lambda _: True)
    choice.use_table(None)
    yield
    choice.use_table(None)


def fused_sizes(shapes, dtype, device):
    """The numbers of tokens at which a layer of these matrices runs fused."""
    return [count for count in range(1, 100) if few_tokens.are_the_choice(shapes, count, dtype, device)]


def test_the_committed_table_divides_its_matrices_evenly():
    """Where work is no multiple of a tile, kernels are right and slow."""
    assert H200 is not None
    assert H200.gpu == "sm90-132"
    assert set(QWEN3) <= set(H200.choices)
    for shape, choices in H200.choices.items():
        for entry in choices:
            if isinstance(entry.tile, IN_CUDA):
                assert entry.tile.fits(shape)
            if isinstance(entry.tile, SkinnyTile):
                assert shape.out_features % entry.tile.rows == 0
                assert shape.in_features % (entry.tile.block * entry.tile.parts) == 0
                assert entry.tile.parts == 1 or not shape.gated


@pytest.mark.usefixtures("_on_h200")
def test_the_table_of_the_gpu_decides_in_bfloat16_alone():
    [first, *_] = QWEN3
    assert H200 is not None
    assert choice.choose(first, 8, torch.bfloat16, GPU) == H200.find(first, 8)
    assert isinstance(H200.find(first, 8), FUSED)
    assert choice.choose(first, 8, torch.float16, GPU) == Library()
    assert isinstance(choice.choose(first, 1, torch.float16, GPU), GemvTile)
    assert choice.choose(first, 1, torch.float32, GPU) == Library()
    assert choice.choose(first, 100_000, torch.bfloat16, GPU) == Library()
    for shape in QWEN3[1:]:
        assert choice.choose(shape, 4096, torch.bfloat16, GPU) == PromptTile()
        assert choice.choose(shape, 4096, torch.float16, GPU) == Library()
        assert choice.choose(shape, 4096, torch.float32, GPU) == Library()


def test_a_table_is_found_by_what_a_gpu_has_and_not_by_its_name(monkeypatch):
    """An H100 is an H200 with less memory."""
    names = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
    for name, multiprocessors, known in (
        (names[0], 132, True),
        (names[1], 132, True),
        (names[0], 114, False),
    ):
        has = SimpleNamespace(name=name, multi_processor_count=multiprocessors)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, has=has: has)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
        gpu_of.cache_clear()
        assert (choice.package_table(gpu_of(GPU)) is H200) is known
        assert choice.table_name(gpu_of(GPU)) == f"sm90-{multiprocessors}.json"
        assert Gpu.named(f"sm90-{multiprocessors}") == gpu_of(GPU)
    gpu_of.cache_clear()
    assert Gpu.named("NVIDIA H200") is None
    assert Gpu.named("sm120-170") == Gpu((12, 0), 170)


@pytest.mark.usefixtures("_on_another_gpu")
def test_where_nothing_was_measured_one_token_has_a_kernel_and_more_have_cublas():
    for shape in (*QWEN3, MatrixShape(7, 9), MatrixShape(5, 40_000)):
        assert isinstance(choice.choose(shape, 1, torch.bfloat16, GPU), GemvTile)
        assert choice.choose(shape, 2, torch.bfloat16, GPU) == Library()
    assert fused_sizes(QWEN3, torch.bfloat16, GPU) == [1]


@pytest.mark.usefixtures("_on_h200")
@pytest.mark.parametrize("shapes", [QWEN3_4B, LLAMA_3B], ids=["Qwen3-4B", "Llama-3.2-3B"])
def test_forms_of_a_step_follow_from_the_rules_where_no_table_knows_the_model(shapes):
    """An untuned model runs fused, with norms half done, and in general, as a tuned one does."""
    assert H200 is not None
    assert not any(shape in H200.choices for shape in shapes)
    assert fused_sizes(shapes, torch.bfloat16, GPU) == list(range(1, 17))
    are = {n: scaled_rows.are_the_choice(shapes, n, torch.bfloat16, GPU) for n in (16, 17, 64, 65)}
    assert are == {16: False, 17: True, 64: True, 65: False}


@pytest.mark.usefixtures("_on_h200")
def test_with_all_tables_switched_off_the_rules_decide():
    with choice.using(None, package=False):
        assert choice.choose(QWEN3[3], 200, torch.bfloat16, GPU) != H200.find(QWEN3[3], 200)
        assert choice.choose(QWEN3[0], 1, torch.float16, GPU) == gemv_tile(QWEN3[0], Gpu((9, 0), 132))
    assert choice.choose(QWEN3[3], 200, torch.bfloat16, GPU) == H200.find(QWEN3[3], 200)


@pytest.mark.usefixtures("_on_h200")
def test_a_table_given_by_the_user_comes_first_where_it_says_something():
    [first, second, *_] = QWEN3
    assert H200 is not None
    mine = SkinnyTile(16, 64, 64, 4, 3)
    table = KernelTable("sm90-132", {first: (Choice(4, 6, mine),)})
    with choice.using(table):
        assert choice.choose(first, 5, torch.bfloat16, GPU) == mine
        assert choice.choose(first, 7, torch.bfloat16, GPU) == H200.find(first, 7)
        assert choice.choose(second, 5, torch.bfloat16, GPU) == H200.find(second, 5)
    assert choice.choose(first, 5, torch.bfloat16, GPU) == H200.find(first, 5)


@pytest.mark.usefixtures("_on_another_gpu")
def test_a_step_is_fused_where_all_its_matrices_are():
    fragments, gemv = FragmentsTile(16, 2, 4, 1, 128), GemvTile(4, 1024, 4)
    long = (Choice(1, 1, CudaGemvTile(1, 4, 128)), Choice(2, 16, fragments))
    short = (Choice(1, 1, gemv), Choice(2, 12, fragments))
    with choice.using(KernelTable("", dict.fromkeys(QWEN3, long))):
        assert fused_sizes(QWEN3, torch.bfloat16, GPU) == list(range(1, 17))
        assert fused_sizes([*QWEN3, MatrixShape(7, 9)], torch.bfloat16, GPU) == [1]
        assert fused_sizes(QWEN3, torch.float16, GPU) == [1]
        assert fused_sizes(QWEN3, torch.float32, GPU) == []
        assert fused_sizes(QWEN3, torch.bfloat16, torch.device("cpu")) == []
    with choice.using(KernelTable("", {**dict.fromkeys(QWEN3, long), QWEN3[2]: short})):
        assert fused_sizes(QWEN3, torch.bfloat16, GPU) == list(range(1, 13))


@pytest.mark.usefixtures("_on_another_gpu")
def test_cuda_kernels_are_no_choice_where_their_sources_cannot_be_compiled(monkeypatch):
    choices = Choice(1, 1, CudaGemvTile(4, 2, 128)), Choice(2, 16, FragmentsTile(16, 2, 4, 1, 128))
    table = KernelTable("", {QWEN3[0]: choices})
    with choice.using(table):
        assert choice.choose(QWEN3[0], 1, torch.bfloat16, GPU) == choices[0].tile
        assert choice.choose(QWEN3[0], 8, torch.bfloat16, GPU) == choices[1].tile
    monkeypatch.setattr(compiled, "is_supported", lambda _: False)
    with choice.using(table):
        assert isinstance(choice.choose(QWEN3[0], 1, torch.bfloat16, GPU), GemvTile)
        assert choice.choose(QWEN3[0], 8, torch.bfloat16, GPU) == Library()


@pytest.mark.parametrize(
    ("tile", "shape", "fits"),
    [
        (CudaGemvTile(4, 2, 128), MatrixShape(4096, 1024), True),
        (CudaGemvTile(3, 4, 160), MatrixShape(3072, 1024, gated=True), True),
        (CudaGemvTile(4, 2, 88), MatrixShape(4096, 1024), True),
        (CudaGemvTile(4, 2, 87), MatrixShape(4096, 1024), False),  # no room beside the weights
        (CudaGemvTile(4, 2, 128), MatrixShape(4096, 1024, gated=True), False),  # nor for a second half
        (CudaGemvTile(4, 2, 256), MatrixShape(4096, 1024), False),  # more than a thread has
        (CudaGemvTile(3, 2, 128), MatrixShape(4096, 1024), False),  # rows that are no multiple
        (CudaGemvTile(4, 3, 128), MatrixShape(4096, 1024), False),
        (CudaGemvTile(4, 2, 128), MatrixShape(4096, 1152), False),  # columns that are none
        (CudaGemvTile(32, 1, 255), MatrixShape(4096, 256), True),
        (CudaGemvTile(33, 1, 255), MatrixShape(33, 256), False),  # a lane for each row
        (CudaGemvTile(1, 16, 128), MatrixShape(4096, 256), True),
        (CudaGemvTile(1, 32, 128), MatrixShape(4096, 256), False),  # more than a multiprocessor has
        (CudaGemvTile(1, 64, 32), MatrixShape(4096, 256), False),  # more than a program may have
    ],
)
def test_what_a_warp_of_cuda_gemv_can_hold(tile, shape, fits):
    assert tile.fits(shape) == fits


@pytest.mark.usefixtures("_on_h200")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_kv_heads", [1, 2, 8, 32])
def test_one_warm_up_serves_a_whole_class(dtype, num_kv_heads):
    """Everything that is compiled in is equal for all steps of a class."""
    variants_of = defaultdict(set)
    few = fused_sizes(QWEN3, dtype, GPU)
    for num_tokens in (*range(1, 600), 3840, 4095, 4096, 4608):
        attention = decode_tile(dtype, num_tokens, 128), num_splits_of(num_tokens, num_kv_heads) > 1
        tiles = [choice.choose(shape, num_tokens, dtype, GPU) for shape in QWEN3]
        passes = [t.compiled_tokens(num_tokens) for t in tiles if isinstance(t, FragmentsTile)]
        linear = (num_tokens in few, *tiles, *passes)
        heads = 2 * num_kv_heads, num_kv_heads
        step = [(shape, num_tokens) for shape in QWEN3], num_tokens, *heads, dtype, GPU
        variants_of[kernel_class(*step, is_decode=True)].add((attention, linear))
        variants_of["mixed", kernel_class(*step, is_decode=False)].add(linear)
    assert all(len(variants) == 1 for variants in variants_of.values())
    assert len(variants_of) <= 24


@pytest.mark.usefixtures("_on_h200")
def test_steps_over_a_shared_prefix_have_classes_of_their_own():
    def kernels(num_tokens, *, is_cascade):
        step = [(QWEN3[0], num_tokens)], num_tokens, 16, 8, torch.bfloat16, GPU
        return kernel_class(*step, is_decode=True, is_cascade=is_cascade)

    assert kernels(8, is_cascade=True) != kernels(8, is_cascade=False)
    assert kernels(34, is_cascade=True) == kernels(40, is_cascade=True)


@pytest.mark.usefixtures("_on_another_gpu")
def test_steps_differ_where_what_fragments_is_compiled_for_does():
    tile = FragmentsTile(16, 2, 4, 1, 128)
    with choice.using(KernelTable("", {QWEN3[0]: (Choice(1, 16, tile),)})):
        classes = {
            count: kernel_class([(QWEN3[0], count)], count, 16, 8, torch.bfloat16, GPU, is_decode=False)
            for count in (2, 8, 9, 16)
        }
    assert classes[2] == classes[8] != classes[9] == classes[16]


@pytest.mark.usefixtures("_on_h200")
def test_the_kernel_of_prompts_is_warmed_up_where_it_runs():
    classes = {
        count: kernel_class([(QWEN3[2], count)], count, 16, 8, torch.bfloat16, GPU, is_decode=False)
        for count in (2048, 3840, 4096, 8192)
    }
    assert classes[2048] == classes[3840] != classes[4096] == classes[8192]


@pytest.mark.usefixtures("_on_h200")
def test_wide_is_the_choice_only_where_the_gpu_has_its_instructions(monkeypatch):
    wide = [
        count for count in (16, 17, 64, 65) if scaled_rows.are_the_choice(QWEN3, count, torch.bfloat16, GPU)
    ]
    assert wide == [17, 64]
    assert not scaled_rows.are_the_choice(QWEN3, 17, torch.float16, GPU)
    assert not scaled_rows.are_the_choice(QWEN3, 17, torch.bfloat16, torch.device("cpu"))
    monkeypatch.setattr(choice, "gpu_of", lambda _: Gpu((10, 0), 148))
    monkeypatch.setattr(compiled, "has_warpgroup_products", lambda _: False)
    with choice.using(H200):
        assert not scaled_rows.are_the_choice(QWEN3, 17, torch.bfloat16, GPU)
        assert choice.choose(QWEN3[0], 17, torch.bfloat16, GPU) == Library()


def test_a_later_gpu_runs_other_cuda_kernels_but_not_wide(monkeypatch):
    for capability, has in (((9, 0), True), ((10, 0), False)):
        monkeypatch.setattr(compiled, "is_supported", lambda _: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        assert compiled.has_warpgroup_products(GPU) is has


@pytest.mark.usefixtures("_on_h200")
def test_the_choice_is_a_constant_to_torch_compile():
    """No break of the graph at every product, and the right one."""

    def rows_of_tile(x: torch.Tensor) -> torch.Tensor:
        tile = choice.choose(MatrixShape(4096, 1024, False), x.size(0), torch.bfloat16, GPU)
        return x if isinstance(tile, Library) else x + tile.rows

    run = torch.compile(rows_of_tile, fullgraph=True, dynamic=False, backend="eager")
    for num_tokens in (1, 8, 4000):
        tile = choice.choose(QWEN3[0], num_tokens, torch.bfloat16, GPU)
        assert run(torch.zeros(num_tokens))[0] == getattr(tile, "rows", 0)


def test_splits_fill_a_gpu_and_no_more():
    for num_tokens in (1, 2, 7, 16, 300):
        for num_kv_heads in (1, 2, 8, 32):
            splits, programs = num_splits_of(num_tokens, num_kv_heads), num_tokens * num_kv_heads
            assert 1 <= splits <= MAX_SPLITS
            assert splits == 1 or splits * programs <= 256


def test_choices_of_a_table_are_replaced_cut_and_joined():
    shape, one, other = MatrixShape(8, 16), GemvTile(4, 1024, 4), GemvTile(2, 1024, 4)
    table = KernelTable("", {shape: (Choice(1, 10, one), Choice(20, 30, other))})
    assert [table.find(shape, count) for count in (1, 10, 11, 20, 31)] == [one, one, None, other, None]
    assert table.find(shape._replace(gated=True), 1) is None
    cut = table.but(shape, Choice(5, 22, other))
    assert cut.choices[shape] == (Choice(1, 4, one), Choice(5, 30, other))
    assert cut.but(shape, Choice(5, 30, one)).choices[shape] == (Choice(1, 30, one),)
    inside = table.but(shape, Choice(3, 4, other))
    assert inside.choices[shape][:3] == (Choice(1, 2, one), Choice(3, 4, other), Choice(5, 10, one))
    assert table.choices[shape][0] == Choice(1, 10, one), "the table itself stays as it was"


def test_on_a_cpu_everything_is_plain_torch():
    """At shapes that have tiles on a GPU."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    x, weight, norm, residual = random(5, 1024), random(64, 1024) / 32, random(1024), random(5, 1024)
    held = Weight(weight)
    assert torch.equal(products.linear(x, held), x @ weight.T)
    gate, up = (x @ weight.T).chunk(2, dim=-1)
    assert torch.equal(products.gated_linear(x, held), torch.nn.functional.silu(gate) * up)
    out = torch.empty(5, 64)
    assert products.float_linear(x, held, out) is out
    assert torch.equal(products.float_linear(x, held), out)
    normed, total = rows.add_rms_norm(x, residual, norm, 1e-6)
    assert torch.equal(total, residual + x)
    assert torch.equal(normed, rows.rms_norm(total, norm, 1e-6))
    projected = few_tokens.project(x, held, norm_weight=norm, eps=1e-6, gated=True)
    torch.testing.assert_close(projected, products.gated_linear(rows.rms_norm(x, norm, 1e-6), held))
