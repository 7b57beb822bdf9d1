"""Models that something else wraps: compiled, scripted, distributed, vectorised, traced."""

import copy
from contextlib import contextmanager

import torch
from torch import nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn import functional as F

from corpus.training_models import ConvNet, images, mlp, vectors
from corpus.training_twice import program


@contextmanager
def one_process():
    """Makes a process group of this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def train(run, model, batches, make=None):
    optimizer = (make or (lambda p: torch.optim.AdamW(p, lr=1e-2)))(model.parameters())
    step = run.train_step(model, nn.CrossEntropyLoss(), optimizer)
    return [step(x, y) for x, y in batches], model.state_dict(), optimizer


@program
def compiled_with_a_backend_that_runs_eagerly(run):
    return train(run, torch.compile(mlp(16, 24, 4).to(run.device), backend="eager"), vectors(run, 6))


@program
def scripted_model(run):
    return train(run, torch.jit.script(mlp(16, 24, 4).to(run.device)), vectors(run, 6))


@program
def traced_by_fx(run):
    return train(run, torch.fx.symbolic_trace(mlp(16, 24, 4, dropout=0.1).to(run.device)), vectors(run, 6))


@program
def distributed_data_parallel_of_one_process(run):
    with one_process():
        model = nn.parallel.DistributedDataParallel(mlp(16, 24, 4).to(run.device))
        return train(run, model, vectors(run, 6))


@program
def synchronised_batch_norm(run):
    model = nn.SyncBatchNorm.convert_sync_batchnorm(ConvNet())
    if run.device.type == "cpu":
        model = ConvNet()  # it exists on GPUs only
    with one_process():
        return train(run, model.to(run.device), images(run, 6))


@program
def data_parallel_over_what_there_is(run):
    return train(run, nn.DataParallel(mlp(16, 24, 4).to(run.device)), vectors(run, 6))


@program
def ensemble_by_vmap(run):
    base = copy.deepcopy(mlp(16, 24, 4)).to("meta")

    class Ensemble(nn.Module):
        def __init__(self):
            super().__init__()
            parameters, _ = stack_module_state([mlp(16, 24, 4) for _ in range(3)])
            self.stacked = nn.ParameterDict({k.replace(".", "_"): v.detach() for k, v in parameters.items()})

        def forward(self, x):
            weights = {k.replace("_", ".", 1): v for k, v in self.stacked.items()}
            return vmap(lambda w: functional_call(base, w, x))(weights)

    model = Ensemble().to(run.device)
    step = run.train_step(
        model,
        lambda out, y: F.cross_entropy(out.flatten(0, 1), y.repeat(3)),
        torch.optim.Adam(model.parameters(), lr=1e-2),
    )
    return [step(x, y) for x, y in vectors(run, 6)], model.state_dict()


@program
def a_plain_function_over_a_model_as_the_model(run):
    model = mlp(16, 24, 4).to(run.device)

    class Standardised(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner
            self.register_buffer("mean", torch.full((16,), 0.1))

        def forward(self, x):
            return self.inner(x - self.mean)

    return train(run, Standardised(model).to(run.device), vectors(run, 8))


@program
def gradients_sparsified_between_two_halves_of_a_step(run):
    """Backward by the step, the update by hand: an optimizer that does nothing."""

    class Nothing(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.0})

        def step(self, closure=None):
            pass

    model = mlp(16, 24, 4).to(run.device)
    step = run.train_step(model, nn.CrossEntropyLoss(), Nothing(model.parameters()))
    losses = []
    for x, y in vectors(run, 8):
        losses.append(step(x, y))
        with torch.no_grad():
            for p in model.parameters():
                least = p.grad.abs().flatten().kthvalue(max(1, p.numel() // 2)).values
                p.sub_(0.1 * torch.where(p.grad.abs() >= least, p.grad, 0.0))
    return losses, model
