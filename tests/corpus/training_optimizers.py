"""Every optimizer of torch, and those that people write themselves."""

import math
from collections import defaultdict

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer

from corpus.training_models import GPT, ConvNet, images, lm_loss, mlp, tokens, vectors
from corpus.training_twice import program


def train(run, make, steps=12, **options):
    model = mlp(16, 24, 4, act=nn.Tanh).to(run.device)
    optimizer = make(model.parameters())
    step = run.train_step(model, nn.CrossEntropyLoss(), optimizer, **options)
    return [step(x, y) for x, y in vectors(run, steps)], model, optimizer


@program
def sgd(run):
    return train(run, lambda p: torch.optim.SGD(p, lr=0.1))


@program
def sgd_maximizing_with_dampening(run):
    model = mlp(16, 24, 4).to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, dampening=0.1, maximize=True)
    step = run.train_step(model, lambda out, y: -F.cross_entropy(out, y), optimizer)
    return [step(x, y) for x, y in vectors(run, 10)], model, optimizer


@program
def adam_with_amsgrad_and_decay(run):
    return train(run, lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, weight_decay=1e-2))


@program
def adamw_written_for_each(run):
    return train(run, lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True))


@program
def adamw_fused_by_the_user(run):
    return train(run, lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True))


@program
def adamw_with_a_rate_tensor_of_the_user(run):
    rate = torch.tensor(1e-2, device=run.device)
    model = mlp(16, 24, 4).to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    step = run.train_step(model, nn.CrossEntropyLoss(), optimizer)
    losses = []
    for i, (x, y) in enumerate(vectors(run, 10)):
        rate.fill_(1e-2 / (i + 1))
        losses.append(step(x, y))
    return losses, model, rate


@program
def adamw_in_a_loop_per_parameter(run):
    return train(run, lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False, fused=False))


@program
def rmsprop_centered_with_momentum(run):
    return train(run, lambda p: torch.optim.RMSprop(p, lr=3e-3, momentum=0.9, centered=True))


@program
def adagrad(run):
    return train(run, lambda p: torch.optim.Adagrad(p, lr=0.05))


@program
def adadelta(run):
    return train(run, lambda p: torch.optim.Adadelta(p, lr=1.0))


@program
def adamax(run):
    return train(run, lambda p: torch.optim.Adamax(p, lr=1e-2))


@program
def nadam_with_decoupled_decay(run):
    return train(run, lambda p: torch.optim.NAdam(p, lr=1e-2, weight_decay=0.01, decoupled_weight_decay=True))


@program
def radam(run):
    return train(run, lambda p: torch.optim.RAdam(p, lr=1e-2), steps=15)


@program
def asgd(run):
    return train(run, lambda p: torch.optim.ASGD(p, lr=0.05))


@program
def rprop(run):
    return train(run, lambda p: torch.optim.Rprop(p, lr=1e-2))


@program
def adafactor_of_torch(run):
    return train(run, lambda p: torch.optim.Adafactor(p, lr=1e-2))


@program
def adafactor_of_transformers_with_relative_steps(run):
    from transformers.optimization import Adafactor

    return train(
        run, lambda p: Adafactor(p, scale_parameter=True, relative_step=True, warmup_init=True, lr=None)
    )


@program
def sparse_adam_on_an_embedding(run):
    model = nn.Embedding(32, 4, sparse=True).to(run.device)
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=1e-2)
    step = run.train_step(
        model, lambda e, t: F.mse_loss(e, t.float()[..., None].expand(-1, -1, 4)), optimizer
    )
    return [step(x, y) for x, y in tokens(run, [6] * 8)], model


@program
def muon_for_matrices_and_adamw_for_the_rest(run):
    model = GPT(layers=1).to(run.device)
    matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n]
    rest = [p for n, p in model.named_parameters() if not (p.dim() == 2 and "embed" not in n)]
    muon, adamw = torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=1e-3)

    class Both(Optimizer):
        def __init__(self):
            self.parts = (muon, adamw)
            super().__init__([g for o in self.parts for g in o.param_groups], {})

        def step(self, closure=None):
            for part in self.parts:
                part.step()

    step = run.train_step(model, lm_loss, Both())
    return [step(x, y) for x, y in tokens(run, [12] * 6)], model


@program
def muon_and_adamw_as_two_steps_of_the_user(run):
    model = mlp(16, 24, 24, 4).to(run.device)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    biases = [p for p in model.parameters() if p.dim() < 2]
    muon, adamw = torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(biases, lr=1e-2)
    step = run.train_step(model, nn.CrossEntropyLoss(), muon)
    losses = []
    for x, y in vectors(run, 8):
        adamw.zero_grad()
        losses.append(step(x, y))
        adamw.step()
    return losses, model


@program
def lbfgs_with_a_closure_is_what_people_try(run):
    model = mlp(16, 8, 4).to(run.device)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    ((x, y),) = vectors(run, 1, rows=32)
    if run.graphs:
        step = run.train_step(model, nn.CrossEntropyLoss(), optimizer)
        return [step(x, y) for _ in range(3)], model
    losses = []
    for _ in range(3):

        def closure():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).detach())
    return losses, model


class Lion(Optimizer):
    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if len(state) == 0:
                    state["exp_avg"] = torch.zeros_like(p)
                average = state["exp_avg"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(torch.sign(average * beta1 + p.grad * (1 - beta1)), alpha=-group["lr"])
                average.mul_(beta2).add_(p.grad, alpha=1 - beta2)


@program
def lion(run):
    return train(run, lambda p: Lion(p, lr=1e-3, weight_decay=0.1))


@program
def lion_with_a_cosine_rate(run):
    return train(
        run,
        lambda p: Lion(p, lr=1e-3),
        schedule=lambda i: 1e-3 * (1 + math.cos(math.pi * i / 12)) / 2,
        clip_norm=1.0,
    )


class LARS(Optimizer):
    def __init__(self, params, lr, momentum=0.9, weight_decay=1e-4, eta=0.01):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "eta": eta})

    @torch.no_grad()
    def step(self, closure=None):
        for g in self.param_groups:
            for p in g["params"]:
                d = p.grad
                if p.ndim > 1:
                    d = d.add(p, alpha=g["weight_decay"])
                    pn, gn = p.norm(), d.norm()
                    one = torch.ones_like(pn)
                    d = d * torch.where(pn > 0, torch.where(gn > 0, g["eta"] * pn / gn, one), one)
                state = self.state[p]
                if "mu" not in state:
                    state["mu"] = torch.zeros_like(p)
                state["mu"].mul_(g["momentum"]).add_(d)
                p.add_(state["mu"], alpha=-g["lr"])


@program
def lars(run):
    return train(run, lambda p: LARS(p, lr=1.0))


class LAMB(Optimizer):
    """Counts in Python and reads norms on the host, as many copies of it do."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"], state["m"], state["v"] = 0, torch.zeros_like(p), torch.zeros_like(p)
                state["step"] += 1
                b1, b2 = group["betas"]
                state["m"].mul_(b1).add_(p.grad, alpha=1 - b1)
                state["v"].mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
                m, v = state["m"] / (1 - b1 ** state["step"]), state["v"] / (1 - b2 ** state["step"])
                update = m / (v.sqrt() + group["eps"]) + group["weight_decay"] * p
                ratio = p.norm().item() / max(update.norm().item(), 1e-12)
                p.add_(update, alpha=-group["lr"] * min(max(ratio, 0.01), 10))


@program
def lamb_that_counts_in_python(run):
    return train(run, lambda p: LAMB(p, lr=1e-2), clip_norm=1.0)


class Lookahead(Optimizer):
    def __init__(self, base, k=5, alpha=0.5):
        self.base, self.k, self.alpha = base, k, alpha
        self.param_groups, self.defaults = base.param_groups, base.defaults
        self.state = defaultdict(dict)
        self.counter = 0
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}

    def zero_grad(self, set_to_none=True):
        self.base.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure=None):
        self.base.step()
        self.counter += 1
        for group in self.param_groups:
            for p in group["params"]:
                slow = self.state[p].setdefault("slow", p.clone())
                if self.counter % self.k == 0:
                    slow.lerp_(p, self.alpha)
                    p.copy_(slow)

    def state_dict(self):
        return {"base": self.base.state_dict(), "counter": self.counter}


@program
def lookahead_around_adam(run):
    model = mlp(16, 24, 4).to(run.device)
    optimizer = Lookahead(torch.optim.Adam(model.parameters(), lr=1e-2))
    step = run.train_step(model, nn.CrossEntropyLoss(), optimizer)
    return [step(x, y) for x, y in vectors(run, 14)], model, optimizer.counter


class SAM(Optimizer):
    """Sharpness-aware minimisation with a closure."""

    def __init__(self, params, base, rho=0.05, **options):
        super().__init__(params, {"rho": rho, **options})
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure=None):
        assert closure is not None, "SAM requires a closure"
        closure = torch.enable_grad()(closure)
        norm = torch.stack([p.grad.norm() for g in self.param_groups for p in g["params"]]).norm()
        for g in self.param_groups:
            for p in g["params"]:
                self.state[p]["old"] = p.clone()
                p.add_(p.grad * (g["rho"] / (norm + 1e-12)))
        self.zero_grad()
        closure()
        for g in self.param_groups:
            for p in g["params"]:
                p.copy_(self.state[p]["old"])
        self.base.step()


@program
def sharpness_aware_minimisation_with_a_closure(run):
    model = mlp(16, 24, 4).to(run.device)
    optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    step = run.train_step(model, nn.CrossEntropyLoss(), optimizer)
    try:
        return [step(x, y) for x, y in vectors(run, 4)], model
    except AssertionError as error:  # of the optimizer's own, as without graphs
        return str(error), model


@program
def sharpness_aware_minimisation_around_parts(run):
    """The forward and backward from graphs, both steps by hand."""
    model = mlp(16, 24, 4).to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = vectors(run, 8)
    net = run.parts(model, (batches[0][0],))
    losses = []
    for x, y in batches:
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
            moves = [p.grad * (0.05 / (norm + 1e-12)) for p in model.parameters()]
            for p, e in zip(model.parameters(), moves, strict=True):
                p.add_(e)
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        with torch.no_grad():
            for p, e in zip(model.parameters(), moves, strict=True):
                p.sub_(e)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, model.state_dict()


class SignSGD(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.sign_()
        return super().step(closure)


@program
def a_subclass_of_sgd(run):
    return train(run, lambda p: SignSGD(p, lr=1e-3))


class GradualNoise(torch.optim.Adam):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.add_(torch.randn_like(p.grad), alpha=1e-3)
        return super().step(closure)


@program
def gradient_noise_in_a_subclass_of_adam(run):
    return train(run, lambda p: GradualNoise(p, lr=1e-2))


@program
def adam_with_centralized_gradients_by_hooks(run):
    model = mlp(16, 24, 4).to(run.device)
    for p in model.parameters():
        if p.dim() > 1:
            p.register_hook(lambda g: g - g.mean(1, keepdim=True))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    step = run.train_step(model, nn.CrossEntropyLoss(), optimizer)
    return [step(x, y) for x, y in vectors(run, 10)], model


@program
def clip_by_value_with_hooks(run):
    model = mlp(16, 24, 4).to(run.device)
    for p in model.parameters():
        p.register_hook(lambda g: g.clamp(-0.01, 0.01))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step = run.train_step(model, nn.CrossEntropyLoss(), optimizer)
    return [step(x, y) for x, y in vectors(run, 10)], model


@program
def clip_by_value_in_a_step_hook(run):
    model = mlp(16, 24, 4).to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer.register_step_pre_hook(
        lambda o, args, kwargs: torch.nn.utils.clip_grad_value_(model.parameters(), 0.01) and None
    )
    step = run.train_step(model, nn.CrossEntropyLoss(), optimizer)
    return [step(x, y) for x, y in vectors(run, 10)], model


@program
def weights_clamped_in_a_step_hook(run):
    model = mlp(16, 24, 1).to(run.device)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=5e-3)
    count = []

    def clamp(o, args, kwargs):
        count.append(1)
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-0.1, 0.1)

    optimizer.register_step_post_hook(clamp)
    step = run.train_step(model, lambda out, y: (out.squeeze(-1) * (2.0 * (y > 1) - 1)).mean(), optimizer)
    return [step(x, y) for x, y in vectors(run, 10)], model, len(count)


@program
def decay_groups_by_name(run):
    model = ConvNet().to(run.device)
    decay, rest = [], []
    for name, p in model.named_parameters():
        (rest if p.ndim <= 1 or name.endswith(".bias") else decay).append(p)
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}], lr=3e-3
    )
    step = run.train_step(model, nn.CrossEntropyLoss(), optimizer)
    return [step(x, y) for x, y in images(run, 8)], model, optimizer


@program
def layer_wise_rates(run):
    model = mlp(16, 24, 24, 4).to(run.device)
    layers = [m for m in model if isinstance(m, nn.Linear)]
    groups = [
        {"params": m.parameters(), "lr": 1e-2 * 0.65 ** (len(layers) - i)} for i, m in enumerate(layers)
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min(1.0, (i + 1) / 4))
    step = run.train_step(model, nn.CrossEntropyLoss(), optimizer)
    losses, rates = [], []
    for x, y in vectors(run, 10):
        losses.append(step(x, y))
        scheduler.step()
        rates.append([g["lr"] for g in optimizer.param_groups])
    return losses, rates, model, optimizer


@program
def weight_decay_that_follows_a_schedule(run):
    model = mlp(16, 24, 4).to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.04)
    step = run.train_step(model, nn.CrossEntropyLoss(), optimizer)
    losses = []
    for i, (x, y) in enumerate(vectors(run, 10)):
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.04 + 0.36 * i / 10
        losses.append(step(x, y))
    return losses, model, optimizer


@program
def optimizer_made_from_named_parameters(run):
    model = mlp(16, 24, 4).to(run.device)
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=1e-2)
    step = run.train_step(model, nn.CrossEntropyLoss(), optimizer)
    return [step(x, y) for x, y in vectors(run, 8)], model, optimizer


@program
def second_phase_with_another_optimizer(run):
    model = mlp(16, 24, 4).to(run.device)
    adam = torch.optim.Adam(model.parameters(), lr=1e-2)
    step, losses = run.train_step(model, nn.CrossEntropyLoss(), adam), []
    batches = vectors(run, 12)
    losses += [step(x, y) for x, y in batches[:6]]
    sgd = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    step = run.train_step(model, nn.CrossEntropyLoss(), sgd)
    losses += [step(x, y) for x, y in batches[6:]]
    return losses, model, adam, sgd
