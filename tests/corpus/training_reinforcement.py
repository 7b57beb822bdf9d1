"""Reinforcement learning: policies, values, replay, several epochs over one rollout."""

import copy
import random
from collections import deque

import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical, Normal
from torch.nn import functional as F

from corpus.training_models import GPT, mlp, seeded
from corpus.training_twice import program


class Corridor:
    """Walk right to get a reward; a state is four numbers."""

    def __init__(self, seed=0):
        self.rng = np.random.default_rng(seed)
        self.reset()

    def reset(self):
        self.place, self.time = 0.0, 0
        return self.state()

    def state(self):
        return np.array([self.place, self.time / 10, np.sin(self.place), 1.0], dtype=np.float32)

    def step(self, action):
        self.place += (1.0 if action == 1 else -1.0) * 0.2 + self.rng.normal() * 0.02
        self.time += 1
        done = self.time >= 10
        return self.state(), self.place, done


@program
def reinforce(run):
    policy = mlp(4, 16, 2).to(run.device)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)

    def loss_fn(logits, target):
        actions, returns = target
        log_p = logits.log_softmax(-1).gather(-1, actions[:, None]).squeeze(-1)
        return -(log_p * returns).mean()

    step = run.train_step(policy, loss_fn, optimizer)
    env, scores, losses = Corridor(), [], []
    for _ in range(10):
        state, states, actions, rewards, done = env.reset(), [], [], [], False
        while not done:
            with torch.no_grad():
                logits = policy(torch.from_numpy(state)[None].to(run.device))
            action = Categorical(logits=logits.cpu()).sample().item()
            states.append(state)
            actions.append(action)
            state, reward, done = env.step(action)
            rewards.append(reward)
        returns, total = [], 0.0
        for r in reversed(rewards):
            total = r + 0.99 * total
            returns.insert(0, total)
        returns = torch.tensor(returns, dtype=torch.float32)
        returns = ((returns - returns.mean()) / (returns.std() + 1e-8)).to(run.device)
        batch = torch.from_numpy(np.stack(states)).to(run.device)
        losses.append(step(batch, (torch.tensor(actions).to(run.device), returns)))
        scores.append(sum(rewards))
    return losses, scores, policy


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.actor, self.critic = nn.Linear(4, 16), nn.Linear(16, 2), nn.Linear(16, 1)

    def forward(self, x):
        h = torch.tanh(self.body(x))
        return self.actor(h), self.critic(h).squeeze(-1)


def rollout(run, model, env, steps=32):
    """Returns states, actions, log probabilities, returns and advantages."""
    state, columns = env.reset(), [[] for _ in range(6)]
    for _ in range(steps):
        with torch.no_grad():
            logits, value = model(torch.from_numpy(state)[None].to(run.device))
        policy = Categorical(logits=logits.cpu())
        action = policy.sample()
        following, reward, done = env.step(action.item())
        row = (torch.from_numpy(state), action[0], policy.log_prob(action)[0], value[0].cpu(), reward, done)
        for column, x in zip(columns, row, strict=True):
            column.append(x)
        state = env.reset() if done else following
    states, actions, log_p, values, rewards, dones = columns
    advantages, last = torch.zeros(steps), 0.0
    for t in reversed(range(steps)):
        after = values[t + 1].item() if t + 1 < steps and not dones[t] else 0.0
        last = rewards[t] + 0.99 * after - values[t].item() + 0.95 * 0.99 * last * (not dones[t])
        advantages[t] = last
    returns = advantages + torch.stack(values)
    made = (torch.stack(states), torch.stack(actions), torch.stack(log_p), returns, advantages)
    return tuple(t.to(run.device) for t in made), sum(rewards)


def ppo_loss(outputs, target):
    (logits, values), (actions, old, returns, advantages) = outputs, target
    log_all = logits.log_softmax(-1)
    ratio = (log_all.gather(-1, actions[:, None]).squeeze(-1) - old).exp()
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    policy = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
    entropy = -(log_all.exp() * log_all).sum(-1).mean()
    return policy + 0.5 * F.mse_loss(values, returns) - 0.01 * entropy


@program
def ppo_with_epochs_of_minibatches_and_annealed_rate(run):
    model = ActorCritic().to(run.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-5)
    step = run.train_step(model, ppo_loss, optimizer, clip_norm=0.5)
    env, losses, scores = Corridor(), [], []
    for update in range(3):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * (1 - update / 3)
        data, score = rollout(run, model, env)
        scores.append(score)
        for _ in range(3):
            order = torch.randperm(32).to(run.device)
            for chosen in order.split(8):
                states, *target = (t[chosen] for t in data)
                losses.append(step(states, tuple(target)))
    return losses, scores, model, optimizer


@program
def ppo_with_categorical_distributions_in_the_loss(run):
    def loss_fn(outputs, target):
        (logits, values), (actions, old, returns, advantages) = outputs, target
        policy = Categorical(logits=logits)
        ratio = (policy.log_prob(actions) - old).exp()
        surrogate = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
        return -surrogate + 0.5 * F.mse_loss(values, returns) - 0.01 * policy.entropy().mean()

    model = ActorCritic().to(run.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    step = run.train_step(model, loss_fn, optimizer, clip_norm=0.5)
    env, losses = Corridor(), []
    for _ in range(2):
        data, _ = rollout(run, model, env)
        for chosen in torch.arange(32).to(run.device).split(8):
            states, *target = (t[chosen] for t in data)
            losses.append(step(states, tuple(target)))
    return losses, model


@program
def ppo_that_stops_early_by_kl(run):
    model = ActorCritic().to(run.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    kl = torch.zeros((), device=run.device)

    def loss_fn(outputs, target):
        with torch.no_grad():
            log_p = outputs[0].log_softmax(-1).gather(-1, target[0][:, None]).squeeze(-1)
            kl.copy_((target[1] - log_p).mean())
        return ppo_loss(outputs, target)

    step = run.train_step(model, loss_fn, optimizer)
    env, losses, log = Corridor(), [], []
    for _ in range(3):
        (states, *target), _ = rollout(run, model, env)
        for epoch in range(6):
            losses.append(step(states, tuple(target)))
            if kl.item() > 0.01:
                log.append(f"stopped at epoch {epoch}")
                break
    return losses, log, model


@program
def advantage_actor_critic_with_an_entropy_coefficient_that_decays(run):
    model = ActorCritic().to(run.device)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=3e-3, alpha=0.99, eps=1e-5)
    coefficient = torch.tensor(0.05, device=run.device)

    def loss_fn(outputs, target):
        (logits, values), (actions, _, returns, advantages) = outputs, target
        log_all = logits.log_softmax(-1)
        log_p = log_all.gather(-1, actions[:, None]).squeeze(-1)
        entropy = -(log_all.exp() * log_all).sum(-1).mean()
        return -(log_p * advantages).mean() + 0.5 * (returns - values).pow(2).mean() - coefficient * entropy

    step = run.train_step(model, loss_fn, optimizer, clip_norm=0.5)
    env, losses = Corridor(), []
    for i in range(8):
        coefficient.fill_(0.05 * (1 - i / 8))
        (states, *target), _ = rollout(run, model, env, steps=10)
        losses.append(step(states, tuple(target)))
    return losses, model


class Replay:
    def __init__(self, size=200):
        self.rows = deque(maxlen=size)

    def add(self, *row):
        self.rows.append(row)

    def sample(self, n, device):
        columns = zip(*random.sample(self.rows, n), strict=True)
        return [torch.from_numpy(np.array(c, dtype=np.float32)).to(device) for c in columns]


def play(env, buffer, steps, choose):
    state, total = env.reset(), 0.0
    for _ in range(steps):
        action = choose(state)
        following, reward, done = env.step(action)
        buffer.add(state, action, reward, following, done)
        total += reward
        state = env.reset() if done else following
    return total


@program
def dqn_with_replay_and_target_network(run):
    online = mlp(4, 16, 2).to(run.device)
    target = copy.deepcopy(online).eval().requires_grad_(False)
    optimizer = torch.optim.Adam(online.parameters(), lr=5e-3)

    def td_loss(q, batch):
        actions, goals = batch
        return F.smooth_l1_loss(q.gather(1, actions[:, None]).squeeze(1), goals)

    step = run.train_step(online, td_loss, optimizer, clip_norm=10.0)
    buffer, env, epsilon, losses = Replay(), Corridor(), 1.0, []

    def choose(state):
        if random.random() < epsilon:
            return random.randrange(2)
        with torch.no_grad():
            return int(online(torch.from_numpy(state)[None].to(run.device)).argmax())

    play(env, buffer, 20, choose)
    for i in range(16):
        play(env, buffer, 2, choose)
        epsilon = max(0.1, epsilon * 0.9)
        states, actions, rewards, following, done = buffer.sample(8, run.device)
        with torch.no_grad():
            goals = rewards + 0.99 * (1 - done) * target(following).max(1).values
        losses.append(step(states, (actions.long(), goals)))
        if i % 5 == 4:
            target.load_state_dict(online.state_dict())
    return losses, epsilon, online, target


@program
def double_dqn_with_priorities_from_td_errors(run):
    online = mlp(4, 16, 2).to(run.device)
    target = copy.deepcopy(online).requires_grad_(False)
    optimizer = torch.optim.Adam(online.parameters(), lr=5e-3)
    errors = torch.zeros(8, device=run.device)

    def td_loss(q, batch):
        actions, goals, weights = batch
        delta = q.gather(1, actions[:, None]).squeeze(1) - goals
        errors.copy_(delta.detach().abs())
        return (weights * F.huber_loss(delta, torch.zeros_like(delta), reduction="none")).mean()

    step = run.train_step(online, td_loss, optimizer)
    g = seeded()
    data = [
        torch.randn(64, 4, generator=g),
        torch.randint(2, (64,), generator=g),
        torch.randn(64, generator=g),
    ]
    data = [t.to(run.device) for t in data]
    priorities, losses = np.ones(64), []
    rng = np.random.default_rng(0)
    for _ in range(12):
        p = priorities**0.6 / (priorities**0.6).sum()
        chosen = rng.choice(64, 8, p=p)
        weights = torch.tensor((64 * p[chosen]) ** -0.4, dtype=torch.float32).to(run.device)
        index = torch.from_numpy(chosen).to(run.device)
        states, actions, rewards = (t[index] for t in data)
        with torch.no_grad():
            best = online(-states).argmax(1, keepdim=True)
            goals = rewards + 0.99 * target(-states).gather(1, best).squeeze(1)
        losses.append(step(states, (actions, goals, weights)))
        priorities[chosen] = np.round(errors.cpu().numpy(), 3) + 1e-2
    return losses, priorities, online


class TwinQ(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = mlp(5, 16, 1), mlp(5, 16, 1)

    def forward(self, state, action):
        x = torch.cat([state, action], -1)
        return self.a(x).squeeze(-1), self.b(x).squeeze(-1)


class SquashedGaussian(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp(4, 16, 2)

    def forward(self, state):
        mean, log_std = self.net(state).chunk(2, -1)
        std = log_std.clamp(-5, 2).exp()
        raw = mean + std * torch.randn_like(mean)
        log_p = Normal(mean, std, validate_args=False).log_prob(raw) - torch.log(1 - raw.tanh().pow(2) + 1e-6)
        return raw.tanh(), log_p.sum(-1)


def transitions(run, steps, rows=8):
    g = seeded()
    for _ in range(steps):
        state, following = torch.randn(2, rows, 4, generator=g)
        made = state, torch.rand(rows, 1, generator=g), torch.randn(rows, generator=g), following
        yield tuple(t.to(run.device) for t in made)


@program
def soft_actor_critic_with_a_learned_temperature(run):
    actor, critic = SquashedGaussian().to(run.device), TwinQ().to(run.device)
    target = copy.deepcopy(critic).requires_grad_(False)

    class Temperature(nn.Module):
        def __init__(self):
            super().__init__()
            self.log_alpha = nn.Parameter(torch.zeros(1))

        def forward(self, log_p):
            return -(self.log_alpha * (log_p - 1.0)).mean()

    temperature = Temperature().to(run.device)
    frozen = copy.deepcopy(critic).requires_grad_(False)

    def critic_loss(qs, goal):
        return F.mse_loss(qs[0], goal) + F.mse_loss(qs[1], goal)

    def actor_loss(out, state):
        action, log_p = out
        return (temperature.log_alpha.exp().detach() * log_p - torch.min(*frozen(state, action))).mean()

    steps = [
        run.train_step(critic, critic_loss, torch.optim.Adam(critic.parameters(), lr=1e-3)),
        run.train_step(actor, actor_loss, torch.optim.Adam(actor.parameters(), lr=1e-3)),
        run.train_step(
            temperature, lambda loss, _: loss, torch.optim.Adam(temperature.parameters(), lr=1e-2)
        ),
    ]
    losses = []
    for state, action, reward, following in transitions(run, 10):
        with torch.no_grad():
            next_action, next_log_p = actor(following)
            q = torch.min(*target(following, next_action)) - temperature.log_alpha.exp() * next_log_p
        losses.append(steps[0]((state, action), reward + 0.99 * q))
        frozen.load_state_dict(critic.state_dict())
        losses.append(steps[1](state, state))
        with torch.no_grad():
            log_p = actor(state)[1]
        losses.append(steps[2](log_p[:, None], reward))
        with torch.no_grad():
            for t, p in zip(target.parameters(), critic.parameters(), strict=True):
                t.mul_(0.995).add_(p, alpha=0.005)
    return losses, actor, critic.state_dict(), target, temperature.log_alpha


@program
def td3_with_delayed_policy_updates(run):
    actor, critic = nn.Sequential(mlp(4, 16, 1), nn.Tanh()).to(run.device), TwinQ().to(run.device)
    actor_target, critic_target = (copy.deepcopy(m).requires_grad_(False) for m in (actor, critic))

    class Policy(nn.Module):
        def __init__(self):
            super().__init__()
            self.actor = actor

        def forward(self, state):
            return self.actor(state)

    a_step = run.train_step(
        Policy(),
        lambda action, state: -critic(state, action)[0].mean(),
        torch.optim.Adam(actor.parameters(), lr=1e-3),
    )
    c_step = run.train_step(
        critic,
        lambda q, g: F.mse_loss(q[0], g) + F.mse_loss(q[1], g),
        torch.optim.Adam(critic.parameters(), lr=1e-3),
    )
    losses = []
    for i, (state, action, reward, following) in enumerate(transitions(run, 12)):
        with torch.no_grad():
            noise = (torch.randn_like(action) * 0.2).clamp(-0.5, 0.5)
            next_action = (actor_target(following) + noise).clamp(-1, 1)
            goal = reward + 0.99 * torch.min(*critic_target(following, next_action))
        losses.append(c_step((state, action), goal))
        if i % 2 == 1:
            losses.append(a_step(state, state))
            with torch.no_grad():
                for t, s in ((actor_target, actor), (critic_target, critic)):
                    for a, b in zip(t.parameters(), s.parameters(), strict=True):
                        a.lerp_(b, 0.005)
    return losses, actor.state_dict(), critic.state_dict(), actor_target, critic_target


@program
def behaviour_cloning_with_shuffled_epochs(run):
    g = seeded()
    states = torch.randn(40, 4, generator=g)
    actions = (states[:, 0] > 0).long()
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(states, actions), batch_size=8, shuffle=True, drop_last=True
    )
    policy = mlp(4, 16, 2).to(run.device)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    step = run.train_step(policy, nn.CrossEntropyLoss(), optimizer)
    means = []
    for _ in range(3):
        losses = [step(s.to(run.device), a.to(run.device)) for s, a in loader]
        means.append(torch.stack(losses).mean().item())
    return means, policy


@program
def grpo_on_a_tiny_language_model(run):
    policy = GPT(layers=1).to(run.device)
    reference = copy.deepcopy(policy).eval().requires_grad_(False)

    def loss_fn(logits, target):
        ids, advantage, old, ref = target
        log_p = logits.log_softmax(-1).gather(-1, ids[..., None]).squeeze(-1)
        ratio = (log_p - old).exp()
        surrogate = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        kl = (ref - log_p).exp() - (ref - log_p) - 1
        return -(surrogate - 0.04 * kl).mean()

    step = run.train_step(policy, loss_fn, torch.optim.AdamW(policy.parameters(), lr=1e-3), clip_norm=0.2)
    losses, rewards = [], []
    for _ in range(4):
        ids = torch.zeros(8, 1, dtype=torch.long, device=run.device)
        with torch.no_grad():
            for _ in range(8):
                probs = policy(ids)[:, -1].softmax(-1)
                ids = torch.cat([ids, torch.multinomial(probs.cpu(), 1).to(run.device)], 1)
            x, y = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
            reward = (y < 16).float().mean(1)
            advantage = ((reward - reward.mean()) / (reward.std() + 1e-4))[:, None].expand(-1, 8).contiguous()
            old, ref = (
                m(x).log_softmax(-1).gather(-1, y[..., None]).squeeze(-1) for m in (policy, reference)
            )
        rewards.append(reward.mean().item())
        for _ in range(2):
            losses.append(step(x, (y, advantage, old, ref)))
    return losses, rewards, policy


@program
def world_model_with_a_recurrent_rollout(run):
    class World(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.out = nn.GRUCell(5, 16), nn.Linear(16, 4)

        def forward(self, states, actions):
            h = states.new_zeros(states.shape[0], 16)
            predicted = []
            for t in range(states.shape[1]):
                h = self.cell(torch.cat([states[:, t], actions[:, t]], -1), h)
                predicted.append(self.out(h))
            return torch.stack(predicted, 1)

    model, g = World().to(run.device), seeded()
    step = run.train_step(model, F.mse_loss, torch.optim.Adam(model.parameters(), lr=1e-2), clip_norm=1.0)
    losses = []
    for _ in range(8):
        s, a = (
            torch.randn(4, 6, 4, generator=g).to(run.device),
            torch.randn(4, 6, 1, generator=g).to(run.device),
        )
        losses.append(step((s, a), s.roll(-1, 1)))
    return losses, model
