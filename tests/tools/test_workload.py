"""The workloads are those that the committed figures were measured with."""

from ostinato.bench.workload import Workload


def test_mixed_is_the_workload_of_the_committed_throughput_figures() -> None:
    workload = Workload.mixed(256, vocab=151_936)
    assert (len(workload), workload.input_tokens, workload.output_tokens) == (256, 144_831, 144_160)
    assert workload == Workload.mixed(256, vocab=151_936)
    assert max(max(prompt) for prompt in workload.prompts) < 151_936


def test_scale_shortens_every_length() -> None:
    whole, tenth = Workload.mixed(8, vocab=50), Workload.mixed(8, vocab=50, scale=0.1)
    assert [round(length * 0.1) for length in whole.output_lens] == list(tenth.output_lens)
    assert [round(len(prompt) * 0.1) for prompt in whole.prompts] == [len(prompt) for prompt in tenth.prompts]


def test_a_prompt_is_the_same_in_every_batch() -> None:
    small, large = Workload.uniform(2, 5, 4, vocab=97), Workload.uniform(9, 5, 4, vocab=97)
    assert large.first(2) == small
    assert len(set(large.prompts)) == 9
    assert large.shortened(1).output_lens == (1,) * 9
    assert large.single(3).prompts == (large.prompts[3],)
    assert large.longest == 9
