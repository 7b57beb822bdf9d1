"""Graphs, recommendations, tables, time series, physics, meta-learning, several tasks."""

import copy
import math

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from corpus.training_models import mlp, regression, seeded, tokens, vectors
from corpus.training_twice import program


class GCNLayer(nn.Module):
    def __init__(self, a, b):
        super().__init__()
        self.linear = nn.Linear(a, b)

    def forward(self, x, adjacency):
        return self.linear(adjacency @ x)


def graph_of(run, nodes=20, share=0.15):
    g = seeded()
    a = (torch.rand(nodes, nodes, generator=g) < share).float()
    a = ((a + a.T) > 0).float() + torch.eye(nodes)
    d = a.sum(1).rsqrt()
    features, labels = torch.randn(nodes, 8, generator=g), torch.randint(3, (nodes,), generator=g)
    return tuple(t.to(run.device) for t in (features, d[:, None] * a * d, labels, a))


@program
def graph_convolution_over_the_whole_graph(run):
    class GCN(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = GCNLayer(8, 16), GCNLayer(16, 3)

        def forward(self, x, adjacency):
            h = F.dropout(F.relu(self.first(x, adjacency)), 0.5, self.training)
            return self.second(h, adjacency)

    x, adjacency, y, _ = graph_of(run)
    train = torch.arange(20, device=run.device) < 12
    targets = torch.where(train, y, -100)
    model = GCN().to(run.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    step = run.train_step(model, nn.CrossEntropyLoss(), optimizer)
    losses = [step((x, adjacency), targets) for _ in range(15)]
    model.eval()
    with torch.no_grad():
        accuracy = (model(x, adjacency).argmax(-1) == y)[~train].float().mean().item()
    return losses, accuracy, model


@program
def graph_convolution_with_a_boolean_train_mask(run):
    x, adjacency, y, _ = graph_of(run)
    train_mask = torch.arange(20, device=run.device) < 12
    model = GCNLayer(8, 3).to(run.device)
    step = run.train_step(
        model,
        lambda out, t: F.cross_entropy(out[train_mask], t[train_mask]),
        torch.optim.Adam(model.parameters()),
    )
    return [step((x, adjacency), y) for _ in range(8)], model


@program
def message_passing_over_edges(run):
    class Conv(nn.Module):
        def __init__(self):
            super().__init__()
            self.message, self.update = nn.Linear(16, 16), nn.Linear(24, 3)

        def forward(self, x, edges):
            source, target = edges
            m = F.relu(self.message(torch.cat([x[source], x[target]], -1)))
            pooled = x.new_zeros(x.shape[0], 16).index_add(0, target, m)
            return self.update(torch.cat([x, pooled], -1))

    x, _, y, a = graph_of(run)
    edges = a.nonzero().T.contiguous()
    model = Conv().to(run.device)
    step = run.train_step(model, nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters(), lr=1e-2))
    return [step((x, edges), y) for _ in range(8)], model


@program
def graphs_of_different_sizes_in_batches(run):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.node, self.out = nn.Linear(4, 16), nn.Linear(16, 2)

        def forward(self, x, owner, graphs):
            h = F.relu(self.node(x))
            pooled = h.new_zeros(graphs.shape[0], 16).index_add(0, owner, h)
            return self.out(pooled / graphs)

    g = seeded()
    model = Net().to(run.device)
    step = run.train_step(model, nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters(), lr=1e-2))
    losses = []
    for _ in range(8):
        sizes = torch.randint(3, 6, (4,), generator=g)
        owner = torch.repeat_interleave(torch.arange(4), sizes)
        x = torch.randn(len(owner), 4, generator=g)
        inputs = (x.to(run.device), owner.to(run.device), sizes[:, None].float().to(run.device))
        losses.append(step(inputs, (sizes % 2).to(run.device)))
    return losses, model


@program
def graph_convolution_with_a_sparse_matrix(run):
    x, adjacency, y, _ = graph_of(run)
    sparse = adjacency.to_sparse()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 3)

        def forward(self, x):
            return torch.sparse.mm(sparse, self.linear(x))

    model = Net().to(run.device)
    step = run.train_step(model, nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters(), lr=1e-2))
    return [step(x, y) for _ in range(8)], model


class Factorization(nn.Module):
    def __init__(self, users=30, items=40, width=8):
        super().__init__()
        self.user, self.item = nn.Embedding(users, width), nn.Embedding(items, width)
        self.user_bias, self.item_bias = nn.Embedding(users, 1), nn.Embedding(items, 1)

    def forward(self, user, item):
        dot = (self.user(user) * self.item(item)).sum(-1)
        return dot + self.user_bias(user).squeeze(-1) + self.item_bias(item).squeeze(-1)


def ratings(run, steps=10, rows=16):
    g = seeded()
    for _ in range(steps):
        pair = torch.randint(30, (rows,), generator=g), torch.randint(40, (rows,), generator=g)
        yield tuple(t.to(run.device) for t in (*pair, torch.rand(rows, generator=g) * 5))


@program
def matrix_factorization_of_ids_in_vectors(run):
    model = Factorization().to(run.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=1e-5)
    step = run.train_step(model, nn.MSELoss(), optimizer)
    return [step((user, item), rating) for user, item, rating in ratings(run)], model


@program
def matrix_factorization_of_ids_in_columns(run):
    model = Factorization().to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = run.train_step(model, nn.MSELoss(), optimizer)
    return [step((u[:, None], i[:, None]), r[:, None]) for u, i, r in ratings(run)], model


@program
def bayesian_personalised_ranking(run):
    model = Factorization().to(run.device)

    class Pairs(nn.Module):
        def __init__(self):
            super().__init__()
            self.scores = model

        def forward(self, user, positive, negative):
            return self.scores(user, positive) - self.scores(user, negative)

    step = run.train_step(
        Pairs(), lambda d, _: -F.logsigmoid(d).mean(), torch.optim.Adagrad(model.parameters(), lr=0.05)
    )
    losses = []
    for u, i, r in ratings(run):
        negative = torch.randint(40, (16, 1)).to(run.device)
        losses.append(step((u[:, None], i[:, None], negative), r[:, None]))
    return losses, model


@program
def two_towers_with_in_batch_negatives_and_popularity_correction(run):
    class Towers(nn.Module):
        def __init__(self):
            super().__init__()
            self.user, self.item = nn.Embedding(30, 16), nn.Embedding(40, 16)
            self.register_buffer("counts", torch.ones(40))

        def forward(self, user, item):
            if self.training:
                self.counts.index_add_(
                    0, item.flatten(), torch.ones_like(item.flatten(), dtype=torch.float32)
                )
            logits = self.user(user).squeeze(1) @ self.item(item).squeeze(1).T
            return logits - (self.counts / self.counts.sum()).log()[item.flatten()]

    model = Towers().to(run.device)
    step = run.train_step(model, nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters(), lr=1e-2))
    target = torch.arange(16, device=run.device)
    return [step((u[:, None], i[:, None]), target) for u, i, _ in ratings(run)], model


@program
def click_model_with_embeddings_and_numbers_in_a_dictionary(run):
    class DeepFM(nn.Module):
        def __init__(self):
            super().__init__()
            self.tables = nn.ModuleDict(
                {name: nn.Embedding(n, 4) for name, n in (("site", 10), ("hour", 24))}
            )
            self.top = mlp(4 * 2 + 3, 16, 1)

        def forward(self, site, hour, numbers):
            parts = [self.tables["site"](site).flatten(1), self.tables["hour"](hour).flatten(1), numbers]
            cross = (parts[0] * parts[1]).sum(-1, keepdim=True)
            return self.top(torch.cat(parts, -1)) + cross

    model, g = DeepFM().to(run.device), seeded()
    step = run.train_step(model, nn.BCEWithLogitsLoss(), torch.optim.Adam(model.parameters(), lr=1e-2))
    losses = []
    for _ in range(8):
        batch = {
            "site": torch.randint(10, (16, 1), generator=g),
            "hour": torch.randint(24, (16, 1), generator=g),
            "numbers": torch.randn(16, 3, generator=g),
        }
        clicked = torch.randint(2, (16, 1), generator=g).float().to(run.device)
        losses.append(step({k: v.to(run.device) for k, v in batch.items()}, clicked))
    return losses, model


@program
def word2vec_with_negative_sampling(run):
    class SkipGram(nn.Module):
        def __init__(self):
            super().__init__()
            self.center, self.context = nn.Embedding(32, 8), nn.Embedding(32, 8)
            self.register_buffer("frequencies", torch.arange(1, 33).float().pow(-0.75))

        def forward(self, center, context):
            negatives = torch.multinomial(self.frequencies, center.shape[0] * 4, replacement=True)
            c = self.center(center).squeeze(1)
            positive = (c * self.context(context).squeeze(1)).sum(-1)
            negative = torch.einsum("bd,bnd->bn", c, self.context(negatives.view(-1, 4)))
            return -(F.logsigmoid(positive) + F.logsigmoid(-negative).sum(-1)).mean()

    model = SkipGram().to(run.device)
    step = run.train_step(model, lambda loss, _: loss, torch.optim.SGD(model.parameters(), lr=0.5))
    return [step((x, y), y) for x, y in tokens(run, [1] * 8, rows=12)], model


@program
def learned_uncertainty_of_two_tasks(run):
    class MultiTask(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.a, self.b = mlp(16, 24, 24), nn.Linear(24, 4), nn.Linear(24, 1)
            self.log_vars = nn.Parameter(torch.zeros(2))

        def forward(self, x):
            h = self.body(x)
            return self.a(h), self.b(h), self.log_vars

    def criterion(out, target):
        logits, value, log_vars = out
        y, v = target
        terms = torch.stack([F.cross_entropy(logits, y), F.mse_loss(value, v)])
        return (torch.exp(-log_vars) * terms + log_vars).sum()

    model = MultiTask().to(run.device)
    step = run.train_step(model, criterion, torch.optim.Adam(model.parameters(), lr=1e-2))
    return [step(x, (y, x.mean(-1, keepdim=True))) for x, y in vectors(run, 10)], model


@program
def uncertainty_weights_as_a_loss_module_with_parameters(run):
    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.log_vars = nn.Parameter(torch.zeros(2))

        def forward(self, out, y):
            terms = torch.stack([F.cross_entropy(out, y), out.pow(2).mean()])
            return (torch.exp(-self.log_vars) * terms + self.log_vars).sum()

    model, criterion = mlp(16, 24, 4).to(run.device), Weighted().to(run.device)
    optimizer = torch.optim.AdamW([*model.parameters(), *criterion.parameters()], lr=1e-2)
    step = run.train_step(model, criterion, optimizer)
    return [step(x, y) for x, y in vectors(run, 10)], model, criterion


@program
def tasks_in_turns_with_a_shared_body(run):
    body = mlp(16, 24, 24).to(run.device)
    heads = [nn.Linear(24, 4).to(run.device), nn.Linear(24, 1).to(run.device)]
    losses = [nn.CrossEntropyLoss(), nn.MSELoss()]
    steps = []
    for head, loss in zip(heads, losses, strict=True):
        model = nn.Sequential(body, nn.ReLU(), head)
        steps.append(run.train_step(model, loss, torch.optim.SGD(model.parameters(), lr=0.05)))
    found = []
    for (x, y), (a, b) in zip(vectors(run, 8), regression(run, 8), strict=True):
        found.append(steps[0](x, y))
        found.append(steps[1](a, b))
    return found, body, heads


@program
def physics_informed_heat_equation(run):
    class PINN(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp(2, 20, 20, 1, act=nn.Tanh)

        def forward(self, xt):
            return self.net(xt)

    model = PINN().to(run.device)

    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.u = model

        def forward(self, points, boundary):
            points = points.detach().requires_grad_(True)
            u = self.u(points)
            (du,) = torch.autograd.grad(u, points, torch.ones_like(u), create_graph=True)
            (ddu,) = torch.autograd.grad(du[:, :1], points, torch.ones_like(u), create_graph=True)
            residual = du[:, 1:] - 0.1 * ddu[:, :1]
            return (
                residual.pow(2).mean()
                + (self.u(boundary) - torch.sin(math.pi * boundary[:, :1])).pow(2).mean()
            )

    step = run.train_step(Residual(), lambda loss, _: loss, torch.optim.Adam(model.parameters(), lr=1e-3))
    losses, zeros = [], torch.zeros(16, 1, device=run.device)
    for _ in range(10):
        points = torch.rand(16, 2).to(run.device)
        boundary = torch.cat([torch.rand(16, 1), torch.zeros(16, 1)], 1).to(run.device)
        losses.append(step((points, boundary), zeros))
    return losses, model


@program
def physics_informed_with_the_derivative_in_the_loss_function(run):
    model = mlp(1, 16, 16, 1, act=nn.Tanh).to(run.device)
    grid = torch.linspace(0, 1, 20, device=run.device)[:, None].requires_grad_(True)

    def criterion(out, start):
        u = model(grid)
        (du,) = torch.autograd.grad(u.sum(), grid, create_graph=True)
        return (du + u).pow(2).mean() + (out - start).pow(2).mean()

    step = run.train_step(model, criterion, torch.optim.Adam(model.parameters(), lr=1e-2))
    zero, one = torch.zeros(1, 1, device=run.device), torch.ones(1, 1, device=run.device)
    return [step(zero, one) for _ in range(10)], model


@program
def neural_ode_with_a_fixed_solver(run):
    class ODE(nn.Module):
        def __init__(self):
            super().__init__()
            self.f = mlp(2, 16, 2, act=nn.Tanh)

        def forward(self, y):
            path, h = [y], 0.1
            for _ in range(10):
                k1 = self.f(y)
                k2 = self.f(y + 0.5 * h * k1)
                k3 = self.f(y + 0.5 * h * k2)
                k4 = self.f(y + h * k3)
                y = y + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
                path.append(y)
            return torch.stack(path, 1)

    model = ODE().to(run.device)
    step = run.train_step(model, nn.L1Loss(), torch.optim.RMSprop(model.parameters(), lr=1e-3))
    losses = []
    for x, _ in vectors(run, 8, width=2, classes=2):
        t = torch.linspace(0, 1, 11, device=run.device)[None, :, None]
        losses.append(step(x, x[:, None] * torch.cos(t)))
    return losses, model


@program
def neural_ode_with_an_adaptive_solver(run):
    class ODE(nn.Module):
        def __init__(self):
            super().__init__()
            self.f = mlp(2, 16, 2, act=nn.Tanh)

        def forward(self, y):
            t, h = 0.0, 0.25
            while t < 1.0:
                full = y + h * self.f(y)
                half = y + h / 2 * self.f(y)
                half = half + h / 2 * self.f(half)
                if (full - half).abs().max() > 0.02 and h > 0.05:
                    h /= 2
                    continue
                y, t = half, t + h
            return y

    model = ODE().to(run.device)
    step = run.train_step(model, nn.MSELoss(), torch.optim.Adam(model.parameters(), lr=1e-2))
    return [step(x, -x) for x, _ in vectors(run, 6, width=2, classes=2)], model


@program
def hamiltonian_network(run):
    class HNN(nn.Module):
        def __init__(self):
            super().__init__()
            self.energy = mlp(2, 16, 1, act=nn.Tanh)

        def forward(self, x):
            with torch.enable_grad():
                x = x.detach().requires_grad_(True)
                (g,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)
            return torch.stack([g[:, 1], -g[:, 0]], 1)

    model = HNN().to(run.device)
    step = run.train_step(model, nn.MSELoss(), torch.optim.Adam(model.parameters(), lr=1e-2))
    return [
        step(x, torch.stack([x[:, 1], -x[:, 0]], 1)) for x, _ in vectors(run, 8, width=2, classes=2)
    ], model


@program
def fourier_neural_operator(run):
    class Spectral(nn.Module):
        def __init__(self, width=8, modes=4):
            super().__init__()
            self.modes, self.lift, self.out = modes, nn.Linear(1, width), nn.Linear(width, 1)
            self.weight = nn.Parameter(0.1 * torch.randn(width, width, modes, dtype=torch.cfloat))

        def forward(self, u):
            h = self.lift(u[..., None]).transpose(1, 2)
            f = torch.fft.rfft(h)
            low = torch.einsum("bim,iom->bom", f[..., : self.modes], self.weight)
            h = h + torch.fft.irfft(F.pad(low, (0, f.shape[-1] - self.modes)), n=h.shape[-1])
            return self.out(F.gelu(h).transpose(1, 2)).squeeze(-1)

    model = Spectral().to(run.device)
    step = run.train_step(model, nn.MSELoss(), torch.optim.Adam(model.parameters(), lr=1e-3))
    return [step(x, x.cumsum(-1) / 4) for x, _ in vectors(run, 8)], model


@program
def forecaster_with_normalised_windows(run):
    class Forecaster(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.out = nn.LSTM(1, 16, batch_first=True), nn.Linear(16, 4)

        def forward(self, x):
            mean, std = x.mean(1, keepdim=True), x.std(1, keepdim=True) + 1e-5
            h, _ = self.rnn(((x - mean) / std)[..., None])
            return self.out(h[:, -1]) * std + mean

    series = torch.sin(torch.arange(120) / 5) + 0.05 * torch.randn(120, generator=seeded())
    windows = series.unfold(0, 20, 2).to(run.device)
    model = Forecaster().to(run.device)
    step = run.train_step(model, nn.L1Loss(), torch.optim.AdamW(model.parameters(), lr=1e-2))
    losses = [
        step(w[:, :16].contiguous(), w[:, 16:].contiguous()) for _ in range(2) for w in windows[:48].split(12)
    ]
    return losses, model


@program
def temporal_convolution_network(run):
    class TCN(nn.Module):
        def __init__(self):
            super().__init__()
            self.convs = nn.ModuleList(nn.Conv1d(1 if i == 0 else 8, 8, 3, dilation=2**i) for i in range(3))
            self.out = nn.Conv1d(8, 1, 1)

        def forward(self, x):
            h = x[:, None]
            for i, conv in enumerate(self.convs):
                h = F.relu(conv(F.pad(h, (2 * 2**i, 0))))
            return self.out(h).squeeze(1)

    model = TCN().to(run.device)
    step = run.train_step(model, nn.SmoothL1Loss(), torch.optim.Adam(model.parameters(), lr=1e-2))
    return [step(x, x.roll(-1, 1)) for x, _ in vectors(run, 8)], model


@program
def tabular_net_with_ghost_batch_norm_and_categories(run):
    class Tab(nn.Module):
        def __init__(self):
            super().__init__()
            self.category, self.norm = nn.Embedding(5, 4), nn.BatchNorm1d(16)
            self.net = mlp(20, 24, 4, dropout=0.1)

        def forward(self, x, category):
            chunks = [self.norm(c) for c in x.chunk(2, 0)]
            return self.net(torch.cat([torch.cat(chunks), self.category(category).squeeze(1)], -1))

    model = Tab().to(run.device)
    step = run.train_step(model, nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters(), lr=1e-2))
    return [step((x, (y % 5)[:, None]), y) for x, y in vectors(run, 10)], model


@program
def maml_with_functional_call(run):
    model = mlp(1, 16, 1, act=nn.Tanh).to(run.device)

    class MAML(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = model

        def forward(self, xs, ys, xq, yq):
            total = 0.0
            for i in range(xs.shape[0]):
                weights = dict(self.net.named_parameters())
                loss = F.mse_loss(functional_call(self.net, weights, xs[i]), ys[i])
                grads = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
                fast = {n: w - 0.1 * g for (n, w), g in zip(weights.items(), grads, strict=True)}
                total = total + F.mse_loss(functional_call(self.net, fast, xq[i]), yq[i])
            return total / xs.shape[0]

    step = run.train_step(MAML(), lambda loss, _: loss, torch.optim.Adam(model.parameters(), lr=1e-2))
    g, losses = seeded(), []
    for _ in range(8):
        phase = torch.rand(3, 1, 1, generator=g) * math.pi
        xs, xq = torch.randn(3, 5, 1, generator=g), torch.randn(3, 5, 1, generator=g)
        batch = tuple(t.to(run.device) for t in (xs, torch.sin(xs + phase), xq, torch.sin(xq + phase)))
        losses.append(step(batch, batch[3]))
    return losses, model


@program
def reptile_around_an_inner_step(run):
    model = mlp(1, 16, 1, act=nn.Tanh).to(run.device)
    inner = torch.optim.SGD(model.parameters(), lr=0.02)
    step = run.train_step(model, nn.MSELoss(), inner)
    g, losses = seeded(), []
    for _ in range(4):
        before = copy.deepcopy(model.state_dict())
        phase = torch.rand(1, generator=g) * math.pi
        for _ in range(3):
            x = torch.randn(10, 1, generator=g)
            losses.append(step(x.to(run.device), torch.sin(x + phase).to(run.device)))
        after = model.state_dict()
        model.load_state_dict({k: before[k] + 0.5 * (after[k] - before[k]) for k in before})
    return losses, model


@program
def prototypical_network(run):
    model = mlp(16, 24, 8).to(run.device)

    def criterion(z, y):
        support, query = z[:8].view(4, 2, -1).mean(1), z[8:]
        return F.cross_entropy(-torch.cdist(query, support).pow(2), y)

    step = run.train_step(model, criterion, torch.optim.Adam(model.parameters(), lr=1e-3))
    g, losses = seeded(), []
    target = torch.arange(4, device=run.device).repeat_interleave(2)
    for _ in range(8):
        centers = torch.randn(4, 1, 16, generator=g)
        support = (centers + 0.3 * torch.randn(4, 2, 16, generator=g)).flatten(0, 1)
        query = (centers + 0.3 * torch.randn(4, 2, 16, generator=g)).flatten(0, 1)
        losses.append(step(torch.cat([support, query]).to(run.device), target))
    return losses, model


@program
def gradient_reversal_with_a_custom_function(run):
    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, scale):
            ctx.scale = scale
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            return -ctx.scale * grad, None

    class DANN(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.label, self.domain = mlp(16, 24, 24), nn.Linear(24, 4), nn.Linear(24, 2)

        def forward(self, x):
            h = self.body(x)
            return self.label(h), self.domain(Reverse.apply(h, 0.3))

    def criterion(out, target):
        return F.cross_entropy(out[0], target[0]) + F.cross_entropy(out[1], target[1])

    model = DANN().to(run.device)
    step = run.train_step(model, criterion, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    domain = torch.arange(8, device=run.device) % 2
    return [step(x, (y, domain)) for x, y in vectors(run, 10)], model


@program
def gradient_reversal_whose_strength_grows(run):
    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, scale):
            ctx.scale = scale
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            return -ctx.scale * grad, None

    class DANN(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.domain, self.scale = mlp(16, 24, 24), nn.Linear(24, 2), 0.0

        def forward(self, x):
            return self.domain(Reverse.apply(self.body(x), self.scale))

    model = DANN().to(run.device)
    step = run.train_step(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.05))
    losses = []
    for i, (x, y) in enumerate(vectors(run, 8)):
        model.scale = 2 / (1 + math.exp(-10 * i / 8)) - 1
        losses.append(step(x, y % 2))
    return losses, model


@program
def straight_through_quantised_weights(run):
    class Round(torch.autograd.Function):
        @staticmethod
        def forward(ctx, w, scale):
            ctx.save_for_backward(w / scale)
            return (w / scale).round().clamp(-7, 7) * scale

        @staticmethod
        def backward(ctx, grad):
            (w,) = ctx.saved_tensors
            return grad * (w.abs() <= 7), None

    class QLinear(nn.Linear):
        def forward(self, x):
            scale = self.weight.detach().abs().amax() / 7
            return F.linear(x, Round.apply(self.weight, scale), self.bias)

    model = nn.Sequential(QLinear(16, 24), nn.ReLU(), QLinear(24, 4)).to(run.device)
    step = run.train_step(model, nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters(), lr=1e-2))
    return [step(x, y) for x, y in vectors(run, 10)], model


@program
def spiking_network_with_surrogate_gradient(run):
    class Spike(torch.autograd.Function):
        @staticmethod
        def forward(ctx, v):
            ctx.save_for_backward(v)
            return (v > 0).float()

        @staticmethod
        def backward(ctx, grad):
            return grad / (1 + 10 * ctx.saved_tensors[0].abs()).pow(2)

    class SNN(nn.Module):
        def __init__(self):
            super().__init__()
            self.inp, self.out = nn.Linear(16, 24), nn.Linear(24, 4)

        def forward(self, x):
            v = x.new_zeros(x.shape[0], 24)
            total = 0.0
            for _ in range(5):
                v = 0.9 * v + self.inp(x)
                s = Spike.apply(v - 1)
                v = v - s
                total = total + self.out(s)
            return total / 5

    model = SNN().to(run.device)
    step = run.train_step(model, nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters(), lr=1e-2))
    return [step(x, y) for x, y in vectors(run, 8)], model


@program
def bayesian_layers_with_kl_of_weights(run):
    class Bayes(nn.Module):
        def __init__(self, a, b):
            super().__init__()
            self.mean, self.rho = (
                nn.Parameter(0.1 * torch.randn(b, a)),
                nn.Parameter(torch.full((b, a), -3.0)),
            )

        def forward(self, x):
            sigma = F.softplus(self.rho)
            return F.linear(x, self.mean + sigma * torch.randn_like(sigma))

        def kl(self):
            sigma = F.softplus(self.rho)
            return (sigma.pow(2) + self.mean.pow(2) - 1 - 2 * sigma.log()).sum() / 2

    model = nn.Sequential(Bayes(16, 24), nn.ReLU(), Bayes(24, 4)).to(run.device)

    def elbo(out, y):
        return F.cross_entropy(out, y) + 1e-3 * sum(m.kl() for m in model if isinstance(m, Bayes))

    step = run.train_step(model, elbo, torch.optim.Adam(model.parameters(), lr=1e-2))
    return [step(x, y) for x, y in vectors(run, 10)], model


@program
def elastic_weight_consolidation(run):
    model = mlp(16, 24, 4).to(run.device)
    old = {n: p.detach().clone() for n, p in model.named_parameters()}
    fisher = {n: torch.rand_like(p) for n, p in model.named_parameters()}

    def criterion(out, y):
        penalty = sum((fisher[n] * (p - old[n]).pow(2)).sum() for n, p in model.named_parameters())
        return F.cross_entropy(out, y) + 5.0 * penalty

    step = run.train_step(model, criterion, torch.optim.SGD(model.parameters(), lr=0.02))
    return [step(x, y) for x, y in vectors(run, 10)], model


@program
def l1_penalty_over_all_parameters(run):
    model = mlp(16, 24, 4).to(run.device)

    def criterion(out, y):
        return F.cross_entropy(out, y) + 1e-3 * sum(p.abs().sum() for p in model.parameters())

    step = run.train_step(model, criterion, torch.optim.SGD(model.parameters(), lr=0.05))
    return [step(x, y) for x, y in vectors(run, 10)], model


@program
def adversarial_training_with_fgsm_in_the_loop(run):
    model = mlp(16, 24, 4).to(run.device)
    step = run.train_step(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.05))
    losses = []
    for x, y in vectors(run, 10):
        x = x.clone().requires_grad_(True)
        (g,) = torch.autograd.grad(F.cross_entropy(model(x), y), x)
        losses.append(step((x + 0.1 * g.sign()).detach(), y))
    return losses, model


@program
def virtual_adversarial_training_in_the_loss(run):
    model = mlp(16, 24, 4).to(run.device)

    class VAT(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = model

        def forward(self, x):
            logits = self.net(x)
            d = F.normalize(torch.randn_like(x), dim=-1).requires_grad_(True)
            kl = F.kl_div(
                self.net(x + 0.1 * d).log_softmax(-1), logits.detach().softmax(-1), reduction="batchmean"
            )
            (g,) = torch.autograd.grad(kl, d)
            moved = self.net(x + F.normalize(g, dim=-1)).log_softmax(-1)
            return logits, F.kl_div(moved, logits.detach().softmax(-1), reduction="batchmean")

    step = run.train_step(
        VAT(),
        lambda out, y: F.cross_entropy(out[0], y) + out[1],
        torch.optim.Adam(model.parameters(), lr=1e-2),
    )
    return [step(x, y) for x, y in vectors(run, 8)], model


@program
def double_precision(run):
    model = mlp(16, 24, 1, act=nn.Tanh).double().to(run.device)
    step = run.train_step(model, nn.MSELoss(), torch.optim.Adam(model.parameters(), lr=1e-2))
    return [step(x.double(), y.double()) for x, y in regression(run, 8)], model
