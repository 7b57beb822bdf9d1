"""Diffusion samplers and their schedules."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from corpus.registry import World, program


class Denoiser(nn.Module):
    def __init__(self, dim=4):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8))
        self.conv1, self.conv2 = nn.Conv2d(dim, 8, 3, padding=1), nn.Conv2d(8, dim, 3, padding=1)

    def embed(self, t):
        freqs = torch.exp(-math.log(10000) * torch.arange(4, device=t.device) / 4)
        angles = t[:, None].float() * freqs
        return self.time(torch.cat([angles.sin(), angles.cos()], -1))

    def forward(self, x, t):
        return self.conv2(F.silu(self.conv1(x) + self.embed(t)[..., None, None]))


class Scheduler:
    """DDIM, with tensors on the host as people have them."""

    def __init__(self, steps=20):
        self.alphas = torch.cumprod(1 - torch.linspace(1e-4, 0.02, steps), 0)
        self.timesteps = list(range(steps - 1, -1, -5))

    def step(self, noise, t, x):
        a = self.alphas[t]
        before = self.alphas[t - 5] if t >= 5 else torch.tensor(1.0)
        x0 = (x - (1 - a).sqrt() * noise) / a.sqrt()
        return before.sqrt() * x0 + (1 - before).sqrt() * noise


@program("ddim loop, time step for each row", tags=["diffusion", "feedback"])
def ddim(world: World):
    f = world.graphed(Denoiser().to(world.device).eval(), ladder=[1, 2, 4])
    scheduler = Scheduler()
    with torch.inference_mode():
        for n in (2, 3):
            x = world.randn(n, 4, 4, 4)
            for t in scheduler.timesteps:
                noise = f(x, torch.full((n,), t, device=world.device))
                x = scheduler.step(noise, t, x)
            yield x
    world.diagnose(f, world.randn(2, 4, 4, 4), torch.zeros(2, dtype=torch.int64, device=world.device))


@program("denoiser with one time step for the batch, shared", tags=["diffusion", "shared"])
def shared_time(world: World):
    model = Denoiser().to(world.device).eval()

    def step(x, t):
        return model(x, t.expand(x.shape[0]))

    f = world.graphed(step, ladder=[1, 2, 4], shared=["t"])
    with torch.no_grad():
        for n in (3, 4):
            for t in (15, 3):
                yield f(world.randn(n, 4, 4, 4), torch.tensor([t], device=world.device))
    world.diagnose(f, world.randn(3, 4, 4, 4), torch.tensor([4], device=world.device))


@program("denoiser with a time step of no dimensions, not declared", tags=["diffusion", "shared"])
def scalar_time(world: World):
    model = Denoiser().to(world.device).eval()

    def step(x, t):
        return model(x, t.expand(x.shape[0]))

    f = world.graphed(step, ladder=[1, 2, 4])
    with torch.no_grad():
        for n in (3, 4):
            for t in (15, 3):
                yield f(world.randn(n, 4, 4, 4), torch.tensor(t, device=world.device))
    world.diagnose(f, world.randn(3, 4, 4, 4), torch.tensor(4, device=world.device))


@program("denoiser with the time step as a Python number", tags=["diffusion", "python"])
def python_time(world: World):
    model = Denoiser().to(world.device).eval()

    def step(x, t):
        return x - 0.1 * model(x, torch.full((x.shape[0],), t, device=x.device))

    f = world.graphed(step, ladder=[1, 2, 4])
    x = world.randn(2, 4, 4, 4)
    with torch.no_grad():
        for t in (15, 10, 5, 15, 0):
            x = f(x, t)
        yield x
    world.diagnose(f, x, 15)


@program("guidance with a doubled batch in the loop", tags=["diffusion", "feedback"])
def classifier_free(world: World):
    class Conditional(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.cond = Denoiser(), nn.Linear(3, 4)

        def forward(self, x, t, c):
            return self.net(x + self.cond(c)[..., None, None], t)

    f = world.graphed(Conditional().to(world.device).eval(), ladder=[2, 4, 6])
    empty = torch.zeros(1, 3, device=world.device)
    with torch.no_grad():
        for n in (1, 2, 3):
            x, c = world.randn(n, 4, 4, 4), world.randn(n, 3)
            for t in (12, 6):
                times = torch.full((2 * n,), t, device=world.device)
                out = f(torch.cat([x, x]), times, torch.cat([empty.expand(n, -1), c]))
                uncond, cond = out.chunk(2)
                x = x - 0.1 * (uncond + 4 * (cond - uncond))
            yield x
    world.diagnose(f, world.randn(2, 4, 4, 4), torch.zeros(2, device=world.device).long(), world.randn(2, 3))


@program("ancestral sampling with noise drawn inside", tags=["diffusion", "random", "feedback"])
def ancestral(world: World):
    model = Denoiser().to(world.device).eval()

    def step(x, t, sigma):
        return x - 0.1 * model(x, t) + sigma[:, None, None, None] * torch.randn_like(x)

    f = world.graphed(step, ladder=[2, 4])
    with torch.no_grad():
        x0, t = world.randn(4, 4, 4, 4), torch.full((4,), 3, device=world.device)
        zero, one = torch.zeros(4, device=world.device), torch.ones(4, device=world.device)
        quiet = f(x0, t, zero).clone()
        yield quiet
        a, b = f(x0, t, one).clone(), f(x0, t, one).clone()
        yield torch.equal(a, b), 0.5 < float((a - quiet).std()) < 1.5
        torch.manual_seed(5)
        a = f(x0, t, one).clone()
        torch.manual_seed(5)
        yield torch.equal(a, f(x0, t, one))
        yield f(x0[:3], t[:3], zero[:3])
    world.diagnose(f, x0, t, one)


@program("scheduler object that counts its steps", tags=["diffusion", "python-state"])
def counting_scheduler(world: World):
    class Euler:
        def __init__(self):
            self.sigmas = torch.linspace(1, 0, 6).tolist()
            self.index = 0

        def step(self, x, d):
            x = x + (self.sigmas[self.index + 1] - self.sigmas[self.index]) * d
            self.index += 1
            return x

    model, scheduler = Denoiser().to(world.device).eval(), Euler()

    def sample_step(x, t):
        return scheduler.step(x, model(x, t))

    f = world.graphed(sample_step, ladder=[1, 2])
    x, t = world.randn(2, 4, 4, 4), torch.zeros(2, device=world.device)
    with torch.no_grad():
        for _ in range(5):
            x = f(x, t)
            yield x
    yield scheduler.index
    world.watch(scheduler)
    scheduler.index = 0
    world.diagnose(f, x, t)


@program("scheduler object that counts its steps, uneven steps", tags=["diffusion", "python-state"])
def uneven_scheduler(world: World):
    class Euler:
        def __init__(self):
            self.sigmas = (torch.linspace(1, 0, 6) ** 3).tolist()
            self.index = 0

        def step(self, x, d):
            x = x + (self.sigmas[self.index + 1] - self.sigmas[self.index]) * d
            self.index += 1
            return x

    model, scheduler = Denoiser().to(world.device).eval(), Euler()

    def sample_step(x, t):
        return scheduler.step(x, model(x, t))

    f = world.graphed(sample_step, ladder=[1, 2])
    x, t = world.randn(2, 4, 4, 4), torch.zeros(2, device=world.device)
    with torch.no_grad():
        for _ in range(5):
            x = f(x, t)
            yield x
    yield scheduler.index
    world.watch(scheduler)
    scheduler.index = 0
    world.diagnose(f, x, t)


@program("rectified flow: all steps inside one graph", tags=["diffusion"])
def rectified_flow(world: World):
    model = Denoiser().to(world.device).eval()

    @torch.no_grad()
    def sample(x):
        steps = 4
        for i in range(steps):
            t = torch.full((x.shape[0],), i / steps, device=x.device)
            x = x + model(x, t) / steps
        return x.clamp(-1, 1)

    f = world.graphed(sample, ladder=[1, 2, 4])
    for n in (1, 3, 4):
        yield f(world.randn(n, 4, 4, 4))
    world.diagnose(f, world.randn(3, 4, 4, 4))


@program("heun's method with a model called twice a step", tags=["diffusion", "feedback"])
def heun(world: World):
    f = world.graphed(Denoiser().to(world.device).eval(), ladder=[1, 2, 4])
    with torch.no_grad():
        x = world.randn(3, 4, 4, 4)
        for i in range(3):
            t = torch.full((3,), i, device=world.device)
            d1 = f(x, t)
            d2 = f(x - 0.2 * d1, t + 1)
            x = x - 0.1 * (d1 + d2)
        yield x
    world.diagnose(f, x, t)


@program("latents edited in place between steps (inpainting)", tags=["diffusion", "results-edited"])
def inpainting(world: World):
    f = world.graphed(Denoiser().to(world.device).eval(), ladder=[1, 2])
    known, mask = world.randn(2, 4, 4, 4), world.randint(2, 2, 1, 4, 4).bool()
    with torch.no_grad():
        x = world.randn(2, 4, 4, 4)
        for i in range(4):
            x = f(x, torch.full((2,), i, device=world.device))
            x[mask.expand_as(x)] = known[mask.expand_as(x)]
            x.mul_(0.9)
        yield x
    world.diagnose(f, x, torch.zeros(2, device=world.device, dtype=torch.int64))


@program("ema of weights swapped in for sampling", tags=["diffusion", "changes"])
def ema_weights(world: World):
    model = Denoiser().to(world.device).eval()
    ema = {k: v * 0.5 for k, v in model.state_dict().items()}
    f = world.graphed(model, ladder=[1, 2])
    x, t = world.randn(2, 4, 4, 4), torch.ones(2, device=world.device)
    with torch.no_grad():
        yield f(x, t)
        backup = {k: v.clone() for k, v in model.state_dict().items()}
        model.load_state_dict(ema)
        yield f(x, t)
        model.load_state_dict(backup)
        yield f(x, t)
    world.diagnose(f, x, t)


@program("generator passed for reproducible noise", tags=["diffusion", "random"])
def generator(world: World):
    model = Denoiser().to(world.device).eval()
    rng = torch.Generator(world.device)

    def step(x, t):
        noise = torch.randn(x.shape, generator=rng, device=x.device)
        return model(x, t) + 0.1 * noise

    f = world.graphed(step, ladder=[2])
    x, t = world.randn(2, 4, 4, 4), torch.ones(2, device=world.device)
    with torch.no_grad():
        for seed in (3, 4, 3):
            rng.manual_seed(seed)
            yield f(x, t)
            yield f(x, t)
    world.diagnose(f, x, t)
