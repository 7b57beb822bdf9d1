"""Training loops as people write them. Each is given `make_step`, and returns its losses and what it trained.

`make_step(model, loss_fn, optimizer, **settings)` is either `graphed_train_step` or the plain loop below.
"""

import copy
import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from contract.training_loops import VOCABULARY, TinyGpt, cross_entropy, make_batches

Program = Callable[[Any, torch.device], tuple[list[Any], list[nn.Module]]]
PROGRAMS: dict[str, Program] = {}
STEPS = 8


def program(function: Program) -> Program:
    PROGRAMS[function.__name__] = function
    return function


class PlainStep:
    """What a loop does without graphs."""

    def __init__(
        self, model, loss_fn, optimizer, *, accumulate=1, clip_norm=None, autocast=None, ladder=None
    ):
        self.model, self.loss_fn, self.optimizer = model, loss_fn, optimizer
        self.accumulate, self.clip_norm, self.autocast, self.count = accumulate, clip_norm, autocast, 0
        optimizer.zero_grad()

    def __call__(self, inputs, targets, last=False):
        if self.count == 0:
            self.optimizer.zero_grad()
        device = next(self.model.parameters()).device.type
        with torch.autocast(device, dtype=self.autocast, enabled=self.autocast is not None):
            if isinstance(inputs, dict):
                outputs = self.model(**inputs)
            else:
                outputs = self.model(*inputs) if isinstance(inputs, tuple) else self.model(inputs)
            result = self.loss_fn(outputs, targets)
        loss = result[0] if isinstance(result, tuple) else result
        (loss / self.accumulate).backward()
        self.count += 1
        if self.count == self.accumulate:
            if self.clip_norm is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
            self.optimizer.step()
            self.count = 0
        if isinstance(result, tuple):
            return (loss.detach(), *(each.detach().clone() for each in result[1:]))
        return loss.detach()


def made(seed: int, device: torch.device, make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make().to(device)


def mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for one, other in pairwise(sizes):
        layers += [nn.Linear(one, other), nn.GELU()]
    return nn.Sequential(*layers[:-1])


def vectors(device, rows, *sizes, steps=STEPS, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        tuple(torch.randn(rows, size, generator=generator).to(device) for size in sizes) for _ in range(steps)
    ]


def classified(device, rows=8, size=6, classes=4, steps=STEPS, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(rows, size, generator=generator).to(device),
            torch.randint(classes, (rows,), generator=generator).to(device),
        )
        for _ in range(steps)
    ]


def fused(model, lr=0.01, **settings):
    parameters = model.parameters() if isinstance(model, nn.Module) else model
    return torch.optim.AdamW(parameters, lr=lr, fused=True, **settings)


def plain_sgd(model):
    """For padded lengths: of gradients that are zero up to rounding, AdamW makes steps."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)


# -- supervised -----------------------------------------------------------------------------------------


@program
def classifier(make_step, device):
    model = made(0, device, lambda: mlp(6, 16, 4))
    step = make_step(model, F.cross_entropy, fused(model))
    return [step(*batch) for batch in classified(device)], [model]


@program
def label_smoothing(make_step, device):
    model = made(0, device, lambda: mlp(6, 16, 4))
    loss_fn = nn.CrossEntropyLoss(label_smoothing=0.1)
    step = make_step(model, loss_fn, fused(model), clip_norm=0.5)
    return [step(*batch) for batch in classified(device)], [model]


@program
def class_weights(make_step, device):
    model = made(0, device, lambda: mlp(6, 16, 4))
    loss_fn = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5, 1.0], device=device))
    step = make_step(model, loss_fn, fused(model))
    return [step(*batch) for batch in classified(device)], [model]


@program
def mixup(make_step, device):
    model = made(0, device, lambda: mlp(6, 16, 4))
    step = make_step(model, F.cross_entropy, fused(model))
    losses, generator = [], torch.Generator().manual_seed(1)
    for x, y in classified(device):
        share = torch.rand((), generator=generator).item()
        order = torch.randperm(len(x), generator=generator).to(device)
        hot = F.one_hot(y, 4).float()
        losses.append(step(x * share + x[order] * (1 - share), hot * share + hot[order] * (1 - share)))
    return losses, [model]


@program
def focal(make_step, device):
    model = made(0, device, lambda: mlp(6, 16, 4))

    def loss_fn(logits, y):
        each = F.cross_entropy(logits, y, reduction="none")
        return ((1 - torch.exp(-each)) ** 2 * each).mean()

    step = make_step(model, loss_fn, fused(model))
    return [step(*batch) for batch in classified(device)], [model]


@program
def images_with_batch_norm(make_step, device):
    model = made(
        0,
        device,
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 3)
        ),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, fused=True)
    step = make_step(model, F.cross_entropy, optimizer)
    batches = [(x.view(4, 1, 6, 6), torch.arange(4, device=device) % 3) for (x,) in vectors(device, 4, 36)]
    return [step(*batch) for batch in batches], [model]


@program
def metrics_beside_the_loss(make_step, device):
    model = made(0, device, lambda: mlp(6, 16, 4))

    def loss_fn(logits, y):
        return F.cross_entropy(logits, y), (logits.argmax(-1) == y).float().mean()

    step, losses = make_step(model, loss_fn, fused(model)), []
    for batch in classified(device):
        losses += step(*batch)
    return losses, [model]


@program
def multi_task(make_step, device):
    class TwoHeads(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.a, self.b = mlp(6, 16), nn.Linear(16, 3), nn.Linear(16, 1)
            self.scales = nn.Parameter(torch.zeros(2))

        def forward(self, x):
            h = F.gelu(self.body(x))
            return {"a": self.a(h), "b": self.b(h), "scales": self.scales}

    model = made(0, device, TwoHeads)

    def loss_fn(out, targets):
        both = torch.stack([F.cross_entropy(out["a"], targets["a"]), F.mse_loss(out["b"], targets["b"])])
        return (both * torch.exp(-out["scales"]) + out["scales"]).sum()

    step = make_step(model, loss_fn, fused(model))
    batches = zip(classified(device, classes=3), vectors(device, 8, 1), strict=True)
    return [step(x, {"a": y, "b": z}) for (x, y), (z,) in batches], [model]


@program
def ctc(make_step, device):
    model = made(0, device, lambda: mlp(5, 16, 6))
    lengths = torch.full((3,), 10), torch.tensor([4, 3, 2])

    def loss_fn(logits, targets):
        return F.ctc_loss(logits.transpose(0, 1).log_softmax(-1).cpu(), targets.cpu(), *lengths)

    def padded_by_hand(logits, targets):
        hot = F.one_hot(targets, 6).float()
        return -(logits.log_softmax(-1)[:, :4] * hot).sum(-1).mean()

    step = make_step(model, loss_fn if device.type == "cpu" else padded_by_hand, fused(model))
    generator, losses = torch.Generator().manual_seed(2), []
    for _ in range(STEPS):
        x = torch.randn(3, 10, 5, generator=generator).to(device)
        losses.append(step(x, torch.randint(1, 6, (3, 4), generator=generator).to(device)))
    return losses, [model]


@program
def regression_with_huber_and_two_inputs(make_step, device):
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp(7, 16, 1)

        def forward(self, x, z):
            return self.net(torch.cat([x, z], -1))

    model = made(0, device, Both)
    step = make_step(model, nn.HuberLoss(), torch.optim.RMSprop(model.parameters(), lr=0.01))
    return [step((x, z), y) for x, z, y in vectors(device, 8, 4, 3, 1)], [model]


# -- generative -----------------------------------------------------------------------------------------


@program
def vae_with_warm_up(make_step, device):
    class Vae(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = mlp(8, 16, 4), mlp(2, 16, 8)

        def forward(self, x):
            mean, log = self.encoder(x).chunk(2, -1)
            return self.decoder(mean + torch.randn_like(mean) * (log / 2).exp()), mean, log

    model = made(0, device, Vae)
    weight = torch.zeros((), device=device)

    def loss_fn(out, x):
        again, mean, log = out
        kl = -0.5 * (1 + log - mean.square() - log.exp()).sum(-1).mean()
        return F.mse_loss(again, x) + weight * kl, kl

    step, losses = make_step(model, loss_fn, fused(model)), []
    torch.manual_seed(7)
    for number, (x,) in enumerate(vectors(device, 8, 8)):
        weight.fill_(min(1.0, number / 4))
        losses += step(x, x)
    return losses, [model]


@program
def gan_of_two_steps(make_step, device):
    generator, critic = made(0, device, lambda: mlp(4, 16, 8)), made(1, device, lambda: mlp(8, 16, 1))

    class Through(nn.Module):
        """The generator, judged by a critic that stays as it is."""

        def __init__(self):
            super().__init__()
            self.generator = generator

        def forward(self, z):
            return critic(self.generator(z))

    def of_critic(scores, labels):
        return F.binary_cross_entropy_with_logits(scores, labels)

    ours = fused(critic, lr=2e-3, betas=(0.5, 0.999)), fused(generator, lr=2e-3, betas=(0.5, 0.999))
    critic_step = make_step(critic, of_critic, ours[0])
    generator_step = make_step(Through(), lambda scores, _: F.softplus(-scores).mean(), ours[1])
    labels = torch.cat([torch.ones(6, 1), torch.zeros(6, 1)]).to(device)
    losses = []
    for real, z in vectors(device, 6, 8, 4):
        with torch.no_grad():
            fake = generator(z)
        losses.append(critic_step(torch.cat([real, fake]), labels))
        losses.append(generator_step(z, z))
    return losses, [generator, critic]


@program
def wasserstein_with_a_gradient_penalty(make_step, device):
    critic = made(1, device, lambda: mlp(8, 16, 1))

    def loss_fn(scores, both):
        real, fake = both
        share = torch.rand(len(real), 1, device=device)
        between = (share * real + (1 - share) * fake).requires_grad_()
        (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        return critic(fake).mean() - scores.mean() + 10 * (slope.norm(2, 1) - 1).square().mean()

    step = make_step(critic, loss_fn, fused(critic, betas=(0.0, 0.9)))
    torch.manual_seed(3)
    return [step(real, (real, fake)) for real, fake in vectors(device, 6, 8, 8)], [critic]


@program
def diffusion(make_step, device):
    class Noise(nn.Module):
        def __init__(self):
            super().__init__()
            self.times, self.net = nn.Embedding(10, 4), mlp(12, 16, 8)

        def forward(self, x, t):
            return self.net(torch.cat([x, self.times(t)], -1))

    model = made(0, device, Noise)
    kept = torch.cumprod(1 - torch.linspace(1e-3, 0.2, 10), 0).to(device)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    step, losses = make_step(model, F.mse_loss, fused(model), clip_norm=1.0), []
    generator = torch.Generator().manual_seed(4)
    for x, noise in vectors(device, 8, 8, 8):
        t = torch.randint(10, (8,), generator=generator).to(device)
        share = kept[t, None]
        losses.append(step((share.sqrt() * x + (1 - share).sqrt() * noise, t), noise))
        ema.update_parameters(model)
    return losses, [model, ema.module]


@program
def codebook(make_step, device):
    class Quantised(nn.Module):
        """VQ-VAE with a codebook that follows its use, in place."""

        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = mlp(8, 16, 4), mlp(4, 16, 8)
            self.register_buffer("codes", torch.randn(5, 4))
            self.register_buffer("used", torch.ones(5))

        def forward(self, x):
            z = self.encoder(x)
            nearest = torch.cdist(z, self.codes).argmin(-1)
            code = self.codes[nearest]
            if self.training:
                hot = F.one_hot(nearest, 5).to(z.dtype)
                self.used.mul_(0.9).add_(hot.sum(0), alpha=0.1)
                target = hot.t() @ z.detach() / hot.sum(0).clamp(min=1)[:, None]
                self.codes.copy_(
                    torch.where(hot.sum(0)[:, None] > 0, self.codes.lerp(target, 0.1), self.codes)
                )
            return self.decoder(z + (code - z).detach()), z, code

    model = made(0, device, Quantised)

    def loss_fn(out, x):
        again, z, code = out
        return F.mse_loss(again, x) + 0.25 * F.mse_loss(z, code.detach())

    step = make_step(model, loss_fn, fused(model))
    return [step(x, x) for (x,) in vectors(device, 8, 8)], [model]


# -- representation -------------------------------------------------------------------------------------


@program
def contrastive_with_a_queue(make_step, device):
    class Moco(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.key = mlp(6, 16, 4), mlp(6, 16, 4)
            self.key.load_state_dict(self.query.state_dict())
            self.key.requires_grad_(False)
            self.register_buffer("queue", F.normalize(torch.randn(16, 4), dim=-1))
            self.register_buffer("at", torch.zeros((), dtype=torch.long))

        def forward(self, x, y):
            with torch.no_grad():
                for mine, theirs in zip(self.key.parameters(), self.query.parameters(), strict=True):
                    mine.lerp_(theirs, 0.1)
                key = F.normalize(self.key(y), dim=-1)
            query = F.normalize(self.query(x), dim=-1)
            scores = (
                torch.cat([(query * key).sum(-1, keepdim=True), query @ self.queue.clone().t()], -1) / 0.1
            )
            with torch.no_grad():
                self.queue.index_copy_(0, (self.at + torch.arange(len(key), device=x.device)) % 16, key)
                self.at.add_(len(key)).remainder_(16)
            return scores

    model = made(0, device, Moco)
    optimizer = torch.optim.SGD(model.query.parameters(), lr=0.05, momentum=0.9, fused=True)
    step = make_step(model, F.cross_entropy, optimizer)
    none = torch.zeros(4, dtype=torch.long, device=device)
    return [step((x, y), none) for x, y in vectors(device, 4, 6, 6)], [model]


@program
def teacher_that_follows(make_step, device):
    student, teacher = made(0, device, lambda: mlp(6, 16, 4)), made(0, device, lambda: mlp(6, 16, 4))
    teacher.requires_grad_(False)
    centre = torch.zeros(4, device=device)

    def loss_fn(out, view):
        with torch.no_grad():
            wanted = F.softmax((teacher(view) - centre) / 0.1, -1)
            centre.lerp_(teacher(view).mean(0), 0.1)
        return -(wanted * F.log_softmax(out, -1)).sum(-1).mean()

    step, losses = make_step(student, loss_fn, fused(student)), []
    for one, other in vectors(device, 8, 6, 6):
        losses.append(step(one, other))
        with torch.no_grad():
            for mine, theirs in zip(teacher.parameters(), student.parameters(), strict=True):
                mine.lerp_(theirs, 0.05)
    return losses, [student, teacher]


@program
def triplets(make_step, device):
    class Three(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp(6, 16, 4)

        def forward(self, a, p, n):
            return tuple(F.normalize(self.net(x), dim=-1) for x in (a, p, n))

    model = made(0, device, Three)
    step = make_step(model, lambda out, _: F.triplet_margin_loss(*out, margin=0.3), fused(model))
    return [step(batch, batch[0]) for batch in vectors(device, 8, 6, 6, 6)], [model]


@program
def clip_like(make_step, device):
    class Clip(nn.Module):
        def __init__(self):
            super().__init__()
            self.image, self.text = mlp(6, 16, 4), mlp(5, 16, 4)
            self.scale = nn.Parameter(torch.tensor(math.log(10)))

        def forward(self, image, text):
            a, b = F.normalize(self.image(image), dim=-1), F.normalize(self.text(text), dim=-1)
            return self.scale.exp() * a @ b.t(), self.scale

    model = made(0, device, Clip)

    def loss_fn(out, _):
        scores, scale = out
        own = torch.arange(scores.size(0), device=scores.device)
        return (F.cross_entropy(scores, own) + F.cross_entropy(scores.t(), own)) / 2, scale.exp()

    step, losses = make_step(model, loss_fn, fused(model)), []
    for image, text in vectors(device, 6, 6, 5):
        losses += step((image, text), image)
        with torch.no_grad():
            model.scale.clamp_(0, math.log(100))
    return losses, [model]


@program
def distillation(make_step, device):
    student, teacher = made(0, device, lambda: mlp(6, 8, 4)), made(1, device, lambda: mlp(6, 32, 4)).eval()
    step, losses = None, []

    def loss_fn(logits, targets):
        y, wanted = targets
        soft = F.kl_div(F.log_softmax(logits / 2, -1), F.softmax(wanted / 2, -1), reduction="batchmean") * 4
        return 0.5 * F.cross_entropy(logits, y) + 0.5 * soft

    step = make_step(student, loss_fn, fused(student))
    for x, y in classified(device):
        with torch.no_grad():
            wanted = teacher(x)
        losses.append(step(x, (y, wanted)))
    return losses, [student]


@program
def decorrelated_with_batch_norm(make_step, device):
    class Twins(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
            self.norm = nn.BatchNorm1d(4, affine=False)

        def forward(self, a, b):
            return self.norm(self.net(a)).t() @ self.norm(self.net(b)) / len(a)

    model = made(0, device, Twins)

    def loss_fn(c, _):
        return (c.diagonal() - 1).square().sum() + 0.01 * (c - torch.diag(c.diagonal())).square().sum()

    step = make_step(model, loss_fn, fused(model))
    return [step(batch, batch[0]) for batch in vectors(device, 8, 6, 6)], [model]


# -- language models ------------------------------------------------------------------------------------


@program
def language_model_of_changing_lengths(make_step, device):
    model = made(0, device, TinyGpt)
    step = make_step(model, cross_entropy, plain_sgd(model), ladder=[4, 8, 12], clip_norm=1.0)
    return [step(*batch) for batch in make_batches(device, [12, 7, 3, 8, 12, 4, 9, 5])], [model]


@program
def language_model_with_dropout_and_accumulation(make_step, device):
    model = made(0, device, lambda: TinyGpt(dropout=0.2))
    step = make_step(model, cross_entropy, fused(model), accumulate=2, clip_norm=1.0)
    torch.manual_seed(1)
    return [step(*batch) for batch in make_batches(device, [8] * STEPS)], [model]


@program
def language_model_in_bfloat16(make_step, device):
    model = made(0, device, TinyGpt)
    step = make_step(model, cross_entropy, fused(model), autocast=torch.bfloat16)
    return [step(*batch) for batch in make_batches(device, [8] * STEPS)], [model]


@program
def preferences(make_step, device):
    model = made(0, device, TinyGpt)
    reference = copy.deepcopy(model).requires_grad_(False).eval()

    def of_text(logits, ids):
        each = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        return each.sum(-1).chunk(2)

    def loss_fn(logits, ids):
        chosen, rejected = of_text(logits, ids)
        with torch.no_grad():
            before, behind = of_text(reference(ids), ids)
        margin = (chosen - before) - (rejected - behind)
        return -F.logsigmoid(0.1 * margin).mean(), (margin > 0).float().mean()

    step, losses = make_step(model, loss_fn, fused(model)), []
    for ids, _ in make_batches(device, [8] * STEPS, rows=4):
        losses += step(ids, ids)
    return losses, [model]


@program
def policy_gradient_with_clipping(make_step, device):
    policy = made(0, device, lambda: mlp(4, 16, 3))

    def loss_fn(logits, seen):
        action, before, advantage = seen
        log = logits.log_softmax(-1)
        ratio = (log.gather(-1, action[:, None]).squeeze(-1) - before).exp()
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        return -gain.mean() + 0.01 * (log.exp() * log).sum(-1).mean()

    step, losses = make_step(policy, loss_fn, fused(policy)), []
    generator = torch.Generator().manual_seed(2)
    for state, advantage in vectors(device, 8, 4, 1, steps=4):
        action = torch.randint(3, (8,), generator=generator).to(device)
        with torch.no_grad():
            before = policy(state).log_softmax(-1).gather(-1, action[:, None]).squeeze(-1)
        for _ in range(2):
            losses.append(step(state, (action, before, advantage.squeeze(-1))))
    return losses, [policy]


@program
def q_learning_with_a_target_network(make_step, device):
    online = made(0, device, lambda: mlp(4, 16, 3))
    target = copy.deepcopy(online).requires_grad_(False)

    def loss_fn(values, seen):
        action, reward, after = seen
        with torch.no_grad():
            wanted = reward + 0.9 * target(after).gather(-1, online(after).argmax(-1, keepdim=True))
        return F.smooth_l1_loss(values.gather(-1, action), wanted)

    step, losses = make_step(online, loss_fn, fused(online)), []
    generator = torch.Generator().manual_seed(2)
    for number, (state, reward, after) in enumerate(vectors(device, 8, 4, 1, 4)):
        action = torch.randint(3, (8, 1), generator=generator).to(device)
        losses.append(step(state, (action, reward, after)))
        if number % 3 == 2:
            target.load_state_dict(online.state_dict())
    return losses, [online, target]


@program
def low_rank_adapters(make_step, device):
    class Adapted(nn.Module):
        def __init__(self, inside):
            super().__init__()
            self.inside = inside.requires_grad_(False)
            self.a = nn.Parameter(torch.randn(2, inside.in_features) * 0.1)
            self.b = nn.Parameter(torch.zeros(inside.out_features, 2))

        def forward(self, x):
            return self.inside(x) + x @ self.a.t() @ self.b.t() * 2

    def build():
        model = mlp(6, 16, 4)
        model[0], model[2] = Adapted(model[0]), Adapted(model[2])
        return model

    model = made(0, device, build)
    optimizer = fused([p for p in model.parameters() if p.requires_grad])
    step = make_step(model, F.cross_entropy, optimizer)
    return [step(*batch) for batch in classified(device)], [model]


# -- optimizers and schedules ---------------------------------------------------------------------------


@program
def groups_without_decay_and_with_rates_of_layers(make_step, device):
    model = made(0, device, lambda: TinyGpt(layers=2))
    groups = []
    for depth, block in enumerate(model.blocks):
        for is_matrix in (False, True):
            own = [p for p in block.parameters() if (p.dim() > 1) == is_matrix]
            groups.append({"params": own, "lr": 0.01 * 0.8**depth, "weight_decay": 0.1 if is_matrix else 0.0})
    groups.append({"params": [model.embedding.weight], "lr": 0.02, "weight_decay": 0.0})
    optimizer = torch.optim.AdamW(groups, fused=True)
    rates = schedulers.LambdaLR(optimizer, lambda n: min(1, (n + 1) / 4))
    step, losses = make_step(model, cross_entropy, optimizer, clip_norm=1.0), []
    for batch in make_batches(device, [8] * STEPS):
        losses.append(step(*batch))
        rates.step()
        losses += rates.get_last_lr()
    return losses, [model]


@program
def warm_restarts(make_step, device):
    model = made(0, device, lambda: mlp(6, 16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    rates = schedulers.CosineAnnealingWarmRestarts(optimizer, 3, 2)
    step, losses = make_step(model, F.cross_entropy, optimizer), []
    for number, batch in enumerate(classified(device)):
        losses.append(step(*batch))
        rates.step(number / 2)
        losses.append(optimizer.param_groups[0]["lr"])
    return losses, [model]


@program
def plateau_and_early_stopping(make_step, device):
    model = made(0, device, lambda: mlp(6, 16, 4))
    optimizer = fused(model, lr=0.3)
    rates = schedulers.ReduceLROnPlateau(optimizer, factor=0.3, patience=0)
    step, losses, best, kept, bad = make_step(model, F.cross_entropy, optimizer), [], math.inf, None, 0
    held_out = classified(device, seed=9)[0]
    for batch in classified(device, steps=20):
        losses.append(step(*batch))
        model.eval()
        with torch.no_grad():
            loss = F.cross_entropy(model(held_out[0]), held_out[1]).item()
        model.train()
        rates.step(round(loss, 3))
        losses.append(optimizer.param_groups[0]["lr"])
        best, bad, kept = (
            (loss, 0, copy.deepcopy(model.state_dict())) if loss < best else (best, bad + 1, kept)
        )
        if bad > 6:
            break
    model.load_state_dict(kept)
    return losses, [model]


@program
def one_cycle_of_momentum(make_step, device):
    model = made(0, device, lambda: mlp(6, 16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    rates = schedulers.OneCycleLR(optimizer, 0.2, total_steps=STEPS + 1)
    step, losses = make_step(model, F.cross_entropy, optimizer), []
    for batch in classified(device):
        losses.append(step(*batch))
        rates.step()
        losses.append(optimizer.param_groups[0]["lr"] + optimizer.param_groups[0]["momentum"])
    return losses, [model]


@program
def checkpoint_and_resume(make_step, device):
    losses, saved = [], None
    batches = make_batches(device, [8] * STEPS)
    for start, end in ((0, STEPS // 2), (STEPS // 2, STEPS)):
        model = made(0, device, TinyGpt)
        optimizer = fused(model)
        rates = schedulers.ExponentialLR(optimizer, 0.9)
        if saved is not None:
            for part, state in zip((model, optimizer, rates), saved, strict=True):
                part.load_state_dict(state)
        step = make_step(model, cross_entropy, optimizer)
        for batch in batches[start:end]:
            losses.append(step(*batch))
            rates.step()
        saved = copy.deepcopy([model.state_dict(), optimizer.state_dict(), rates.state_dict()])
    return losses, [model]


@program
def freeze_then_fine_tune(make_step, device):
    model = made(0, device, lambda: mlp(6, 16, 4))
    losses = []
    for lr, trained in ((0.02, model[2]), (0.005, model)):
        model.requires_grad_(False)
        trained.requires_grad_(True)
        optimizer = fused([p for p in model.parameters() if p.requires_grad], lr=lr)
        step = make_step(model, F.cross_entropy, optimizer)
        losses += [step(*batch) for batch in classified(device, steps=5)]
    return losses, [model]


@program
def two_optimizers_of_parts(make_step, device):
    """Alternating: each trains its part of one model."""
    model = made(0, device, lambda: mlp(6, 16, 4))
    optimizers = fused(model[0]), torch.optim.SGD(model[2].parameters(), lr=0.1, fused=True)
    steps = [make_step(model, F.cross_entropy, each) for each in optimizers]
    losses = []
    for number, batch in enumerate(classified(device)):
        losses.append(steps[number % 2](*batch))
        model.zero_grad()
    return losses, [model]


@program
def averaged_weights(make_step, device):
    model = made(0, device, lambda: mlp(6, 16, 4))
    optimizer, average = fused(model), AveragedModel(model)
    step, losses = make_step(model, F.cross_entropy, optimizer), []
    for number, batch in enumerate(classified(device)):
        losses.append(step(*batch))
        if number >= 4:
            average.update_parameters(model)
    return losses, [model, average.module]


@program
def rates_set_by_hand(make_step, device):
    model = made(0, device, lambda: mlp(6, 16, 4))
    optimizer, rates = torch.optim.Adam(model.parameters(), lr=0.0, fused=True), []
    step, losses = make_step(model, F.cross_entropy, optimizer), []
    for number, batch in enumerate(classified(device)):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * 0.5 * (1 + math.cos(math.pi * number / STEPS))
        losses.append(step(*batch))
        rates.append(optimizer.param_groups[0]["lr"])
    return losses + rates, [model]


@program
def noise_on_weights_between_steps(make_step, device):
    model = made(0, device, lambda: mlp(6, 16, 4))
    step, losses = make_step(model, F.cross_entropy, fused(model)), []
    torch.manual_seed(2)
    for batch in classified(device):
        losses.append(step(*batch))
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn(p.shape).to(device), alpha=1e-3)
            model[0].weight.renorm_(2, 0, 1.0)
    return losses, [model]


@program
def gradients_logged_between_steps(make_step, device):
    model = made(0, device, lambda: mlp(6, 16, 4))
    step, losses = make_step(model, F.cross_entropy, fused(model)), []
    for batch in classified(device):
        losses.append(step(*batch))
        losses.append(torch.stack([p.grad.norm() for p in model.parameters()]).norm())
    return losses, [model]


@program
def curriculum_of_batches(make_step, device):
    """Rows and lengths grow."""
    model = made(0, device, TinyGpt)
    step, losses = make_step(model, cross_entropy, plain_sgd(model), ladder=[4, 8]), []
    for rows, length in ((2, 4), (2, 4), (2, 8), (3, 8), (3, 8), (4, 8), (2, 5)):
        losses.append(step(*make_batches(device, [length], rows=rows)[0]))
    return losses, [model]


@program
def recurrent_network_with_tied_state(make_step, device):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.cell = nn.Embedding(VOCABULARY, 8), nn.GRU(8, 8, batch_first=True)
            self.head = nn.Linear(8, VOCABULARY)

        def forward(self, ids):
            return self.head(self.cell(self.embedding(ids))[0])

    model = made(0, device, Recurrent)
    step = make_step(model, cross_entropy, fused(model), clip_norm=0.25)
    return [step(*batch) for batch in make_batches(device, [8] * STEPS)], [model]


@program
def physics_informed(make_step, device):
    class Field(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))

        def forward(self, x):
            x = x.detach().requires_grad_()
            u = self.net(x)
            (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
            (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
            return u, second

    model = made(0, device, Field)
    step = make_step(model, lambda out, x: (out[1] + out[0]).square().mean(), fused(model))
    return [step(x, x) for (x,) in vectors(device, 8, 1)], [model]
