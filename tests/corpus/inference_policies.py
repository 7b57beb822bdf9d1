"""Reinforcement learning, time series, audio, control."""

from collections import deque, namedtuple

import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical, Normal
from torch.nn import functional as F

from corpus.registry import World, program


class Policy(nn.Module):
    def __init__(self, observations=4, actions=3):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(observations, 16), nn.Tanh())
        self.actor, self.critic = nn.Linear(16, actions), nn.Linear(16, 1)

    def forward(self, obs):
        h = self.body(obs)
        return self.actor(h), self.critic(h).squeeze(-1)

    @torch.no_grad()
    def act(self, obs):
        logits, value = self(obs)
        return logits.argmax(-1), value


@program("actor and critic, rollout kept in lists", tags=["rl", "results-kept"])
def rollout(world: World):
    f = world.graphed(Policy().to(world.device), ladder=[1, 2, 4])
    obs, values, rewards = world.randn(4, 4), [], []
    with torch.no_grad():
        for _ in range(5):
            logits, value = f(obs)
            action = logits.argmax(-1)
            values.append(value)
            rewards.append(action.float() - 1)
            obs = (obs + 0.1 * F.one_hot(action, 4)).clamp(-2, 2)
    values, rewards, advantage = torch.stack(values), torch.stack(rewards), []
    last = torch.zeros(4, device=world.device)
    for t in reversed(range(4)):
        last = rewards[t] + 0.9 * values[t + 1] - values[t] + 0.8 * last
        advantage.insert(0, last)
    yield torch.stack(advantage)
    world.diagnose(f, obs)


@program("policy's act method called on the wrapper", tags=["rl", "modules"])
def act_method(world: World):
    f = world.graphed(Policy().to(world.device), ladder=[1, 2, 4])
    for n in (1, 3, 4):
        action, value = f.act(world.randn(n, 4))
        yield action.cpu().numpy(), value.mean().item()
    world.diagnose(f, world.randn(2, 4))


@program("actions drawn from a categorical distribution", tags=["rl", "random"])
def categorical(world: World):
    policy = Policy().to(world.device)

    def act(obs):
        distribution = Categorical(logits=policy(obs)[0])
        action = distribution.sample()
        return action, distribution.log_prob(action), distribution.entropy()

    f = world.graphed(act, ladder=[2, 4])
    with torch.no_grad():
        obs = world.randn(4, 4)
        expected = policy(obs)[0].log_softmax(-1)
        for _ in range(3):
            action, logp, entropy = f(obs)
            yield torch.allclose(logp, expected.gather(1, action[:, None])[:, 0], atol=1e-5), entropy
    world.diagnose(f, world.randn(3, 4))


@program("gaussian policy, tanh-squashed, deterministic flag", tags=["rl", "random", "python"])
def gaussian(world: World):
    class Actor(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.log_std = nn.Linear(4, 2), nn.Parameter(torch.zeros(2))

        def forward(self, obs, deterministic=False):
            d = Normal(self.net(obs), self.log_std.exp())
            raw = d.mean if deterministic else d.rsample()
            return raw.tanh(), d.log_prob(raw).sum(-1)

    f = world.graphed(Actor().to(world.device), ladder=[1, 2, 4])
    with torch.no_grad():
        for n in (3, 4):
            yield f(world.randn(n, 4), deterministic=True)
            action, logp = f(world.randn(n, 4))
            yield action.shape, bool((action.abs() <= 1).all()), logp.shape
    world.diagnose(f, world.randn(3, 4), deterministic=True)


@program("running normaliser of observations, Welford, in the policy", tags=["rl", "state"])
def welford(world: World):
    class Normalised(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(4))
            self.register_buffer("var", torch.ones(4))
            self.register_buffer("count", torch.tensor(1e-4))
            self.net = nn.Linear(4, 2)

        def forward(self, obs):
            n = obs.shape[0]
            delta, total = obs.mean(0) - self.mean, self.count + n
            m2 = self.var * self.count + obs.var(0, unbiased=False) * n + delta**2 * self.count * n / total
            self.mean += delta * n / total
            self.var.copy_(m2 / total)
            self.count.copy_(total)
            return self.net((obs - self.mean) / (self.var + 1e-8).sqrt())

    f = world.graphed(Normalised().to(world.device), ladder=[4, 8])
    with torch.no_grad():
        for n in (8, 8, 5, 4):
            yield f(world.randn(n, 4))
    yield f.count.item()
    world.diagnose(f, world.randn(8, 4))


@program("running normaliser replaced by assignment", tags=["rl", "state", "python-state"])
def assigned_normaliser(world: World):
    class Normaliser:
        def __init__(self, device):
            self.mean, self.count = torch.zeros(4, device=device), 0

        def __call__(self, obs):
            self.count += 1
            self.mean = self.mean + (obs.mean(0) - self.mean) / self.count
            return obs - self.mean

    normaliser = Normaliser(world.device)
    f = world.graphed(normaliser, ladder=[4])
    world.watch(normaliser)
    for _ in range(4):
        yield f(world.randn(4, 4))
    world.diagnose(f, world.randn(4, 4))


@program("replay buffer written in place by the step", tags=["rl", "state"])
def replay_buffer(world: World):
    class Buffer(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("data", torch.zeros(6, 3))
            self.register_buffer("head", torch.zeros((), dtype=torch.int64))

        def forward(self, x):
            slots = (self.head + torch.arange(x.shape[0], device=x.device)) % 6
            self.data.index_copy_(0, slots, x)
            self.head.add_(x.shape[0]).remainder_(6)
            return self.data[slots]

    f = world.graphed(Buffer().to(world.device), ladder=[2])
    for _ in range(5):
        yield f(world.randn(2, 3))
    world.diagnose(f, world.randn(2, 3))


@program("q-learning: epsilon read from an object that decays", tags=["rl", "python-state"])
def epsilon(world: World):
    class Schedule:
        value = 0.5

    schedule, net = Schedule(), Policy().to(world.device)

    def choose(obs, coin, random_action):
        greedy = net(obs)[0].argmax(-1)
        return torch.where(coin < schedule.value, random_action, greedy)

    f = world.graphed(choose, ladder=[2, 4])
    with torch.no_grad():
        for _ in range(4):
            yield f(world.randn(3, 4), world.rand(3), world.randint(3, 3))
            schedule.value *= 0.5
    world.diagnose(f, world.randn(3, 4), world.rand(3), world.randint(3, 3))


@program("frame stack in a deque on the host", tags=["rl", "numpy"])
def frames(world: World):
    net = nn.Conv2d(3, 2, 2).to(world.device)
    f = world.graphed(lambda x: net(x).flatten(1).max(-1).values, ladder=[1, 2])
    stack = deque(maxlen=3)
    with torch.no_grad():
        for i in range(6):
            stack.append(np.full((4, 4), i, dtype=np.float32))
            if len(stack) == 3:
                yield f(torch.from_numpy(np.stack(stack))[None].to(world.device)).item()
    world.diagnose(f, world.randn(1, 3, 4, 4))


@program("target network updated by polyak averaging between calls", tags=["rl", "changes"])
def polyak(world: World):
    online, target = Policy().to(world.device), Policy().to(world.device)
    f = world.graphed(target, ladder=[1, 2, 4])
    obs = world.randn(3, 4)
    with torch.no_grad():
        for _ in range(3):
            yield f(obs)[1].clone()
            for a, b in zip(online.parameters(), target.parameters(), strict=True):
                b.lerp_(a, 0.3)
        target.load_state_dict(online.state_dict())
        yield f(obs)
    world.diagnose(f, obs)


@program("transition as a named tuple of tensors", tags=["rl", "structures"])
def transitions(world: World):
    Transition = namedtuple("Transition", "obs action reward done next_obs")
    net = Policy().to(world.device)

    @torch.no_grad()
    def targets(t):
        return t.reward + 0.9 * (1 - t.done.float()) * net(t.next_obs)[1]

    f = world.graphed(targets, ladder=[1, 4, 8])
    for n in (8, 5):
        yield f(
            Transition(
                world.randn(n, 4),
                world.randint(3, n),
                world.randn(n),
                world.randint(2, n).bool(),
                world.randn(n, 4),
            )
        )
    n = 3
    world.diagnose(
        f,
        Transition(
            world.randn(n, 4),
            world.randint(3, n),
            world.randn(n),
            world.randint(2, n).bool(),
            world.randn(n, 4),
        ),
    )


@program("environment step on the device: cart and pole", tags=["rl", "physics", "feedback"])
def cart_pole(world: World):
    def step(state, force):
        x, v, a, w = state.unbind(-1)
        push = torch.where(force == 1, 10.0, -10.0)
        temp = (push + 0.05 * w**2 * a.sin()) / 1.1
        acc_a = (9.8 * a.sin() - a.cos() * temp) / (0.5 * (4 / 3 - 0.1 * a.cos() ** 2 / 1.1))
        acc_x = temp - 0.05 * acc_a * a.cos() / 1.1
        state = torch.stack([x + 0.02 * v, v + 0.02 * acc_x, a + 0.02 * w, w + 0.02 * acc_a], -1)
        return state, (state[:, 0].abs() > 2.4) | (state[:, 2].abs() > 0.2)

    f = world.graphed(step, ladder=[1, 4, 8])
    for n in (5, 8):
        state, trace = 0.05 * world.randn(n, 4), []
        for _ in range(6):
            state, done = f(state, (state[:, 2] > 0).long())
            trace.append((state, done))
        yield trace
    world.diagnose(f, world.randn(3, 4), world.randint(2, 3))


@program("mppi: trajectories sampled and weighted", tags=["rl", "physics"])
def mppi(world: World):
    def costs(start, actions):
        state, cost = start, 0
        for t in range(actions.shape[1]):
            state = state + 0.1 * torch.stack([state[:, 1], actions[:, t]], -1)
            cost = cost + state.pow(2).sum(-1)
        return cost

    f = world.graphed(costs, ladder=[8, 16])
    for n in (16, 11):
        actions = world.randn(n, 5)
        weights = (-f(world.randn(1, 2).expand(n, 2), actions)).softmax(0)
        yield (weights[:, None] * actions).sum(0)
    world.diagnose(f, world.randn(8, 2), world.randn(8, 5))


@program("hidden state zeroed where an episode ended", tags=["rl", "recurrent", "feedback"])
def episode_ends(world: World):
    cell = nn.LSTMCell(3, 4).to(world.device)

    def step(x, state, done):
        h, c = (torch.where(done[:, None], 0.0, s) for s in state)
        h, c = cell(x, (h, c))
        return h, (h, c)

    f = world.graphed(step, ladder=[1, 2, 4])
    with torch.no_grad():
        for n in (3, 2):
            state = (torch.zeros(n, 4, device=world.device), torch.zeros(n, 4, device=world.device))
            for _ in range(4):
                out, state = f(world.randn(n, 3), state, world.randint(2, n).bool())
            yield out, state
    world.diagnose(f, world.randn(2, 3), (world.randn(2, 4), world.randn(2, 4)), world.randint(2, 2).bool())


@program("temporal convolution with a streaming buffer returned", tags=["series", "feedback"])
def streaming_convolution(world: World):
    conv = nn.Conv1d(2, 3, 3).to(world.device)

    def step(chunk, buffer):
        x = torch.cat([buffer, chunk], -1)
        return conv(x).relu(), x[..., -2:]

    f = world.graphed(step, ladder=[1, 2, 4])
    with torch.no_grad():
        for n in (2, 3):
            buffer, out = torch.zeros(n, 2, 2, device=world.device), []
            for _ in range(3):
                y, buffer = f(world.randn(n, 2, 4), buffer)
                out.append(y)
            yield torch.cat(out, -1)
    world.diagnose(f, world.randn(2, 2, 4), world.randn(2, 2, 2))


@program("n-beats: residual blocks, forecast and backcast", tags=["series"])
def nbeats(world: World):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 11))

        def forward(self, x):
            return self.net(x).split([8, 3], -1)

    class NBeats(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(3))

        def forward(self, x):
            forecast = 0
            for block in self.blocks:
                back, front = block(x)
                x, forecast = x - back, forecast + front
            return forecast

    f = world.graphed(NBeats().to(world.device), ladder=[1, 2, 4, 8])
    with torch.no_grad():
        for n in (7, 2, 1):
            yield f(world.randn(n, 8))
    world.diagnose(f, world.randn(3, 8))


@program("reversible instance normalisation with state in attributes", tags=["series", "python-state"])
def revin(world: World):
    class RevIN(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(8, 4)

        def forward(self, x):
            self.mean, self.std = x.mean(-1, keepdim=True), x.std(-1, keepdim=True) + 1e-5
            return self.net((x - self.mean) / self.std) * self.std + self.mean

    f = world.graphed(RevIN().to(world.device), ladder=[1, 2, 4])
    with torch.no_grad():
        for n in (3, 4, 1):
            yield f(world.randn(n, 8))
            yield f.mean.clone()
    world.diagnose(f, world.randn(3, 8))


@program("exponential smoothing scanned over time", tags=["series"])
def smoothing(world: World):
    def smooth(x, alpha: float = 0.3):
        level, out = x[:, 0], []
        for t in range(x.shape[1]):
            level = alpha * x[:, t] + (1 - alpha) * level
            out.append(level)
        return torch.stack(out, 1)

    f = world.graphed(smooth, ladder=[1, 2, 4])
    for n in (2, 4, 3):
        yield f(world.randn(n, 6))
    yield f(world.randn(2, 6), alpha=0.9)
    yield f(world.randn(2, 6), 0.3)
    world.diagnose(f, world.randn(2, 6))


@program("quantile forecasts sorted and clipped", tags=["series"])
def quantiles(world: World):
    net = nn.Linear(6, 9).to(world.device)

    @torch.no_grad()
    def forecast(x):
        q = net(x).view(len(x), 3, 3).sort(-1).values
        return {"low": q[..., 0], "median": q[..., 1], "high": q[..., 2].clamp(max=1.0)}

    f = world.graphed(forecast, ladder=[1, 2, 4])
    for n in (3, 4):
        out = f(world.randn(n, 6))
        yield out["high"] - out["low"], out
    world.diagnose(f, world.randn(3, 6))


@program("autoregressive forecast by feeding predictions back", tags=["series", "feedback"])
def autoregressive(world: World):
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(world.device)
    f = world.graphed(net, ladder=[1, 2, 4])
    with torch.inference_mode():
        for n in (3, 1):
            series = world.randn(n, 4)
            for _ in range(5):
                series = torch.cat([series, f(series[:, -4:])], 1)
            yield series
    world.diagnose(f, world.randn(3, 4))


@program("log-mel spectrogram", tags=["audio", "complex"])
def log_mel(world: World):
    window = torch.hann_window(16, device=world.device)
    mel = torch.rand(5, 9, device=world.device)

    def features(wave):
        spectrum = torch.stft(wave, 16, 8, window=window, return_complex=True)
        return (mel @ spectrum.abs().pow(2)).clamp(min=1e-5).log10()

    f = world.graphed(features, ladder=[1, 2, 4])
    for n in (2, 3, 1):
        yield f(world.randn(n, 64))
    world.diagnose(f, world.randn(3, 64))


@program("spectral gate: stft, mask, istft", tags=["audio", "complex"])
def spectral_gate(world: World):
    window = torch.hann_window(16, device=world.device)

    def denoise(wave):
        s = torch.stft(wave, 16, 4, window=window, return_complex=True)
        mask = (s.abs() > s.abs().mean((1, 2), keepdim=True)).float()
        return torch.istft(s * mask, 16, 4, window=window, length=wave.shape[-1])

    f = world.graphed(denoise, ladder=[1, 2, 4])
    for n in (3, 4):
        yield f(world.randn(n, 48))
    world.diagnose(f, world.randn(3, 48))


@program("fft convolution with a fixed impulse response", tags=["audio", "complex"])
def reverb(world: World):
    impulse = torch.rand(8, device=world.device)

    def convolve(x):
        n = x.shape[-1] + 7
        return torch.fft.irfft(torch.fft.rfft(x, n) * torch.fft.rfft(impulse, n), n)

    f = world.graphed(convolve, ladder=[1, 2, 4])
    for n in (4, 1):
        yield f(world.randn(n, 20))
    world.diagnose(f, world.randn(3, 20))


@program("keyword spotting: causal convolutions and max over time", tags=["audio"])
def keywords(world: World):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.convs = nn.ModuleList(nn.Conv1d(4, 4, 3, dilation=d) for d in (1, 2))
            self.out = nn.Linear(4, 3)

        def forward(self, x):
            for conv in self.convs:
                x = conv(F.pad(x, (2 * conv.dilation[0], 0))).relu() + x
            return self.out(x.amax(-1))

    f = world.graphed(Net().to(world.device), ladder=[1, 2, 4])
    with torch.no_grad():
        for n in (3, 2):
            scores = f(world.randn(n, 4, 10)).softmax(-1)
            yield scores.max(-1), [("yes", "no", "stop")[i] for i in scores.argmax(-1).tolist()]
    world.diagnose(f, world.randn(3, 4, 10))


@program("vector quantisation with straight-through codes", tags=["audio"])
def vector_quantisation(world: World):
    class VQ(nn.Module):
        def __init__(self):
            super().__init__()
            self.codebook = nn.Embedding(8, 4)

        def forward(self, x):
            codes = torch.cdist(x, self.codebook.weight[None].expand(len(x), -1, -1)).argmin(-1)
            quantised = self.codebook(codes)
            return x + (quantised - x).detach(), codes

    f = world.graphed(VQ().to(world.device), ladder=[1, 2, 4])
    with torch.no_grad():
        for n in (2, 4):
            yield f(world.randn(n, 5, 4))
    world.diagnose(f, world.randn(2, 5, 4))
