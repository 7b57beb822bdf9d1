"""Recommenders and graph networks: lookups, hashing, scattering."""

import torch
from torch import nn
from torch.nn import functional as F

from corpus.registry import World, program


@program("matrix factorisation with biases", tags=["recommender"])
def factorisation(world: World):
    class MF(nn.Module):
        def __init__(self):
            super().__init__()
            self.users, self.items = nn.Embedding(20, 4), nn.Embedding(30, 4)
            self.bias = nn.Embedding(30, 1)

        def forward(self, user, item):
            return (self.users(user) * self.items(item)).sum(-1) + self.bias(item).squeeze(-1)

    f = world.graphed(MF().to(world.device), ladder=[1, 4, 16])
    with torch.no_grad():
        for n in (9, 1, 16, 30):
            yield f(world.randint(20, n), world.randint(30, n)).sigmoid()
    world.diagnose(f, world.randint(20, 3), world.randint(30, 3))


@program("embedding bags of fixed length with weights", tags=["recommender"])
def bags(world: World):
    bag = nn.EmbeddingBag(30, 4, mode="sum").to(world.device)

    def pooled(ids, weights):
        return bag(ids, per_sample_weights=weights)

    f = world.graphed(pooled, ladder=[1, 2, 4, 8])
    with torch.no_grad():
        for n in (5, 8, 2):
            yield f(world.randint(30, n, 3), world.rand(n, 3))
    world.diagnose(f, world.randint(30, 3, 3), world.rand(3, 3))


@program("dlrm: dense and sparse features, pairwise interactions", tags=["recommender"])
def dlrm(world: World):
    class DLRM(nn.Module):
        def __init__(self):
            super().__init__()
            self.bottom = nn.Linear(5, 4)
            self.tables = nn.ModuleDict({name: nn.Embedding(10, 4) for name in ("country", "device", "age")})
            self.top = nn.Linear(4 + 6, 1)
            self.register_buffer("pairs", torch.tril_indices(4, 4, -1))

        def forward(self, dense, sparse):
            x = self.bottom(dense).relu()
            vectors = torch.stack([x, *(self.tables[k](sparse[k]) for k in sorted(sparse))], 1)
            products = vectors @ vectors.transpose(1, 2)
            return self.top(torch.cat([x, products[:, self.pairs[0], self.pairs[1]]], 1)).squeeze(1)

    f = world.graphed(DLRM().to(world.device), ladder=[1, 4, 8])
    with torch.no_grad():
        for n in (8, 3):
            yield f(world.randn(n, 5), {k: world.randint(10, n) for k in ("country", "device", "age")})
            yield f(world.randn(n, 5), {k: world.randint(10, n) for k in ("age", "country", "device")})
    world.diagnose(f, world.randn(3, 5), {k: world.randint(10, 3) for k in ("country", "device", "age")})


@program("feature hashing with integer arithmetic", tags=["recommender", "integers"])
def hashing(world: World):
    table = nn.Embedding(16, 3).to(world.device)

    def lookup(ids):
        hashed = ((ids * 2654435761) ^ (ids >> 7)) % 16
        return table(hashed).mean(1), hashed

    f = world.graphed(lookup, ladder=[1, 2, 4])
    with torch.no_grad():
        for n in (3, 1):
            yield f(world.randint(10**6, n, 5))
    world.diagnose(f, world.randint(10**6, 3, 5))


@program("two towers, retrieval against a matrix of items", tags=["recommender"])
def two_towers(world: World):
    items = F.normalize(torch.randn(50, 4), dim=-1).to(world.device)
    tower = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).to(world.device)

    @torch.inference_mode()
    def retrieve(x, k=3):
        scores = F.normalize(tower(x), dim=-1) @ items.T
        return torch.topk(scores, k)

    f = world.graphed(retrieve, ladder=[1, 2, 4, 8])
    for n in (5, 8, 1):
        values, indices = f(world.randn(n, 6))
        yield values, indices
    yield f(world.randn(4, 6), k=1).indices
    world.diagnose(f, world.randn(3, 6))


@program("embedding table updated between calls", tags=["recommender", "state"])
def table_updated(world: World):
    emb = nn.Embedding(10, 3).to(world.device)
    f = world.graphed(emb, ladder=[1, 2, 4])
    ids = world.randint(10, 3)
    with torch.no_grad():
        yield f(ids).clone()
        emb.weight[ids[0]] += 1
        yield f(ids).clone()
        emb.weight.data = emb.weight.data.clone()
        emb.weight.data[0] = 0
        yield f(ids)
    world.diagnose(f, ids)


@program("clicks counted per item with index_add", tags=["recommender", "state"])
def click_counts(world: World):
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("clicks", torch.zeros(6))
            self.total = 0

        def forward(self, items, weight):
            self.clicks.index_add_(0, items, weight)
            return self.clicks[items] / self.clicks.sum().clamp(min=1e-6)

    f = world.graphed(Counter().to(world.device), ladder=[2, 4])
    for n in (4, 3, 2):
        yield f(world.randint(6, n), world.rand(n))
        yield f.clicks.clone()
    world.diagnose(f, world.randint(6, 4), world.rand(4))


@program("session model: masked gru, last item of each row", tags=["recommender", "recurrent"])
def session(world: World):
    class Session(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb, self.gru = nn.Embedding(12, 4, padding_idx=0), nn.GRU(4, 4, batch_first=True)

        def forward(self, items, lengths):
            h, _ = self.gru(self.emb(items))
            last = h[torch.arange(len(items), device=items.device), lengths - 1]
            return last @ self.emb.weight.T

    f = world.graphed(Session().to(world.device).eval(), ladder=[1, 2, 4], pads={"lengths": 1})
    with torch.no_grad():
        for n in (3, 4):
            yield f(world.randint(12, n, 5), world.randint(5, n) + 1)
    world.diagnose(f, world.randint(12, 3, 5), world.randint(5, 3) + 1)


@program("in-batch negatives: a similarity of all rows with all", tags=["recommender", "batch-dependent"])
def in_batch(world: World):
    def similarity(a, b):
        return F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).T

    f = world.graphed(similarity, ladder=[2, 4, 8])
    for n in (3, 8, 5):
        yield f(world.randn(n, 4), world.randn(n, 4))
    world.diagnose(f, world.randn(3, 4), world.randn(3, 4))


@program("softmax over the batch", tags=["recommender", "batch-dependent"])
def over_batch(world: World):
    f = world.graphed(lambda scores: scores.softmax(0), ladder=[2, 4, 8])
    for n in (3, 8, 2):
        yield f(world.randn(n, 2))
    world.diagnose(f, world.randn(3, 2))


@program("rank of each score within the batch", tags=["recommender", "batch-dependent"])
def ranks(world: World):
    f = world.graphed(lambda s: s.argsort(0).argsort(0), ladder=[4, 8])
    for n in (5, 8, 4):
        yield f(world.randn(n))
    world.diagnose(f, world.randn(5))


@program("message passing on a batch of dense graphs", tags=["graph-network"])
def dense_graphs(world: World):
    class GCN(nn.Module):
        def __init__(self):
            super().__init__()
            self.l1, self.l2 = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x, adjacency):
            a = adjacency + torch.eye(adjacency.shape[-1], device=x.device)
            d = a.sum(-1).rsqrt()
            a = d[:, :, None] * a * d[:, None, :]
            return (a @ self.l2((a @ self.l1(x)).relu())).mean(1)

    f = world.graphed(GCN().to(world.device), ladder=[1, 2, 4])
    with torch.no_grad():
        for n in (3, 1):
            yield f(world.randn(n, 5, 3), world.randint(2, n, 5, 5).float())
    world.diagnose(f, world.randn(3, 5, 3), world.randint(2, 3, 5, 5).float())


@program("edges scattered to fixed nodes, edges are the batch", tags=["graph-network"])
def edges(world: World):
    lin = nn.Linear(6, 4).to(world.device)
    nodes = torch.randn(7, 3).to(world.device)

    def aggregate(source, target, alive):
        messages = lin(torch.cat([nodes[source], nodes[target]], -1)) * alive[:, None]
        return messages, torch.zeros(7, 4, device=source.device).index_add(0, target, messages)

    f = world.graphed(aggregate, ladder=[4, 8, 16])
    with torch.no_grad():
        for n in (10, 16, 5):
            yield f(world.randint(7, n), world.randint(7, n), torch.ones(n, device=world.device))
    world.diagnose(f, world.randint(7, 5), world.randint(7, 5), torch.ones(5, device=world.device))


@program("graph attention with scatter_reduce and a softmax by node", tags=["graph-network"])
def graph_attention(world: World):
    def softmax_by(score, index, nodes=5):
        top = torch.full((nodes,), -1e9, device=score.device).scatter_reduce(0, index, score, "amax")
        e = (score - top[index]).exp()
        total = torch.zeros(nodes, device=score.device).scatter_add(0, index, e)
        return e / total[index].clamp(min=1e-9)

    f = world.graphed(softmax_by, ladder=[4, 8])
    for n in (8, 6, 4):
        yield f(world.randn(n), world.randint(5, n))
    world.diagnose(f, world.randn(6), world.randint(5, 6))


@program(
    "pooling of nodes to graphs with num_graphs read from the data", tags=["graph-network", "host-values"]
)
def global_pool(world: World):
    def pool(x, batch):
        graphs = int(batch.max()) + 1
        return torch.zeros(graphs, x.shape[1], device=x.device).index_add_(0, batch, x)

    f = world.graphed(pool, ladder=[4, 8])
    for n in (8, 6):
        yield f(world.randn(n, 3), torch.arange(n, device=world.device) // 3)
    world.diagnose(f, world.randn(6, 3), torch.arange(6, device=world.device) // 3)


@program("sparse adjacency held by the module", tags=["graph-network"])
def sparse_adjacency(world: World):
    class Propagate(nn.Module):
        def __init__(self):
            super().__init__()
            index = torch.randint(0, 6, (2, 12))
            adjacency = torch.sparse_coo_tensor(index, torch.ones(12), (6, 6)).coalesce()
            self.register_buffer("adjacency", adjacency.to_dense())

        def forward(self, x):
            return torch.einsum("ij,bjf->bif", self.adjacency, x).relu()

    f = world.graphed(Propagate().to(world.device), ladder=[1, 2, 4])
    for n in (2, 3):
        yield f(world.randn(n, 6, 2))
    world.diagnose(f, world.randn(2, 6, 2))


@program("sparse matrix times dense in the step", tags=["graph-network", "sparse"])
def sparse_matmul(world: World):
    index = torch.randint(0, 4, (2, 6))
    matrix = torch.sparse_coo_tensor(index, torch.ones(6), (4, 4)).coalesce().to(world.device)
    f = world.graphed(lambda x: torch.sparse.mm(matrix, x.T).T, ladder=[1, 2, 4])
    for n in (2, 4):
        yield f(world.randn(n, 4))
    world.diagnose(f, world.randn(2, 4))


@program("neighbours by distance: knn within a point cloud", tags=["graph-network", "vision"])
def knn(world: World):
    def neighbours(points, k=2):
        distance = torch.cdist(points, points)
        near = distance.topk(k + 1, largest=False).indices[..., 1:]
        batch = torch.arange(points.shape[0], device=points.device)[:, None, None]
        return points[batch, near].mean(2) - points

    f = world.graphed(neighbours, ladder=[1, 2, 4])
    for n in (2, 3, 4):
        yield f(world.randn(n, 6, 3))
    world.diagnose(f, world.randn(2, 6, 3))


@program("unique ids looked up once", tags=["recommender", "host-values"])
def unique_ids(world: World):
    table = nn.Embedding(9, 3).to(world.device)

    def lookup(ids):
        unique, inverse = torch.unique(ids, return_inverse=True)
        return table(unique)[inverse]

    f = world.graphed(lookup, ladder=[2, 4])
    with torch.no_grad():
        for n in (4, 3):
            yield f(world.randint(9, n))
    world.diagnose(f, world.randint(9, 3))


@program("rows of a batch filtered by a boolean mask", tags=["recommender", "host-values"])
def masked_rows(world: World):
    lin = nn.Linear(3, 2).to(world.device)

    def score(x, alive):
        out = torch.full((x.shape[0], 2), -1.0, device=x.device)
        out[alive] = lin(x[alive])
        return out

    f = world.graphed(score, ladder=[2, 4])
    with torch.no_grad():
        for n in (4, 3):
            yield f(world.randn(n, 3), world.randint(2, n).bool())
    world.diagnose(f, world.randn(3, 3), world.randint(2, 3).bool())


@program("features as a dictionary with optional entries", tags=["recommender", "structures"])
def optional_features(world: World):
    lin = nn.Linear(3, 2).to(world.device)

    def score(features):
        x = lin(features["dense"])
        if features.get("boost") is not None:
            x = x * features["boost"][:, None]
        return {"score": x.sum(-1), "boosted": features.get("boost") is not None}

    f = world.graphed(score, ladder=[1, 2, 4])
    with torch.no_grad():
        for n in (3, 2):
            yield f({"dense": world.randn(n, 3), "boost": None})
            yield f({"dense": world.randn(n, 3), "boost": world.rand(n)})
            yield f({"dense": world.randn(n, 3)})
    world.diagnose(f, {"dense": world.randn(3, 3), "boost": None})
