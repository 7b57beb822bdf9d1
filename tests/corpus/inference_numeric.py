"""Numerical methods: filters, solvers, simulations, clustering, metrics, observers."""

import math

import torch
from torch import nn

from corpus.registry import World, program


@program("kalman filter step", tags=["numeric", "feedback"])
def kalman(world: World):
    d = world.device
    F_, H = torch.tensor([[1.0, 0.1], [0, 1]], device=d), torch.tensor([[1.0, 0]], device=d)
    Q, R = 0.01 * torch.eye(2, device=d), 0.1 * torch.eye(1, device=d)

    def step(x, P, z):
        x, P = (F_ @ x[..., None])[..., 0], F_ @ P @ F_.T + Q
        S = H @ P @ H.T + R
        K = P @ H.T @ torch.linalg.inv(S)
        x = x + (K @ (z - x[:, :1])[..., None])[..., 0]
        return x, (torch.eye(2, device=x.device) - K @ H) @ P

    f = world.graphed(step, ladder=[1, 2, 4])
    for n in (3, 4):
        x, P = torch.zeros(n, 2, device=d), torch.eye(2, device=d).expand(n, 2, 2)
        for _ in range(4):
            x, P = f(x, P, world.randn(n, 1))
        yield x, P
    world.diagnose(f, x, P, world.randn(4, 1))


@program("k-means: assignment and update", tags=["numeric", "batch-dependent"])
def kmeans(world: World):
    def step(points, centres):
        labels = torch.cdist(points, centres).argmin(1)
        one_hot = torch.nn.functional.one_hot(labels, centres.shape[0]).to(points)
        return labels, (one_hot.T @ points) / one_hot.sum(0)[:, None].clamp(min=1)

    f = world.graphed(step, ladder=[8, 16], shared=["centres"])
    for n in (16, 12):
        points, centres = world.randn(n, 2), world.randn(3, 2)
        for _ in range(3):
            labels, centres = f(points, centres)
        yield labels, centres
    world.diagnose(f, points, centres)


@program("k-means assignment only", tags=["numeric", "shared"])
def kmeans_assign(world: World):
    f = world.graphed(
        lambda points, centres: torch.cdist(points, centres).argmin(1), ladder=[8, 16], shared=["centres"]
    )
    for n in (16, 12, 3):
        yield f(world.randn(n, 2), world.randn(3, 2))
    world.diagnose(f, world.randn(5, 2), world.randn(3, 2))


@program("runge-kutta step with a learned field", tags=["numeric", "physics", "feedback"])
def runge_kutta(world: World):
    field = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).to(world.device)

    def rhs(t, y):
        return field(torch.cat([y, t.expand(len(y), 1)], 1))

    def step(y, t, h):
        k1 = rhs(t, y)
        k2 = rhs(t + h / 2, y + h / 2 * k1)
        k3 = rhs(t + h / 2, y + h / 2 * k2)
        k4 = rhs(t + h, y + h * k3)
        return y + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)

    f = world.graphed(step, ladder=[1, 2, 4], shared=["t", "h"])
    with torch.no_grad():
        for n in (2, 3):
            y, h = world.randn(n, 2), torch.tensor(0.1, device=world.device)
            for i in range(4):
                y = f(y, torch.tensor(i * 0.1, device=world.device), h)
            yield y
    world.diagnose(f, y, torch.tensor(0.1, device=world.device), h)


@program("springs and masses, velocity verlet", tags=["numeric", "physics", "feedback"])
def verlet(world: World):
    def force(x):
        return -x + 0.1 * (x.roll(1, -1) - x)

    def step(x, v, dt=0.05):
        v = v + 0.5 * dt * force(x)
        x = x + dt * v
        return x, v + 0.5 * dt * force(x)

    f = world.graphed(step, ladder=[1, 2, 4])
    x, v = world.randn(3, 5), torch.zeros(3, 5, device=world.device)
    energies = []
    for _ in range(8):
        x, v = f(x, v)
        energies.append((0.5 * v**2).sum() + (0.5 * x**2).sum())
    yield x, v, torch.stack(energies)
    world.diagnose(f, x, v)


@program("n-body: all particles are one row", tags=["numeric", "physics"])
def n_body(world: World):
    def accelerations(positions, masses):
        r = positions[:, None] - positions[:, :, None]
        d3 = (r.pow(2).sum(-1) + 0.1).pow(-1.5)
        return (masses[:, None, :, None] * r * d3[..., None]).sum(2)

    f = world.graphed(accelerations, ladder=[1, 2, 4])
    for n in (1, 3):
        yield f(world.randn(n, 5, 3), world.rand(n, 5))
    world.diagnose(f, world.randn(3, 5, 3), world.rand(3, 5))


@program("n-body: every particle is a row", tags=["numeric", "physics", "batch-dependent"])
def n_body_rows(world: World):
    def accelerations(positions, masses):
        r = positions[None] - positions[:, None]
        d3 = (r.pow(2).sum(-1) + 0.1).pow(-1.5)
        return (masses[None, :, None] * r * d3[..., None]).sum(1)

    f = world.graphed(accelerations, ladder=[4, 8])
    for n in (8, 6, 4):
        yield f(world.randn(n, 3), world.rand(n))
    world.diagnose(f, world.randn(6, 3), world.rand(6))


@program("game of life on a torus", tags=["numeric", "integers", "feedback"])
def life(world: World):
    kernel = torch.tensor([[1, 1, 1], [1, 0, 1], [1, 1, 1]], device=world.device).float()[None, None]

    def step(board):
        padded = nn.functional.pad(board[:, None].float(), (1, 1, 1, 1), mode="circular")
        around = nn.functional.conv2d(padded, kernel)[:, 0].int()
        return ((around == 3) | ((around == 2) & (board == 1))).int()

    f = world.graphed(step, ladder=[1, 2])
    for n in (2, 1):
        board = world.randint(2, n, 6, 6, dtype=torch.int32)
        for _ in range(5):
            board = f(board)
        yield board
    world.diagnose(f, board)


@program("linear systems solved by cholesky", tags=["numeric"])
def cholesky(world: World):
    def solve(a, b):
        spd = a @ a.mT + torch.eye(a.shape[-1], device=a.device)
        return torch.cholesky_solve(b[..., None], torch.linalg.cholesky(spd))[..., 0]

    f = world.graphed(solve, ladder=[1, 2, 4])
    for n in (3, 4):
        yield f(world.randn(n, 3, 3), world.randn(n, 3))
    world.diagnose(f, world.randn(3, 3, 3), world.randn(3, 3))


@program("least squares by linalg.solve in double precision", tags=["numeric", "double"])
def solve_double(world: World):
    def fit(x, y):
        return torch.linalg.solve(x.mT @ x + 1e-3 * torch.eye(2, device=x.device, dtype=x.dtype), x.mT @ y)

    f = world.graphed(fit, ladder=[1, 2, 4])
    for n in (2, 3):
        yield f(world.randn(n, 6, 2, dtype=torch.float64), world.randn(n, 6, 1, dtype=torch.float64))
    world.diagnose(f, world.randn(2, 6, 2, dtype=torch.float64), world.randn(2, 6, 1, dtype=torch.float64))


@program("singular values and determinant", tags=["numeric"])
def svd(world: World):
    def describe(m):
        return torch.linalg.svdvals(m), torch.linalg.det(m), torch.linalg.matrix_norm(m)

    f = world.graphed(describe, ladder=[1, 2, 4])
    for n in (3, 1):
        yield f(world.randn(n, 3, 3))
    world.diagnose(f, world.randn(3, 3, 3))


@program("newton's method until it converges", tags=["numeric", "host-values"])
def newton(world: World):
    def root(a):
        x = a.clone()
        for _ in range(20):
            new = 0.5 * (x + a / x)
            if (new - x).abs().max() < 1e-6:
                break
            x = new
        return x

    f = world.graphed(root, ladder=[2, 4])
    for n in (4, 3):
        yield f(world.rand(n) + 0.5)
    world.diagnose(f, world.rand(3) + 0.5)


@program("newton's method with a fixed number of steps", tags=["numeric"])
def newton_fixed(world: World):
    def root(a, steps=8):
        x = torch.ones_like(a)
        for _ in range(steps):
            x = 0.5 * (x + a / x)
        return x

    f = world.graphed(root, ladder=[1, 2, 4], pads={"a": 1.0})
    for n in (4, 3, 1):
        yield f(world.rand(n) + 0.5)
    world.diagnose(f, world.rand(3) + 0.5)


@program("conjugate gradients, matrix-free", tags=["numeric"])
def conjugate_gradients(world: World):
    def solve(b, steps=6):
        def A(v):
            return 2.5 * v - v.roll(1, -1) - v.roll(-1, -1)

        x, r = torch.zeros_like(b), b
        p, rs = r, (r * r).sum(-1, keepdim=True)
        for _ in range(steps):
            Ap = A(p)
            alpha = rs / (p * Ap).sum(-1, keepdim=True).clamp(min=1e-12)
            x, r = x + alpha * p, r - alpha * Ap
            new = (r * r).sum(-1, keepdim=True)
            p, rs = r + new / rs.clamp(min=1e-12) * p, new
        return x

    f = world.graphed(solve, ladder=[1, 2, 4])
    for n in (2, 3):
        yield f(world.randn(n, 8)).round(decimals=2)
    world.diagnose(f, world.randn(3, 8))


@program("sinkhorn normalisation in the log domain", tags=["numeric"])
def sinkhorn(world: World):
    def transport(cost):
        log = -cost / 0.5
        for _ in range(5):
            log = log - log.logsumexp(-1, keepdim=True)
            log = log - log.logsumexp(-2, keepdim=True)
        return log.exp()

    f = world.graphed(transport, ladder=[1, 2, 4])
    for n in (2, 4, 3):
        yield f(world.rand(n, 4, 4))
    world.diagnose(f, world.rand(3, 4, 4))


@program("monte carlo estimate with a fixed set of points", tags=["numeric"])
def monte_carlo(world: World):
    points = torch.randn(64, device=world.device)
    f = world.graphed(
        lambda s, k: (s[:, None] * (0.2 * points).exp() - k[:, None]).clamp(min=0).mean(1), ladder=[1, 2, 4]
    )
    for n in (3, 4):
        yield f(world.rand(n) + 0.5, world.rand(n))
    world.diagnose(f, world.rand(3), world.rand(3))


@program("monte carlo with numbers drawn in the step", tags=["numeric", "random"])
def monte_carlo_random(world: World):
    def price(s):
        z = torch.randn(s.shape[0], 4096, device=s.device)
        return (s[:, None] * (0.1 * z).exp()).mean(1)

    f = world.graphed(price, ladder=[1, 2, 4])
    for n in (3, 4):
        s = world.rand(n) + 0.5
        yield torch.allclose(f(s), s * math.exp(0.005), rtol=0.02)
    a, b = f(s).clone(), f(s)
    yield torch.equal(a, b)
    world.diagnose(f, s)


@program("quaternion rotations", tags=["numeric"])
def quaternions(world: World):
    def rotate(q, v):
        q = q / q.norm(dim=-1, keepdim=True).clamp(min=1e-8)
        w, u = q[:, :1], q[:, 1:]
        return v + 2 * torch.linalg.cross(u, torch.linalg.cross(u, v) + w * v)

    f = world.graphed(rotate, ladder=[1, 2, 4])
    for n in (3, 1, 4):
        yield f(world.randn(n, 4), world.randn(n, 3))
    world.diagnose(f, world.randn(3, 4), world.randn(3, 3))


@program("interpolation by searchsorted", tags=["numeric"])
def interpolation(world: World):
    grid = torch.linspace(-2, 2, 9, device=world.device)
    values = grid.sin()

    def lookup(x):
        i = torch.searchsorted(grid, x).clamp(1, 8)
        w = (x - grid[i - 1]) / (grid[i] - grid[i - 1])
        return torch.lerp(values[i - 1], values[i], w)

    f = world.graphed(lookup, ladder=[1, 4, 8])
    for n in (5, 8):
        yield f(world.randn(n))
    world.diagnose(f, world.randn(5))


@program("histogram per row with scatter_add", tags=["numeric", "integers"])
def histogram(world: World):
    def count(x):
        bins = ((x.clamp(-2, 2) + 2) / 4 * 7.999).long()
        return torch.zeros(len(x), 8, dtype=torch.int64, device=x.device).scatter_add_(
            1, bins, torch.ones_like(bins)
        )

    f = world.graphed(count, ladder=[1, 2, 4])
    for n in (3, 4):
        yield f(world.randn(n, 20))
    world.diagnose(f, world.randn(3, 20))


@program("hamming distances of packed bits", tags=["numeric", "integers"])
def hamming(world: World):
    def distance(a, b):
        x = a ^ b
        return sum(((x >> i) & 1) for i in range(8)).sum(-1)

    f = world.graphed(distance, ladder=[1, 2, 4])
    for n in (2, 3):
        yield f(world.randint(256, n, 4, dtype=torch.int32), world.randint(256, n, 4, dtype=torch.int32))
    world.diagnose(
        f, world.randint(256, 3, 4, dtype=torch.int32), world.randint(256, 3, 4, dtype=torch.int32)
    )


@program("boolean logic and any, all", tags=["numeric", "integers"])
def logic(world: World):
    def rules(flags, ages):
        adult = ages >= 18
        return {
            "allowed": (flags.any(1) & adult) | flags.all(1),
            "count": flags.sum(1),
            "xor": flags[:, 0] ^ adult,
        }

    f = world.graphed(rules, ladder=[1, 4, 8])
    for n in (5, 8):
        yield f(world.randint(2, n, 3).bool(), world.randint(40, n))
    world.diagnose(f, world.randint(2, 5, 3).bool(), world.randint(40, 5))


@program("running mean metric, sums over the batch in buffers", tags=["metrics", "state", "batch-dependent"])
def running_mean(world: World):
    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("total", torch.zeros(()))
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))

        def forward(self, x):
            self.total += x.sum()
            self.count += x.numel()
            return self.total / self.count

    f = world.graphed(Mean().to(world.device), ladder=[4, 8])
    for n in (8, 5, 4):
        yield f(world.randn(n))
    world.diagnose(f, world.randn(5))


@program("confusion matrix accumulated in a buffer", tags=["metrics", "state", "batch-dependent"])
def confusion(world: World):
    class Confusion(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("matrix", torch.zeros(3, 3, dtype=torch.int64))

        def forward(self, prediction, target):
            index = target * 3 + prediction
            self.matrix += torch.bincount(index, minlength=9).view(3, 3)
            return (prediction == target).float()

    f = world.graphed(Confusion().to(world.device), ladder=[4, 8])
    for n in (8, 5, 4):
        yield f(world.randint(3, n), world.randint(3, n))
    yield f.matrix.diagonal().sum().item()
    world.diagnose(f, world.randint(3, 5), world.randint(3, 5))


@program("metric object with update and compute", tags=["metrics", "python-state"])
def metric_object(world: World):
    class Accuracy:
        def __init__(self):
            self.right = self.seen = 0

        def update(self, logits, labels):
            self.right += int((logits.argmax(-1) == labels).sum())
            self.seen += len(labels)

        def compute(self):
            return self.right / self.seen

    net, accuracy = nn.Linear(4, 3).to(world.device), Accuracy()
    f = world.graphed(net, ladder=[4, 8])
    with torch.no_grad():
        for n in (8, 5, 8):
            accuracy.update(f(world.randn(n, 4)), world.randint(3, n))
    yield accuracy.compute(), accuracy.seen
    world.diagnose(f, world.randn(5, 4))


@program("per-row squared error, averaged outside", tags=["metrics", "results-kept"])
def squared_error(world: World):
    net = nn.Linear(4, 1).to(world.device)
    f = world.graphed(lambda x, y: (net(x).squeeze(-1) - y) ** 2, ladder=[4, 8])
    losses = []
    with torch.no_grad():
        for n in (8, 8, 3):
            losses.append(f(world.randn(n, 4), world.randn(n)))
    yield torch.cat(losses).mean(), [round(x.mean().item(), 4) for x in losses]
    world.diagnose(f, world.randn(5, 4), world.randn(5))


@program("evaluation that returns a mean loss", tags=["metrics", "batch-dependent"])
def mean_loss(world: World):
    net = nn.Linear(4, 3).to(world.device)

    @torch.no_grad()
    def evaluate(x, y):
        logits = net(x)
        return nn.functional.cross_entropy(logits, y), (logits.argmax(-1) == y).float().mean()

    f = world.graphed(evaluate, ladder=[4, 8])
    for n in (8, 5, 4):
        yield f(world.randn(n, 4), world.randint(3, n))
    world.diagnose(f, world.randn(5, 4), world.randint(3, 5))


@program("evaluation that returns a mean loss, always full batches", tags=["metrics"])
def mean_loss_full(world: World):
    net = nn.Linear(4, 3).to(world.device)

    @torch.no_grad()
    def evaluate(x, y):
        return nn.functional.cross_entropy(net(x), y)

    f = world.graphed(evaluate, ladder=[8])
    for _ in range(3):
        yield f(world.randn(8, 4), world.randint(3, 8)).item()
    yield f(world.randn(5, 4), world.randint(3, 5)).item()
    world.diagnose(f, world.randn(8, 4), world.randint(3, 8))


@program("min-max observer before quantisation", tags=["metrics", "quantisation", "state"])
def observer(world: World):
    class Observer(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("low", torch.tensor(float("inf")))
            self.register_buffer("high", torch.tensor(float("-inf")))

        def forward(self, x):
            self.low.copy_(torch.minimum(self.low, x.amin()))
            self.high.copy_(torch.maximum(self.high, x.amax()))
            return x

    model = nn.Sequential(Observer(), nn.Linear(4, 4), Observer()).to(world.device)
    f = world.graphed(model, ladder=[4, 8])
    with torch.no_grad():
        for n in (8, 6, 4):
            yield f(world.randn(n, 4) + 3)
    yield model[0].low, model[0].high, model[2].low
    world.diagnose(f, world.randn(6, 4) + 3)


@program("fake quantisation with fixed scale", tags=["quantisation"])
def fake_quantisation(world: World):
    class FakeQuant(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.tensor(0.1))
            self.register_buffer("zero", torch.tensor(3))
            self.lin = nn.Linear(4, 4)

        def forward(self, x):
            q = (x / self.scale + self.zero).round().clamp(0, 255)
            return self.lin((q - self.zero) * self.scale), q.to(torch.uint8)

    f = world.graphed(FakeQuant().to(world.device), ladder=[1, 2, 4])
    with torch.no_grad():
        for n in (3, 4):
            yield f(world.randn(n, 4))
    world.diagnose(f, world.randn(3, 4))


@program("int8 weights dequantised in forward", tags=["quantisation", "integers"])
def int8_weights(world: World):
    class Int8Linear(nn.Module):
        def __init__(self, linear):
            super().__init__()
            scale = linear.weight.abs().amax(1, keepdim=True) / 127
            self.register_buffer("weight", (linear.weight / scale).round().to(torch.int8).detach())
            self.register_buffer("scale", scale.detach())
            self.bias = linear.bias

        def forward(self, x):
            return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)

    f = world.graphed(Int8Linear(nn.Linear(6, 3)).to(world.device), ladder=[1, 2, 4])
    with torch.no_grad():
        for n in (4, 3):
            yield f(world.randn(n, 6))
    world.diagnose(f, world.randn(3, 6))


@program("per-token dynamic quantisation of activations", tags=["quantisation"])
def dynamic_activations(world: World):
    w = torch.randn(3, 6).to(world.device)

    def linear(x):
        scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-5) / 127
        return ((x / scale).round() @ w.T) * scale

    f = world.graphed(linear, ladder=[1, 2, 4])
    for n in (4, 3):
        yield f(world.randn(n, 6))
    world.diagnose(f, world.randn(3, 6))


@program(
    "per-tensor dynamic quantisation: the scale comes from the batch",
    tags=["quantisation", "batch-dependent"],
)
def dynamic_per_tensor(world: World):
    w = torch.randn(3, 6).to(world.device)

    def linear(x):
        scale = x.abs().max() / 127
        return ((x / scale).round() @ w.T) * scale

    f = world.graphed(linear, ladder=[1, 2, 4])
    for n in (4, 3, 1):
        yield f(world.randn(n, 6))
    world.diagnose(f, world.randn(3, 6))


@program("batch normalisation by hand over the batch", tags=["numeric", "batch-dependent"])
def batch_norm_by_hand(world: World):
    f = world.graphed(lambda x: (x - x.mean(0)) / (x.std(0) + 1e-5), ladder=[4, 8])
    for n in (8, 5, 4):
        yield f(world.randn(n, 3))
    world.diagnose(f, world.randn(5, 3))


@program("scores relative to the best of the batch", tags=["numeric", "batch-dependent"])
def relative_scores(world: World):
    f = world.graphed(lambda s: s - s.max(), ladder=[4, 8])
    for n in (8, 5, 4):
        yield f(world.randn(n))
        yield f(world.randn(n) - 5)
    world.diagnose(f, world.randn(5))


@program("cumulative sum over the batch", tags=["numeric", "batch-dependent"])
def cumulative(world: World):
    f = world.graphed(lambda x: x.cumsum(0), ladder=[4, 8])
    for n in (8, 5, 4):
        yield f(world.randn(n))
    world.diagnose(f, world.randn(5))
